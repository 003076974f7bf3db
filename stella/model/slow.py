"""Slow weights: an exponential moving average of a model's weights, as a model of its own."""

import copy

import torch
from torch import Tensor, nn

from stella.errors import ConfigError
from stella.model.cav import CAV


class SlowWeights(nn.Module):
    """`slow.model` is a moving average of a model's weights that no gradient reaches.

    After step t it becomes d·itself + (1 − d)·model with probability `rate`, where d = min(1 − 1/(t+1), `decay`): the
    average starts as a plain mean, so that a large decay needs no warm-up. The trainer calls `follow` after every step
    for each SlowWeights that a method owns.
    """

    steps: Tensor  # followed so far

    def __init__(self, model: CAV, decay: float, rate: float = 1.0, generator: torch.Generator | None = None) -> None:
        super().__init__()
        check_shares(decay=decay, rate=rate)
        self.decay, self.rate, self.generator = decay, rate, generator
        self.model = copy.deepcopy(model).requires_grad_(False)
        device = next(model.parameters()).device
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))

    @torch.no_grad()
    def follow(self, model: CAV, taken: Tensor) -> None:
        """Move towards `model` after a step; nothing changes where `taken` (a bool scalar) is false."""
        self.steps += taken
        due = taken
        if self.generator is not None:
            due = taken & (torch.rand((), generator=self.generator, device=self.generator.device) < self.rate)
        weight = due * (1 / (self.steps + 1)).clamp_min(1 - self.decay)  # 1 − d
        for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, weight.to(ours.dtype))


def check_shares(path: str = "", /, **shares: float) -> None:
    """Refuse decays and probabilities outside [0, 1]; `path` is that of their keys."""
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ConfigError(f"{path}{name}={share} must lie between 0 and 1")

"""What CLS-ER and ESMER share: copies of the model that follow its weights slowly, and teach it on memory's clips."""

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from stella import losses, selection
from stella.errors import ConfigError
from stella.model.cav import CAV, Patches, Pretrained, Split

Rows = TypeVar("Rows", Patches, Split, Pretrained)


class Average(nn.Module):
    """A moving average of a model's weights: a model of its own, which no gradient reaches.

    After step t it becomes d·itself + (1 − d)·model with probability `rate`, d = min(1 − 1/(t+1), `alpha`). t counts
    the steps taken, this one included, as the original code of both methods does: the first may move it by a half.
    """

    steps: Tensor

    def __init__(self, model: CAV, alpha: float, rate: float) -> None:
        super().__init__()
        self.alpha, self.rate = alpha, rate
        self.model = copy.deepcopy(model).requires_grad_(False)
        device = next(model.parameters()).device
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))

    @torch.no_grad()
    def follow(self, model: CAV, generator: torch.Generator, taken: Tensor) -> None:
        """To be called once after each step; where it was not taken, nothing changes."""
        self.steps += taken
        due = taken & (selection.uniform(generator=generator) < self.rate)
        weight = due * (1 / (self.steps + 1)).clamp_min(1 - self.alpha)  # 1 − d
        for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, weight.to(ours.dtype))


def rows(x: Rows, which: slice) -> Rows:
    """Some of the clips."""
    return type(x)(*(tensor[which] for tensor in vars(x).values()))


def clip_loss(parts: Mapping[str, Tensor]) -> Tensor:
    """L of each clip [B] from its parts (`Method.clip_parts`)."""
    return torch.stack(list(parts.values())).sum(0)


def consistency(out: Pretrained, taught_a: Tensor, taught_v: Tensor) -> Tensor:
    """MSE(z_a, a teacher's) + MSE(z_v, a teacher's), each [n, D], over the last n clips of x ∪ m: memory's."""
    past = rows(out, slice(len(out.z_a) - len(taught_a), None))
    distance = losses.feature_penalty(past.z_a, taught_a) + losses.feature_penalty(past.z_v, taught_v)
    return distance.mean()


def check_shares(**shares: float) -> None:
    """Refuse decays and probabilities outside [0, 1]."""
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ConfigError(f"{name}={share} must lie between 0 and 1")

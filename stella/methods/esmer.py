"""ESMER: ER that learns less from clips on which a slow copy of the model errs much, and that copy teaches on memory's.

Clips are weighed by ℓ_s, the copy's loss on them, against its running mean μ. Left out, since it needs task boundaries:
the original's warm-up after each. `generators` beside "mask": "ema" decides after each step whether the copy follows.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stella.clip import Batch
from stella.errors import ConfigError
from stella.methods.base import Losses, MemoryConfig, ObjectiveConfig, clip_rows
from stella.methods.ema import Average, check_shares, clip_loss, consistency, rows
from stella.methods.er import ER
from stella.model.cav import CAV
from stella.rng import generator


@dataclass(frozen=True)
class ESMERConfig:
    """The paper's values on Continual-VS; what differs on Continual-AS stands beside it."""

    alpha_loss: float = 0.99  # α_l, what μ keeps of itself
    beta: float = 1.0  # up to β·μ a clip counts in full and may be remembered
    gamma: float = 0.15  # the weight of the distance to the copy (0.2 on Continual-AS)
    alpha: float = 0.999  # the most the copy keeps of itself
    rate: float = 0.2  # r, how often it follows

    def __post_init__(self) -> None:
        if not (self.beta > 0 and self.gamma >= 0):
            raise ConfigError(f"beta={self.beta} must be above 0, and gamma={self.gamma} must be 0 or more")
        check_shares(alpha_loss=self.alpha_loss, alpha=self.alpha, rate=self.rate)


class ESMER(ER):
    Config = ESMERConfig
    title = "ESMER"
    summary = "ER that learns less from clips on which a slow copy of the model errs, and from that copy on memory's"
    citation = (
        "Sarfraz et al., Error Sensitivity Modulation based Experience Replay: Mitigating Abrupt Representation Drift "
        "in Continual Learning, ICLR 2023"
    )
    cost = "twice the clips a step, + one pass without gradient over all of them, + a copy of the model"

    config: ESMERConfig
    mean: Tensor  # μ; infinite before the first step, when every clip counts in full and may be remembered

    def __init__(
        self, model: CAV, config: ESMERConfig, objective: ObjectiveConfig, memory: MemoryConfig, seed: int
    ) -> None:
        super().__init__(model, config, objective, memory, seed)
        self.stable = Average(model, config.alpha, config.rate)
        self.register_buffer("mean", torch.full((), math.inf, device=self.device))
        self.generators["ema"] = generator(seed, "ema", device=self.device)

    def loss(self, batch: Batch) -> Losses:
        """One mean over x ∪ m as in ER, current clips multiplied by their weights. (The original adds two means.)"""
        a, v, drawn = self.with_memory(batch)
        splits, now = self.splits(a, v), len(batch)
        out = self.model.pretrain(a, v, *splits)
        with torch.no_grad():
            stable = self.stable.model.pretrain(a, v, *splits)
            errors = clip_loss(self.clip_parts(rows(stable, slice(now))))  # ℓ_s [B], no clip of memory a negative
            enters = self.counts(errors)
            weight = torch.where(enters, 1, self.mean / errors)
            weight = torch.cat([weight, weight.new_ones(len(out.z_a) - now)])
        parts = {name: (weight * part).mean() for name, part in self.clip_parts(out).items()}
        distance = out.z_a.new_zeros(()) if drawn is None else consistency(out, stable.z_a[now:], stable.z_v[now:])
        keep = clip_rows(batch) | {"errors": errors, "enters": enters}
        return Losses(parts | {"consistency": self.config.gamma * distance}, keep)

    def counts(self, errors: Tensor) -> Tensor:
        """Bool [B]: the clips that count in full and may enter the reservoir."""
        return errors <= self.config.beta * self.mean

    def after_step(self, batch: Batch, losses: Losses, taken: Tensor) -> None:
        keep = dict(losses.keep)
        errors, enters = keep.pop("errors"), keep.pop("enters")
        super().after_step(batch, replace(losses, keep=keep), taken & enters)
        now = usual(errors)
        first, known = self.mean.isinf(), taken & now.isfinite()  # a weight of 0 hides an infinite error from `taken`
        mean = torch.where(first, now, self.config.alpha_loss * self.mean + (1 - self.config.alpha_loss) * now)
        self.mean.copy_(torch.where(known, mean, self.mean))

    def follow(self, taken: Tensor) -> None:
        self.stable.follow(self.model, self.generators["ema"], taken)

    @property
    def eval_model(self) -> CAV:
        """The copy, as in its publication."""
        return self.stable.model


def usual(errors: Tensor) -> Tensor:
    """The mean of errors [B] without those over their mean + 1 standard deviation."""
    limit = errors.mean() + errors.std(correction=min(1, len(errors) - 1))
    kept = errors <= limit
    return torch.where(kept, errors, 0).sum() / kept.sum()

"""ESMER: ER that learns less from clips on which a slow copy of the model has a high loss; the copy teaches replay.

ℓ_s is the slow copy's loss of a clip and μ its running mean, which starts at 0. The original's warm-up after each task
boundary is left out, since it needs boundaries.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stella.clip import Batch
from stella.config import check_values
from stella.losses import every, mean
from stella.methods.base import Losses, clip_rows, penalty
from stella.methods.er import Replay
from stella.model.cav import CAV
from stella.model.slow import SlowWeights, check_shares


@dataclass(frozen=True)
class ESMERConfig:
    """The paper's values on Continual-VS."""

    alpha_loss: float = 0.99  # α_l, largest decay of μ
    beta: float = 1.0  # clips with ℓ_s below β·μ have full weight, those up to it may be stored
    gamma: float = 0.15  # weight of the distance to the slow copy (0.2 on Continual-AS)
    alpha: float = 0.999  # largest decay of the slow copy
    rate: float = 0.2  # r, probability of an update of the slow copy after a step
    evaluate: Literal["working", "stable"] = "working"  # the original publication evaluates the slow copy

    def __post_init__(self) -> None:
        check_values(self, "args.", beta=(self.beta > 0, "be above 0"), gamma=(self.gamma >= 0, "not be negative"))
        check_shares("args.", alpha_loss=self.alpha_loss, alpha=self.alpha, rate=self.rate)


@dataclass(frozen=True)
class ESMERLosses(Losses):
    errors: Tensor | None = None  # ℓ_s [B] of the current clips
    admit: Tensor | None = None  # bool [B], clips that may be stored


class ESMER(Replay):
    Config = ESMERConfig
    title = "ESMER"
    summary = "ER that learns less from clips on which a slow copy of the model errs, and from that copy on memory's"
    citation = (
        "Sarfraz et al., Error Sensitivity Modulation based Experience Replay: Mitigating Abrupt Representation Drift "
        "in Continual Learning, ICLR 2023"
    )
    cost = "twice the clips a step, + one pass without gradient over all of them, + a copy of the model"
    random = ("ema",)

    config: ESMERConfig
    mean: Tensor  # μ
    updates: Tensor  # of μ so far; before the first one every clip has full weight and may be stored

    def setup(self) -> None:
        self.stable = SlowWeights(self.model, self.config.alpha, self.config.rate, self.generators["ema"])
        self.register_buffer("mean", torch.zeros((), device=self.device))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64, device=self.device))

    def loss(self, batch: Batch) -> Losses:
        """One mean over x ∪ m as in ER, with the current clips weighted."""
        a, v, drawn = self.with_memory(batch)
        splits, now = self.splits(a, v), len(batch)
        out = self.model.pretrain(a, v, *splits)
        with torch.no_grad():
            stable = self.stable.model.pretrain(a, v, *splits)
            parts = self.clip_parts(stable[:now])  # negatives: the current clips
            errors = torch.stack(list(parts.values())).sum(0)
            admit = self.low(errors)
            full = (self.updates == 0) | (errors < self.config.beta * self.mean)
            weight = torch.where(full, 1, self.mean / errors)
            weight = torch.cat([weight, weight.new_ones(len(out.z_a) - now)])
        parts = {name: mean(weight * part) for name, part in self.clip_parts(out).items()}
        distance = out.z_a.new_zeros(()) if drawn is None else penalty(out, stable.z_a[now:], stable.z_v[now:])
        return ESMERLosses(parts | {"consistency": self.config.gamma * distance}, clip_rows(batch), errors, admit)

    def low(self, errors: Tensor) -> Tensor:
        """Bool [B]: ℓ_s ≤ β·μ, or true while μ is unknown."""
        return (self.updates == 0) | (errors <= self.config.beta * self.mean)

    def after_batch(self, batch: Batch, losses: Losses) -> None:
        assert isinstance(losses, ESMERLosses) and losses.errors is not None and self.memory is not None
        self.memory.add(batch.ids, losses.admit, **losses.rows)
        now = trimmed_mean(every(losses.errors))
        known = now.isfinite()  # a clip's weight of 0 can hide an infinite error from the loss
        self.updates += known
        decay = (1 - 1 / (self.updates + 1)).clamp_max(self.config.alpha_loss)
        self.mean.copy_(torch.where(known, decay * self.mean + (1 - decay) * now, self.mean))

    @property
    def eval_model(self) -> CAV:
        return self.stable.model if self.config.evaluate == "stable" else self.model


def trimmed_mean(errors: Tensor) -> Tensor:
    """The mean of errors [B] without those above mean + one standard deviation."""
    limit = errors.mean() + errors.std(correction=min(1, len(errors) - 1))
    kept = errors <= limit
    return torch.where(kept, errors, 0).sum() / kept.sum()

"""DER++: ER with a penalty on the drift of the pooled outputs of drawn clips since they were stored."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stella.clip import Batch
from stella.columns import Column
from stella.config import check_values
from stella.memory import MemoryBatch
from stella.methods.base import (
    Losses,
    Method,
    ReplayConfig,
    clip_columns,
    clip_rows,
    output_columns,
    output_rows,
    penalty,
)
from stella.model.cav import CAVConfig, Patches, Pretrained


@dataclass(frozen=True)
class DERppConfig(ReplayConfig):
    alpha: float = 0.5  # weight of the penalty (1.0 on Continual-AS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, "args.", alpha=(self.alpha >= 0, "not be negative"))


class DERpp(Method):
    Config = DERppConfig
    title = "DER++"
    summary = "ER with a penalty on the drift of memory's pooled outputs"
    citation = "Buzzega et al., Dark Experience for General Continual Learning, NeurIPS 2020"
    cost = "twice the clips a step"

    config: DERppConfig

    @classmethod
    def columns(cls, model: CAVConfig, config: Any) -> dict[str, Column]:
        return clip_columns(model) | output_columns(model)

    def loss(self, batch: Batch) -> Losses:
        a, v, drawn = self.with_memory(batch)
        out = self.pretrain(*self.choose(a, v))
        parts = self.parts(out) | {"penalty": self.config.alpha * stored_penalty(out, drawn)}
        return Losses(parts, clip_rows(batch) | output_rows(out, batch))

    def choose(self, a: Patches, v: Patches) -> tuple[Patches, Patches]:
        """The patches to train on: all of them. The ablations Random and MATS choose some."""
        return a, v


def stored_penalty(out: Pretrained, drawn: MemoryBatch | None) -> Tensor:
    """The distance of the drawn clips' pooled outputs to the stored ones; 0 while the memory is empty."""
    return out.z_a.new_zeros(()) if drawn is None else penalty(out, drawn["z_a"], drawn["z_v"])

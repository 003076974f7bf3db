"""DER++: ER, and the pooled outputs of memory's clips shall stay what they were when the clips came."""

from dataclasses import dataclass
from typing import Any

from stella.clip import Batch
from stella.memory import Column
from stella.methods.base import (
    Losses,
    Method,
    clip_columns,
    clip_rows,
    output_columns,
    output_rows,
    penalty,
)
from stella.model.cav import CAVConfig, Patches


@dataclass(frozen=True)
class DERppConfig:
    alpha: float = 0.5  # the penalty's weight (1.0 on Continual-AS)


class DERpp(Method):
    Config = DERppConfig
    title = "DER++"
    summary = "ER with a penalty on the drift of memory's pooled outputs"
    citation = "Buzzega et al., Dark Experience for General Continual Learning, NeurIPS 2020"
    cost = "twice the clips a step"

    config: DERppConfig

    @classmethod
    def columns(cls, model_config: CAVConfig, config: Any) -> dict[str, Column]:
        return clip_columns(model_config) | output_columns(model_config)

    def loss(self, batch: Batch) -> Losses:
        a, v, drawn = self.with_memory(batch)
        out = self.pretrain(*self.choose(a, v))
        parts = self.parts(out) | {"penalty": self.config.alpha * penalty(out, drawn)}
        return Losses(parts, clip_rows(batch) | output_rows(out, batch))

    def choose(self, a: Patches, v: Patches) -> tuple[Patches, Patches]:
        """The patches to train on: all. (`ablations` choose some.)"""
        return a, v

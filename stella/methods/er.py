"""Experience Replay: L(x ∪ m) in one forward pass, with shared negatives."""

from typing import Any

from stella.clip import Batch
from stella.columns import Column
from stella.methods.base import Losses, Method, ReplayConfig, clip_columns, clip_rows
from stella.model.cav import CAVConfig


class Replay(Method):
    """What ER and its relatives share: whole clips in memory, L(x ∪ m)."""

    @classmethod
    def columns(cls, model: CAVConfig, config: Any) -> dict[str, Column]:
        return clip_columns(model)

    def loss(self, batch: Batch) -> Losses:
        a, v, _ = self.with_memory(batch)
        return Losses(self.parts(self.pretrain(a, v)), clip_rows(batch))


class ER(Replay):
    Config = ReplayConfig
    title = "ER"
    summary = "replays as many clips from memory as the batch has"
    citation = "Rolnick et al., Experience Replay for Continual Learning, NeurIPS 2019"
    cost = "twice the clips a step"

"""Experience Replay: L(x ∪ m) in one forward pass, with shared negatives."""

from dataclasses import dataclass
from typing import Any

from stella.clip import Batch
from stella.columns import Column
from stella.config import check_values
from stella.memory import MemoryBatch
from stella.methods.base import Losses, Method, clip_columns, clip_rows
from stella.model.cav import CAVConfig


@dataclass(frozen=True)
class ERConfig:
    draws: float = 1.0  # past clips for each current one

    def __post_init__(self) -> None:
        check_values(self, "args.", draws=(self.draws > 0, "be above 0: past clips for each current one"))


class Replay(Method):
    """What ER and its relatives share: whole clips in memory, L(x ∪ m)."""

    @classmethod
    def columns(cls, model: CAVConfig, config: Any) -> dict[str, Column]:
        return clip_columns(model)

    def loss(self, batch: Batch) -> Losses:
        a, v, _ = self.with_memory(batch)
        return Losses(self.parts(self.pretrain(a, v)), clip_rows(batch))


class ER(Replay):
    Config = ERConfig
    title = "ER"
    summary = "replays as many clips from memory as the batch has"
    citation = "Rolnick et al., Experience Replay for Continual Learning, NeurIPS 2019"
    cost = "twice the clips a step"

    config: ERConfig

    def draw(self, batch: Batch) -> MemoryBatch | None:
        assert self.memory is not None
        return self.memory.draw(len(batch), self.config.draws, to=self.device)

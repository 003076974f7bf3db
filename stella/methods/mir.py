"""MIR: of more clips than are replayed, those whose loss a step on the current clips would raise most; then ER."""

from dataclasses import dataclass

import torch

from stella.clip import Batch
from stella.errors import ConfigError
from stella.memory import MemoryBatch
from stella.methods.virtual import LooksAhead, VirtualConfig


@dataclass(frozen=True)
class MIRConfig(VirtualConfig):
    candidates: int = 5  # C, for each clip of the batch

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < 1:
            raise ConfigError(f"candidates={self.candidates} must be at least 1: that many are drawn for each clip")


class MIR(LooksAhead):
    Config = MIRConfig
    title = "MIR"
    summary = "ER with the clips from memory that a step on the batch alone would harm most"
    citation = "Aljundi et al., Online Continual Learning with Maximally Interfered Retrieval, NeurIPS 2019"
    cost = (
        "twice the clips a step; + one pass forward and back, + two passes without gradient over five times the clips"
    )

    config: MIRConfig

    def draw(self, batch: Batch) -> MemoryBatch | None:
        """The most interfered of C candidates a clip; all of them where there are no more than the batch has clips."""
        assert self.memory is not None
        drawn = self.memory.draw(self.config.candidates * len(batch), to=self.device)
        if drawn is None or len(drawn) <= len(batch):
            return drawn
        after = self.virtual_weights(batch)
        splits = self.virtual_splits(len(drawn))
        with torch.no_grad(), self.full_precision():
            clips = drawn["audio"], drawn["video"], splits, len(batch)
            loss_before, loss_after = self.clip_losses(self.weights(), *clips), self.clip_losses(after, *clips)
        chosen = (loss_after - loss_before).topk(len(batch)).indices
        # To the device with the slots, as the choice could not come to the host without waiting for it.
        slots = drawn.slots.to(self.device, non_blocking=True)[chosen]
        return MemoryBatch(slots, {name: rows[chosen] for name, rows in drawn.columns.items()})

"""MIR: replays those of several candidates whose loss a step on the current clips would raise most; then ER."""

from dataclasses import dataclass

import torch

from stella.clip import Batch
from stella.config import check_values
from stella.memory import MemoryBatch
from stella.methods.virtual import LooksAhead


@dataclass(frozen=True)
class MIRConfig:
    candidates: int = 5  # C, candidates drawn for each clip of the batch

    def __post_init__(self) -> None:
        check_values(self, "args.", candidates=(self.candidates >= 1, "be at least 1"))


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
        """The most interfered candidates, as many as the batch has clips; all of them if there are no more."""
        assert self.memory is not None
        drawn = self.memory.draw(self.config.candidates * len(batch), to=self.device)
        if drawn is None or not self.memory.more(drawn, len(batch)):
            return drawn
        after = self.virtual_weights(batch)
        with torch.no_grad():
            splits = self.virtual_splits(drawn["audio"], drawn["video"])
            clips = drawn["audio"], drawn["video"], splits, len(batch)
            increase = self.clip_losses(after, *clips) - self.clip_losses(self.weights(), *clips)
        return self.memory.top(drawn, increase, len(batch))

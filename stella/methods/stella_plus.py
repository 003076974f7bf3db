"""STELLA+: memory stores the selected patches and their positions instead of clips and scores.

At ρ = 0.5 twice the clips fit into the same bytes: give the memory's size in bytes, or twice the clips. STELLA++ is a
recipe: STELLA+ with 1.66 times the batch.
"""

from torch import Tensor

from stella.clip import Batch
from stella.columns import Column
from stella.memory import MemoryBatch
from stella.methods.base import drawn_patches, output_columns, patch_columns, patch_rows
from stella.methods.stella import STELLA, Scores, STELLAConfig, query_columns
from stella.model.cav import CAVConfig, Patches


class STELLAPlus(STELLA):
    title = "STELLA+"
    summary = "STELLA whose memory keeps the chosen patches alone: twice the clips in the same bytes"

    @classmethod
    def columns(cls, model: CAVConfig, config: STELLAConfig) -> dict[str, Column]:
        patches = patch_columns(model, config.kappa_a(model), config.kappa_v(model))
        return patches | output_columns(model) | query_columns(model, config)

    def choose(self, a: Patches, v: Patches, scores: Scores, drawn: MemoryBatch | None) -> tuple[Patches, Patches]:
        """κ patches of the current clips, and the stored patches of the drawn ones."""
        a, v = self.select(a, v, scores)
        if drawn is not None:
            past_a, past_v = drawn_patches(drawn)
            a, v = Patches.cat([a, past_a]), Patches.cat([v, past_v])
        return a, v

    def remember(self, batch: Batch, scores: Scores, kept_a: Patches, kept_v: Patches) -> dict[str, Tensor]:
        now = slice(len(batch))
        return patch_rows(kept_a[now], kept_v[now]) | {"q_a": scores.q_a, "q_v": scores.q_v}

"""STELLA+: memory stores the selected patches and their positions instead of clips and scores.

At ρ = 0.5 twice the clips fit into the same bytes: give the memory's size in bytes, or twice the clips. STELLA++ is a
recipe: STELLA+ with 1.66 times the batch.
"""

import torch
from torch import Tensor

from stella import codec
from stella.clip import Batch
from stella.memory import Column, MemoryBatch
from stella.methods.base import output_columns
from stella.methods.stella import STELLA, Scores, STELLAConfig, query_columns
from stella.model.cav import CAVConfig, Patches


class STELLAPlus(STELLA):
    title = "STELLA+"
    summary = "STELLA whose memory keeps the chosen patches alone: twice the clips in the same bytes"

    @classmethod
    def columns(cls, model: CAVConfig, config: STELLAConfig) -> dict[str, Column]:
        kappa_a, kappa_v, side = config.kappa_a(model), config.kappa_v(model), model.patch_size
        position = torch.int16 if max(model.patches_a, model.patches_v) < 2**15 else torch.int32
        patches = {
            "patches_a": Column(torch.float16, (kappa_a, side**2), codec.patches(kappa_a, side, 1)),
            "patches_v": Column(torch.uint8, (kappa_v, 3 * side**2), codec.patches(kappa_v, side, 3)),
            "positions_a": Column(position, (kappa_a,)),
            "positions_v": Column(position, (kappa_v,)),
        }
        return patches | output_columns(model) | query_columns(model, config)

    def choose(self, a: Patches, v: Patches, scores: Scores, drawn: MemoryBatch | None) -> tuple[Patches, Patches]:
        """κ patches of the current clips, and the stored patches of the drawn ones."""
        a, v = self.select(a, v, scores)
        if drawn is not None:
            a = Patches.cat([a, Patches(drawn["patches_a"], drawn["positions_a"].long())])
            v = Patches.cat([v, Patches(drawn["patches_v"], drawn["positions_v"].long())])
        return a, v

    def remember(self, batch: Batch, scores: Scores, kept_a: Patches, kept_v: Patches) -> dict[str, Tensor]:
        now = len(batch)
        return {
            "patches_a": kept_a.values[:now],
            "patches_v": kept_v.values[:now],
            "positions_a": kept_a.positions[:now],
            "positions_v": kept_v.positions[:now],
            "q_a": scores.q_a,
            "q_v": scores.q_v,
        }

"""GMED: memory's clips are edited, for good, towards what a step on the current clips would harm more; then ER."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stella.clip import Batch
from stella.memory import Column, MemoryBatch
from stella.methods.base import Losses, clip_columns, clip_rows
from stella.methods.virtual import LooksAhead, VirtualConfig, Weights
from stella.model.cav import CAVConfig

DRAWN = "drawn_"  # before the names of the drawn clips' rows, beside those of the current ones


@dataclass(frozen=True)
class GMEDConfig(VirtualConfig):
    alpha: float = 0.1  # length of an edit
    beta: float = 0.05  # weight of the loss itself (0.01 on Continual-AS)
    gamma: float = 1.0  # what is left of that length after each edit of the same clip


class GMED(LooksAhead):
    Config = GMEDConfig
    title = "GMED"
    summary = "ER whose memory is edited towards clips that a step on the batch alone would harm more"
    citation = (
        "Jin et al., Gradient-based Editing of Memory Examples for Online Task-free Continual Learning, NeurIPS 2021"
    )
    cost = "twice the clips a step; + three passes forward and back"

    config: GMEDConfig

    @classmethod
    def columns(cls, model_config: CAVConfig, config: Any) -> dict[str, Column]:
        """The clip as it came and the sum of its edits. One is some 1e-7 of the other: added up in half precision (or
        even in single) edits would vanish, and for numbers as small as these bfloat16 has the range. It has 8 bits: of
        edits that are all alike, the sum stands still after some 256."""
        clip = clip_columns(model_config)
        edits = {f"edit_{name}": Column(torch.bfloat16, column.shape) for name, column in clip.items()}
        return clip | edits | {"age": Column(torch.int32)}

    def loss(self, batch: Batch) -> Losses:
        audio, video = batch.audio, self.model.normalise(batch.video)
        keep = clip_rows(batch) | {f"edit_{name}": torch.zeros_like(rows) for name, rows in clip_rows(batch).items()}
        keep["age"] = torch.zeros_like(batch.ids)
        if (drawn := self.draw(batch)) is not None:
            edited = self.edit(batch, drawn)
            past_audio, past_video = self.clips(edited)
            audio, video = torch.cat([audio, past_audio]), torch.cat([video, past_video])
            keep |= {DRAWN + name: rows for name, rows in {"slots": edited.slots, **edited.columns}.items()}
        return Losses(self.parts(self.pretrain(self.model.patches_a(audio), self.model.patches_v(video))), keep)

    def clips(self, drawn: MemoryBatch) -> tuple[Tensor, Tensor]:
        """Audio and video as edited, pixels normalised."""
        video = self.model.normalise(drawn["video"])
        return drawn["audio"].to(video.dtype) + drawn["edit_audio"], video + drawn["edit_video"]

    def edit(self, batch: Batch, drawn: MemoryBatch) -> MemoryBatch:
        """m + α·γ^age·[(g₂ − g₁) + β·g₁], g₁ = ∇ₓℓ(m; θ) and g₂ = ∇ₓℓ(m; θ') with the same masks; one edit older.

        ℓ is the sum over the clips, so that a clip's edit is as long as its own loss demands, however many were drawn.
        The β term is added, as in the authors' code: it raises the loss as well.
        """
        after = self.virtual_weights(batch)
        splits = self.virtual_splits(len(drawn))
        audio, video = (x.requires_grad_() for x in self.clips(drawn))
        length = self.config.alpha * self.config.gamma ** drawn["age"].to(video.dtype)  # [n]

        def gradient(weights: Weights) -> tuple[Tensor, ...]:
            return self.gradients(self.clip_losses(weights, audio, video, splits).sum(), [audio, video])

        def edited(so_far: Tensor, g1: Tensor, g2: Tensor) -> Tensor:
            return so_far + length.view(-1, *[1] * (g1.dim() - 1)) * ((g2 - g1) + self.config.beta * g1)

        with self.full_precision():
            (g1_a, g1_v), (g2_a, g2_v) = gradient(self.weights()), gradient(after)
        columns = {
            "edit_audio": edited(drawn["edit_audio"], g1_a, g2_a),
            "edit_video": edited(drawn["edit_video"], g1_v, g2_v),
            "age": drawn["age"] + 1,
        }
        return MemoryBatch(drawn.slots, {**drawn.columns, **columns})

    def after_step(self, batch: Batch, losses: Losses, taken: Tensor) -> None:
        """Write the edits back, and only then add clips, which may take an edited one's place.

        Whole rows are written, clips too: where another batch of the same step has just put a clip into a slot, this
        becomes the edited clip's again and no mixture of two.
        """
        assert self.memory is not None
        edited = {name.removeprefix(DRAWN): rows for name, rows in losses.keep.items() if name.startswith(DRAWN)}
        if edited:
            self.memory.update(edited.pop("slots"), taken, **edited)
        keep = {name: rows for name, rows in losses.keep.items() if not name.startswith(DRAWN)}
        super().after_step(batch, replace(losses, keep=keep), taken)

"""GMED: memory's clips are edited, for good, towards what a step on the current clips would harm more; then ER."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stella.clip import Batch
from stella.memory import Column, MemoryBatch
from stella.methods.base import Losses, clip_columns, clip_rows, joined
from stella.methods.virtual import LooksAhead, VirtualConfig, Weights
from stella.model.cav import CAVConfig

EDIT = "edit_"  # before the names of the drawn clips' columns among those of the current ones


@dataclass(frozen=True)
class GMEDConfig(VirtualConfig):
    alpha: float = 0.1  # length of an edit
    beta: float = 0.05  # weight of the loss itself (0.01 on Continual-AS)
    gamma: float = 1.0  # what is left of an edit's length after each edit of the same clip


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
        """Pixels normalised, as an edit is no whole number of them: twice ER's bytes."""
        clip = clip_columns(model_config)
        return clip | {"video": Column(torch.float16, clip["video"].shape), "age": Column(torch.int32)}

    def loss(self, batch: Batch) -> Losses:
        now = replace(batch, video=self.model.normalise(batch.video))
        drawn = self.draw(now)
        edited = None if drawn is None else self.edit(now, drawn)
        a = self.model.patches_a(joined(now.audio, edited, "audio"))
        v = self.model.patches_v(joined(now.video, edited, "video"))
        keep = clip_rows(now) | {"age": torch.zeros_like(now.ids, dtype=torch.int32)}
        if edited is not None:
            keep |= {EDIT + name: rows for name, rows in {"slots": edited.slots, **edited.columns}.items()}
        return Losses(self.parts(self.pretrain(a, v)), keep)

    def edit(self, batch: Batch, drawn: MemoryBatch) -> MemoryBatch:
        """m + α·γ^age·[(g₂ − g₁) + β·g₁], g₁ = ∇ₓℓ(m; θ) and g₂ = ∇ₓℓ(m; θ') with the same masks; one edit older.

        ℓ is the sum over the clips, so that a clip's edit is the gradient of its own loss however many were drawn. The
        β term is added, as in the authors' code: it raises the loss as well.
        """
        after = self.virtual_weights(batch)
        splits = self.virtual_splits(len(drawn))
        precision = batch.video.dtype
        audio, video = (drawn[name].to(precision).requires_grad_() for name in ("audio", "video"))
        length = self.config.alpha * self.config.gamma ** drawn["age"].to(precision)  # [n]

        def gradient(weights: Weights) -> tuple[Tensor, ...]:
            return self.gradients(self.clip_losses(weights, audio, video, splits).sum(), [audio, video])

        def edited(x: Tensor, g1: Tensor, g2: Tensor) -> Tensor:
            return x.detach() + length.view(-1, *[1] * (x.dim() - 1)) * ((g2 - g1) + self.config.beta * g1)

        (g1_a, g1_v), (g2_a, g2_v) = gradient(self.weights()), gradient(after)
        columns = {"audio": edited(audio, g1_a, g2_a), "video": edited(video, g1_v, g2_v), "age": drawn["age"] + 1}
        return MemoryBatch(drawn.slots, {**drawn.columns, **columns})

    def after_step(self, batch: Batch, losses: Losses, taken: Tensor) -> None:
        """Write the edits back, and only then add clips, which may take an edited one's place.

        Whole rows are written, ids too: where another batch of the same step has just put a clip there, the slot
        becomes the edited clip's again and never a mixture.
        """
        assert self.memory is not None
        edited = {name.removeprefix(EDIT): rows for name, rows in losses.keep.items() if name.startswith(EDIT)}
        if edited:
            self.memory.update(edited.pop("slots"), taken, **edited)
        keep = {name: rows for name, rows in losses.keep.items() if not name.startswith(EDIT)}
        super().after_step(batch, replace(losses, keep=keep), taken)

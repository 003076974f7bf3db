"""GMED: drawn clips are edited for good, towards what a step on the current clips would harm more; then ER."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stella.clip import Batch
from stella.columns import Column
from stella.config import check_values
from stella.errors import ConfigError
from stella.losses import mean
from stella.memory import MemoryBatch
from stella.methods.base import Losses, MemoryConfig, clip_columns, clip_rows
from stella.methods.virtual import LooksAhead, Weights
from stella.model.cav import CAVConfig


@dataclass(frozen=True)
class GMEDConfig:
    alpha: float = 0.1  # step size of an edit
    beta: float = 0.05  # weight of the loss itself (0.01 on Continual-AS)
    gamma: float = 1.0  # decay of the step size with each edit of the same clip

    def __post_init__(self) -> None:
        check_values(
            self,
            "args.",
            **{name: (getattr(self, name) >= 0, "not be negative") for name in ("alpha", "beta", "gamma")},
        )


@dataclass(frozen=True)
class GMEDLosses(Losses):
    edited: MemoryBatch | None = None  # the drawn clips after their edit


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
    def columns(cls, model: CAVConfig, config: Any) -> dict[str, Column]:
        """The clip as it came and, apart, the sum of its edits: added to uint8 or float16, small edits would vanish.
        bfloat16 has the range for them; with its 8 bits a sum of equal edits stops growing after about 256."""
        clip = clip_columns(model)
        edits = {f"edit_{name}": Column(torch.bfloat16, column.shape) for name, column in clip.items()}
        return clip | edits | {"age": Column(torch.int32)}

    @classmethod
    def stored_columns(cls, model: CAVConfig, config: Any, memory: MemoryConfig) -> dict[str, Column] | None:
        if memory.codec is not None:
            raise ConfigError(
                f"memory.codec={memory.codec} does not fit GMED, whose edits of stored clips are smaller than the "
                "codec's error; set memory.codec=none"
            )
        return super().stored_columns(model, config, memory)

    def loss(self, batch: Batch) -> Losses:
        audio, video = batch.audio, self.model.normalise(batch.video)
        rows = clip_rows(batch) | {f"edit_{name}": torch.zeros_like(x) for name, x in clip_rows(batch).items()}
        rows["age"] = torch.zeros_like(batch.ids)
        edited = None
        if (drawn := self.draw(batch)) is not None:
            edited = self.edit(batch, drawn)
            past_audio, past_video = self.clips(edited)
            audio, video = torch.cat([audio, past_audio]), torch.cat([video, past_video])
        parts = self.parts(self.pretrain(self.model.patches_a(audio), self.model.patches_v(video)))
        return GMEDLosses(parts, rows, edited)

    def clips(self, drawn: MemoryBatch) -> tuple[Tensor, Tensor]:
        """Audio and normalised video with their edits."""
        video = self.model.normalise(drawn["video"])
        return drawn["audio"].to(video.dtype) + drawn["edit_audio"], video + drawn["edit_video"]

    def edit(self, batch: Batch, drawn: MemoryBatch) -> MemoryBatch:
        """m + α·γ^age·[(g₂ − g₁) + β·g₁], where g₁ = ∇ₓℓ(m; θ), g₂ = ∇ₓℓ(m; θ') with the same masks, and ℓ is the mean
        of L over the drawn clips. The β term is added, as in the authors' code: it raises the loss too."""
        after = self.virtual_weights(batch)
        audio, video = (x.requires_grad_() for x in self.clips(drawn))
        splits = self.virtual_splits(audio, video)
        length = self.config.alpha * self.config.gamma ** drawn["age"].to(video.dtype)  # [n]

        def gradient(weights: Weights) -> tuple[Tensor, ...]:
            return self.gradients(mean(self.clip_losses(weights, audio, video, splits)), [audio, video])

        def edited(so_far: Tensor, g1: Tensor, g2: Tensor) -> Tensor:
            return so_far + length.view(-1, *[1] * (g1.dim() - 1)) * ((g2 - g1) + self.config.beta * g1)

        (g1_a, g1_v), (g2_a, g2_v) = gradient(self.weights()), gradient(after)
        columns = {
            "edit_audio": edited(drawn["edit_audio"], g1_a, g2_a),
            "edit_video": edited(drawn["edit_video"], g1_v, g2_v),
            "age": drawn["age"] + 1,
        }
        return MemoryBatch(drawn.slots, {**drawn.columns, **columns})

    def after_batch(self, batch: Batch, losses: Losses) -> None:
        """Write the edits back, then add the current clips, which may replace edited ones.

        Whole rows are written: if another batch of the same step has just put a clip into a slot, the slot holds the
        edited clip again, not a mixture of two.
        """
        assert isinstance(losses, GMEDLosses) and self.memory is not None
        if losses.edited is not None:
            self.memory.update(losses.edited.slots, **losses.edited.columns)
        super().after_batch(batch, losses)

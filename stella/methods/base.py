"""What a method is: losses of a batch, and what it remembers of it. A method never sees a task.

`loss` gives named parts, `after_step` fills the memory, `follow` moves what follows the weights; backward, steps and
casts are the trainer's. What all methods share stands here: the objective L on given patches, the draw from memory, the
columns of a whole clip.

Random numbers come from `generators`, each for one purpose, so that methods that differ elsewhere see the same masks
and the same memory: "mask" gives each patch of each clip its noise [clips, L], audio first, current clips first.
"""

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from stella import losses, selection
from stella.clip import Batch
from stella.errors import ConfigError
from stella.memory import Column, Memory, MemoryBatch, capacity_for
from stella.model.avm import AVM
from stella.model.cav import CAV, CAVConfig, Patches, Pretrained, Split, split_by_noise
from stella.rng import generator


@dataclass(frozen=True)
class ObjectiveConfig:
    """L = recon_a + recon_v + λ·contrastive (Eq. recon-loss, contr-loss)."""

    contrast_weight: float = 0.1  # λ
    tau: float = 0.05
    mask_ratio: float = 0.8
    norm_pix: bool = True

    def __post_init__(self) -> None:
        if not (0 < self.mask_ratio < 1 and self.tau > 0 and self.contrast_weight >= 0):
            raise ConfigError(
                f"objective.mask_ratio={self.mask_ratio} must lie between 0 and 1, tau={self.tau} above 0 and "
                f"contrast_weight={self.contrast_weight} not below 0"
            )


@dataclass(frozen=True)
class MemoryConfig:
    """Exactly one of `clips` and `bytes` is given, the other is none."""

    clips: int | None = 2000
    bytes: int | None = None
    device: Literal["cpu", "model"] = "model"  # "model": where the model is; "cpu" where a GPU has no room for it


@dataclass(frozen=True)
class NoConfig:
    """For methods without hyper-parameters of their own."""


@dataclass(frozen=True)
class Losses:
    parts: dict[str, Tensor]  # scalars, already weighted
    keep: dict[str, Tensor] = field(default_factory=dict)  # [B, …] detached, the memory's columns of the current clips

    @property
    def total(self) -> Tensor:
        return reduce(operator.add, self.parts.values())


class Method(nn.Module, ABC):
    """Build one with `stella.methods.build`, on a model that is already on its device."""

    Config: ClassVar[type[Any]] = NoConfig
    title: ClassVar[str]  # as tables and plots call it
    summary: ClassVar[str]  # one line
    citation: ClassVar[str]
    cost: ClassVar[str]  # of a step beside Finetune's: one phrase
    joint: ClassVar[bool] = False  # trains on all tasks shuffled into one
    beta: float = 0.4  # the temperature at which importance is measured between tasks
    lr: float = 1e-4  # the learning rate; a trainer sets it to its own

    config: Any
    avm: AVM | None
    memory: Memory | None
    generators: dict[str, torch.Generator]  # all but the memory's own: the trainer saves them

    def __init__(self, model: CAV, config: Any, objective: ObjectiveConfig, memory: MemoryConfig, seed: int) -> None:
        super().__init__()
        self.check(model.config, config, objective)
        self.model, self.config, self.objective = model, config, objective
        self.avm = None
        self.device = next(model.parameters()).device
        self.generators = {"mask": generator(seed, "mask", device=self.device)}
        columns, where = self.columns(model.config, config), "cpu" if memory.device == "cpu" else self.device
        self.memory = None
        if columns is not None:
            capacity = capacity_for(columns, clips=memory.clips, bytes=memory.bytes)
            self.memory = Memory(columns, capacity, generator(seed, "memory", device=where))

    @classmethod
    def check(cls, model_config: CAVConfig, config: Any, objective: ObjectiveConfig) -> None:
        """Refuse what cannot be with a model of these sizes, before there is one."""
        for length in (model_config.patches_a, model_config.patches_v):
            check_kept(length, length, objective)

    @classmethod
    def columns(cls, model_config: CAVConfig, config: Any) -> dict[str, Column] | None:
        """What the memory keeps of each clip; None for a method without memory."""
        return None

    @abstractmethod
    def loss(self, batch: Batch) -> Losses:
        """Differentiable; never waits for the device."""

    def after_step(self, batch: Batch, losses: Losses, taken: Tensor) -> None:
        """To be called once for each batch, with its losses and whether its step was taken (a bool scalar, on the
        device: a method must not wait for it, and must change nothing where it is false)."""
        if self.memory is not None:
            self.memory.add(batch.ids, taken, **losses.keep)

    def follow(self, taken: Tensor) -> None:
        """To be called once for each step, however many batches it had, after these; `taken` as for `after_step`."""

    @property
    def eval_model(self) -> CAV:
        return self.model

    def draw(self, batch: Batch) -> MemoryBatch | None:
        """As many clips from memory as the batch has, on the model's device; None while there are none."""
        return self.memory.draw(len(batch), to=self.device) if self.memory is not None else None

    def with_memory(self, batch: Batch) -> tuple[Patches, Patches, MemoryBatch | None]:
        """x ∪ m, audio and video, and m: the current clips, then as many from memory."""
        drawn = self.draw(batch)
        a = self.model.patches_a(joined(batch.audio, drawn, "audio"))
        return a, self.model.patches_v(joined(batch.video, drawn, "video")), drawn

    def pretrain(self, a: Patches, v: Patches) -> Pretrained:
        """The backbone on these patches (all of a clip's or some), masked at random."""
        return self.model.pretrain(a, v, *self.splits(a, v))

    def splits(self, a: Patches, v: Patches) -> tuple[Split, Split]:
        """A random mask of these patches. Whoever runs several models on the same masks draws it once."""
        return self._split(a, self.model.config.patches_a), self._split(v, self.model.config.patches_v)

    def parts(self, out: Pretrained) -> dict[str, Tensor]:
        """The three parts of L, each the mean over the clips."""
        return {name: part.mean() for name, part in self.clip_parts(out).items()}

    def clip_parts(self, out: Pretrained) -> dict[str, Tensor]:
        """The three parts of L of each clip, weighted: [B] each. Clips are one another's negatives."""
        return self.recon_parts(out) | {"contrastive": self.contrastive_part(out.z_a, out.z_v)}

    def recon_parts(self, out: Pretrained) -> dict[str, Tensor]:
        target_a, target_v = out.target_a, out.target_v
        if self.objective.norm_pix:
            target_a, target_v = losses.norm_pix(target_a), losses.norm_pix(target_v)
        return {
            "recon_a": losses.reconstruction(out.recon_a, target_a),
            "recon_v": losses.reconstruction(out.recon_v, target_v),
        }

    def contrastive_part(self, z_a: Tensor, z_v: Tensor) -> Tensor:
        return self.objective.contrast_weight * losses.contrastive(z_a, z_v, self.objective.tau)

    def _split(self, patches: Patches, length: int) -> Split:
        """A share of *all* `length` patches is visible, the others of these are reconstructed.

        The noise belongs to a patch wherever it stands: whoever keeps all patches masks as if nothing were selected.
        """
        noise = selection.uniform(len(patches.positions), length, generator=self.generators["mask"])
        return split_by_noise(noise.gather(1, patches.positions), selection.visible(length, self.objective.mask_ratio))


def check_kept(kept: int, length: int, objective: ObjectiveConfig) -> None:
    """Refuse a selection that leaves nothing to see, or nothing to reconstruct beside it."""
    visible = selection.visible(length, objective.mask_ratio)
    if visible < 1:
        raise ConfigError(
            f"objective.mask_ratio={objective.mask_ratio:g} leaves none of {length} patches visible; "
            "lower it, or use a longer or larger input"
        )
    if not visible < kept <= length:
        raise ConfigError(
            f"keep_ratio keeps {kept} of {length} patches, of which {visible} are visible; "
            f"set it above {1 - objective.mask_ratio:g} and at most to 1"
        )


def clip_columns(config: CAVConfig) -> dict[str, Column]:
    """A clip as the model saw it."""
    return {
        "video": Column(torch.uint8, (config.frames, 3, config.image_size, config.image_size)),
        "audio": Column(torch.float16, (config.spec_frames, config.mel_bins)),
    }


def output_columns(config: CAVConfig) -> dict[str, Column]:
    """Its pooled outputs, for `penalty`."""
    return {"z_a": Column(torch.float32, (config.dim,)), "z_v": Column(torch.float32, (config.dim,))}


def clip_rows(batch: Batch) -> dict[str, Tensor]:
    return {"video": batch.video, "audio": batch.audio}


def output_rows(out: Pretrained, batch: Batch) -> dict[str, Tensor]:
    """Of the current clips, which stand before memory's."""
    return {"z_a": out.z_a[: len(batch)].detach(), "z_v": out.z_v[: len(batch)].detach()}


def joined(now: Tensor, drawn: MemoryBatch | None, name: str) -> Tensor:
    """Current rows, then the drawn ones' column: x ∪ m."""
    return now if drawn is None else torch.cat([now, drawn[name]])


def penalty(out: Pretrained, drawn: MemoryBatch | None) -> Tensor:
    """MSE(z_a, stored) + MSE(z_v, stored) over the memory part of x ∪ m; 0 while the memory is empty."""
    if drawn is None:
        return out.z_a.new_zeros(())
    past_a, past_v = out.z_a[-len(drawn) :], out.z_v[-len(drawn) :]
    distance = losses.feature_penalty(past_a, drawn["z_a"]) + losses.feature_penalty(past_v, drawn["z_v"])
    return distance.mean()

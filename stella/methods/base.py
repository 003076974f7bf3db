"""What a method is: the losses of a batch, and what it remembers of it. A method never sees a task.

A method has at least a `loss`. What it stores of a batch (`after_batch`), what it does after a step (`after_step`),
which model is evaluated and the rest have defaults. Backward, optimiser steps, casts, moving averages and skipping
non-finite steps belong to the trainer. This file has what methods share: the objective L on given patches, the draw
from memory, the columns of a whole clip.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from stella import codec, losses, selection
from stella.clip import Batch
from stella.columns import Column, capacity_for, coded
from stella.config import check_values
from stella.errors import ConfigError
from stella.memory import Memory, MemoryBatch
from stella.model.avm import AVM
from stella.model.cav import CAV, CAVConfig, Patches, Pretrained, Split, split_by_noise
from stella.rng import generator


@dataclass(frozen=True)
class ObjectiveConfig:
    """L = recon_a + recon_v + λ·contrastive (Eq. 8 and 9)."""

    contrast_weight: float = 0.1  # λ, weight of the contrastive loss
    tau: float = 0.05  # temperature of the contrastive loss
    mask_ratio: float = 0.8  # share of the patches that is masked
    norm_pix: bool = True  # reconstruct patches normalised one by one

    def __post_init__(self) -> None:
        check_values(
            self,
            "objective.",
            mask_ratio=(0 < self.mask_ratio < 1, "lie between 0 and 1"),
            tau=(self.tau > 0, "be above 0"),
            contrast_weight=(self.contrast_weight >= 0, "not be negative"),
        )


@dataclass(frozen=True)
class MemoryConfig:
    """Size, place and form of the rehearsal memory, whose size is given in clips or in bytes."""

    either: ClassVar[tuple[str, ...]] = ("clips", "bytes")

    clips: int | None = 2000  # capacity in clips; none: that of the bytes
    bytes: int | None = None  # capacity in bytes, instead of clips
    device: Literal["cpu", "model"] = "model"  # "model": on the model's device; "cpu" if the GPU has no room
    codec: Literal["dct"] | None = None  # dct: clips as DCT coefficients, in a seventh to a ninth of the bytes


@dataclass(frozen=True)
class NoConfig:
    """For methods without hyper-parameters."""


@dataclass(frozen=True)
class ReplayConfig:
    """For methods that train on the current clips and on drawn ones."""

    draws: float = 1.0  # past clips for each current one

    def __post_init__(self) -> None:
        check_values(self, "args.", draws=(self.draws > 0, "be above 0: past clips for each current one"))


@dataclass(frozen=True)
class Losses:
    """What `loss` returns. A method that needs more in `after_batch` returns a subclass."""

    parts: dict[str, Tensor]  # weighted scalars; their sum is trained on
    rows: dict[str, Tensor] = field(default_factory=dict)  # memory columns of the current clips [B, …], detached

    @property
    def total(self) -> Tensor:
        return reduce(operator.add, self.parts.values())


class Method(nn.Module, ABC):
    """Build one with `stella.methods.build`, on a model that is already on its device.

    Subclasses add modules and buffers in `setup`. State that changes from step to step is a buffer or a memory column.
    Random numbers come from `self.generators[name]`: "mask" and the names listed in `random`. One generator for each
    purpose: methods that differ elsewhere see the same masks and the same memory.
    """

    Config: ClassVar[type[Any]] = NoConfig
    title: ClassVar[str]  # name in tables and plots
    summary: ClassVar[str]  # one line
    citation: ClassVar[str]
    cost: ClassVar[str]  # cost of a step relative to Finetune, one phrase
    random: ClassVar[tuple[str, ...]] = ()  # generators besides "mask"
    joint: ClassVar[bool] = False  # trains on all tasks shuffled into one

    config: Any
    avm: AVM | None
    memory: Memory | None
    generators: dict[str, torch.Generator]  # saved with checkpoints

    def __init__(
        self,
        model: CAV,
        config: Any,
        objective: ObjectiveConfig,
        memory: MemoryConfig,
        seed: int,
        max_clips: int | None = None,
    ) -> None:
        """`max_clips` is the number of clips that the stream will bring; none: any number."""
        super().__init__()
        self.check(model.config, config, objective)
        self.model, self.config, self.objective = model, config, objective
        self.avm, self.memory = None, None
        self.device = next(model.parameters()).device
        self.generators = {name: generator(seed, name, device=self.device) for name in ("mask", *self.random)}
        if (columns := self.stored_columns(model.config, config, memory)) is not None:
            where = "cpu" if memory.device == "cpu" else self.device
            capacity = capacity_for(columns, clips=memory.clips, bytes=memory.bytes)
            self.memory = Memory(columns, capacity, generator(seed, "memory", device=where), max_clips)
        self.setup()

    # ---- what a method defines

    @classmethod
    def check(cls, model: CAVConfig, config: Any, objective: ObjectiveConfig) -> None:
        """Refuse a configuration that does not fit a model of these sizes, before it is built."""
        check_kept(objective, (model.patches_a, model.patches_v))

    @classmethod
    def columns(cls, model: CAVConfig, config: Any) -> dict[str, Column] | None:
        """Memory columns of a clip besides its id; None for a method without memory."""
        return None

    @classmethod
    def stored_columns(cls, model: CAVConfig, config: Any, memory: MemoryConfig) -> dict[str, Column] | None:
        """The memory's columns in the form that `memory` asks for."""
        columns = cls.columns(model, config)
        return columns if columns is None or memory.codec is None else coded(columns)

    def setup(self) -> None:
        """Add modules and buffers of the method's own."""

    @abstractmethod
    def loss(self, batch: Batch) -> Losses:
        """The losses of a batch. Never waits for the device."""

    def before_step(self) -> None:
        """Called once between the backward pass and the step: parameters have `grad`, which may be changed in place."""

    def after_batch(self, batch: Batch, losses: Losses) -> None:
        """Called after the step for each of its batches. By default: offer the current clips to the reservoir."""
        if self.memory is not None:
            self.memory.add(batch.ids, **losses.rows)

    def after_step(self) -> None:
        """Called once after the step and after `after_batch` of all its batches."""

    rates: tuple[float, ...] = (1.0,)  # factors of the learning rate, one for each of `groups`

    def groups(self) -> list[list[nn.Parameter]]:
        """What is trained, in groups with a learning rate each."""
        return [[p for p in self.parameters() if p.requires_grad]]

    def attach(self, optimizer: torch.optim.Adam) -> None:
        """Called once with the optimiser of the run, for methods that look ahead of a step."""

    @property
    def eval_model(self) -> CAV:
        """The model that is evaluated and saved."""
        return self.model

    # ---- what methods share

    def draw(self, batch: Batch) -> MemoryBatch | None:
        """Clips from memory, `draws` for each of the batch, on the model's device; None while the memory is empty."""
        each = getattr(self.config, "draws", 1.0)
        return self.memory.draw(len(batch), each, to=self.device) if self.memory is not None else None

    def with_memory(self, batch: Batch) -> tuple[Patches, Patches, MemoryBatch | None]:
        """Audio and video patches of x ∪ m (current clips first), and the drawn clips m."""
        drawn = self.draw(batch)
        a = self.model.patches_a(joined(batch.audio, drawn, "audio"))
        return a, self.model.patches_v(joined(batch.video, drawn, "video")), drawn

    def pretrain(self, a: Patches, v: Patches) -> Pretrained:
        """The backbone on these patches (all or some of each clip), masked at random."""
        return self.model.pretrain(a, v, *self.splits(a, v))

    def splits(self, a: Patches, v: Patches, noise: str = "mask") -> tuple[Split, Split]:
        """A random mask of these patches, from the generator `noise`, audio first."""
        return self._split(a, self.model.config.patches_a, noise), self._split(v, self.model.config.patches_v, noise)

    def parts(self, out: Pretrained) -> dict[str, Tensor]:
        """The three parts of L, averaged over the clips."""
        return {name: losses.mean(part) for name, part in self.clip_parts(out).items()}

    def clip_parts(self, out: Pretrained) -> dict[str, Tensor]:
        """The three weighted parts of L of each clip, [B] each. All clips are negatives of one another."""
        return self.recon_parts(out) | {"contrastive": self.contrastive_part(out.z_a, out.z_v)}

    def recon_means(self, out: Pretrained) -> dict[str, Tensor]:
        """The reconstruction's parts of L, averaged over the clips, for methods that compute more after them.

        Add them to the loss as they are: their gradients are computed at once, with equal weights (`fast/early.py`).
        """
        return {name: losses.mean(part) for name, part in self.recon_parts(out).items()}

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

    def _split(self, patches: Patches, length: int, noise: str) -> Split:
        """A share of *all* `length` patches is visible; the others of the given patches are masked.

        Noise is drawn per position, so keeping all patches gives the same mask as no selection.
        """
        drawn = selection.uniform(len(patches.positions), length, generator=self.generators[noise])
        return split_by_noise(drawn.gather(1, patches.positions), selection.visible(length, self.objective.mask_ratio))


def check_kept(objective: ObjectiveConfig, lengths: Sequence[int], ratio: float = 1.0, key: str = "keep_ratio") -> None:
    """Refuse a selection, of clips of so many patches, that leaves no visible or no masked one."""
    seen = {length: selection.visible(length, objective.mask_ratio) for length in lengths}
    for length, visible in seen.items():
        if not 0 < visible < length:
            left, how = visible or "none", "raise" if visible else "lower"
            raise ConfigError(
                f"objective.mask_ratio={objective.mask_ratio:g} leaves {left} of {length} patches visible; {how} it, "
                "or use a longer or larger input"
            )

    def short(ratio: float) -> list[int]:
        return [length for length, visible in seen.items() if selection.kappa(length, ratio) <= visible]

    if few := short(ratio):
        length = few[0]
        least = next(n / 10_000 for n in range(10_001) if not short(n / 10_000))
        raise ConfigError(
            f"args.{key}={ratio:g} keeps {selection.kappa(length, ratio)} of {length} patches, of which {seen[length]} "
            f"are visible; set it to at least {least:g}"
        )


def clip_columns(model: CAVConfig) -> dict[str, Column]:
    """A clip as the model saw it."""
    frames, size, side = model.frames, model.image_size, model.patch_size
    time, mel = model.spec_frames, model.mel_bins
    return {
        "video": Column(torch.uint8, (frames, 3, size, size), codec.frames(frames, size, side)),
        "audio": Column(torch.float16, (time, mel), codec.spectrogram(time, mel, side)),
    }


def patch_columns(model: CAVConfig, kappa_a: int, kappa_v: int) -> dict[str, Column]:
    """Some patches of a clip, with their positions."""
    side = model.patch_size
    position = torch.int16 if max(model.patches_a, model.patches_v) < 2**15 else torch.int32
    return {
        "patches_a": Column(torch.float16, (kappa_a, side**2), codec.patches(kappa_a, side, 1)),
        "patches_v": Column(torch.uint8, (kappa_v, 3 * side**2), codec.patches(kappa_v, side, 3)),
        "positions_a": Column(position, (kappa_a,)),
        "positions_v": Column(position, (kappa_v,)),
    }


def output_columns(model: CAVConfig) -> dict[str, Column]:
    """Its pooled outputs, for `penalty`."""
    return {"z_a": Column(torch.float32, (model.dim,)), "z_v": Column(torch.float32, (model.dim,))}


def clip_rows(batch: Batch) -> dict[str, Tensor]:
    return {"video": batch.video, "audio": batch.audio}


def patch_rows(a: Patches, v: Patches) -> dict[str, Tensor]:
    return {"patches_a": a.values, "patches_v": v.values, "positions_a": a.positions, "positions_v": v.positions}


def drawn_patches(drawn: MemoryBatch) -> tuple[Patches, Patches]:
    """The stored patches of the drawn clips, audio and video."""
    a, v = (Patches(drawn[f"patches_{of}"], drawn[f"positions_{of}"].long()) for of in "av")
    return a, v


def output_rows(out: Pretrained, batch: Batch) -> dict[str, Tensor]:
    """Pooled outputs of the current clips, which come first in x ∪ m."""
    return {"z_a": out.z_a[: len(batch)].detach(), "z_v": out.z_v[: len(batch)].detach()}


def joined(now: Tensor, drawn: MemoryBatch | None, name: str) -> Tensor:
    """Rows of the current clips, then the drawn clips' column: x ∪ m."""
    return now if drawn is None else torch.cat([now, drawn[name]])


def penalty(out: Pretrained, z_a: Tensor, z_v: Tensor) -> Tensor:
    """MSE(z_a, target) + MSE(z_v, target), targets [n, D], over the last n clips of x ∪ m: the drawn ones."""
    now = len(out.z_a) - len(z_a)
    distance = losses.feature_penalty(out.z_a[now:], z_a) + losses.feature_penalty(out.z_v[now:], z_v)
    return losses.mean(distance)

"""Clips of a downstream task: three parts that share no clip, and frames that carry their masks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from stella.clip import MIDDLE, BatchSource, Clip, Device, Labels, Source, clip_of, labels_of, location_of, names_of
from stella.errors import ClipError

Downstream = Literal["retrieval", "classify", "segment", "events", "localise", "matching"]
DOWNSTREAM: tuple[str, ...] = get_args(Downstream)


@dataclass(frozen=True)
class Parts:
    """`classes` are those of classify and events, in the order of their numbers; a clip may have `several` of them."""

    train: Source
    validation: Source  # the best model is chosen on these clips
    test: Source  # and measured once on these
    classes: tuple[str, ...] = ()
    segments: int = 1  # consecutive clips that are cut from one: ten for events
    several: bool = False


class Masked:
    """The same clips with five channels: red, green, blue, the mask in 0 … 255, and 255 where the mask is known.

    Crops then treat frames and masks alike. A clip without a mask is skipped. With `sounding` only the masks of frames
    with an event count as known.
    """

    def __init__(self, source: Source, sounding: bool = False) -> None:
        self.source, self.sounding = source, sounding

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index, MIDDLE)

    def clip(self, index: int, window: float) -> Clip:
        clip = clip_of(self.source, index, window)
        return replace(clip, video=_with_mask(clip.video, clip.labels, clip.id, self.sounding))

    def labels(self, index: int) -> Labels:
        return labels_of(self.source, [index])[0]

    def class_of(self, index: int) -> str | None:
        return names_of(self.source, [index])[0]

    def location(self, index: int) -> str:
        return location_of(self.source, index)


class MaskedBatches(Masked):
    """The same of a batch source."""

    source: BatchSource

    def tensors(self, indices: Sequence[int], device: Device = "cpu") -> tuple[Tensor, Tensor]:
        video, audio = self.source.tensors(indices, device)
        pairs = zip(video, labels_of(self.source, indices), indices, strict=True)
        with_masks = [_with_mask(frames, labels, f"clip {index}", self.sounding) for frames, labels, index in pairs]
        return torch.stack(with_masks), audio


def masked(source: Source, sounding: bool = False) -> Masked:
    return (MaskedBatches if isinstance(source, BatchSource) else Masked)(source, sounding)


def sounds(labels: Labels, frames: int) -> Tensor:
    """Which frames have an event, bool [frames]; all without `labels.events`.

    Frame t of T is taken from the middle of the t-th of T equal parts of the clip.
    """
    if labels.events is None:
        return torch.ones(frames, dtype=torch.bool)
    return labels.events[((torch.arange(frames) + 0.5) / frames * len(labels.events)).long()]


def _with_mask(video: Tensor, labels: Labels, id: str, sounding: bool) -> Tensor:
    """Frames [T, 3, H, W] with the two channels of their masks: [T, 5, H, W]."""
    if labels.mask is None:
        raise ClipError(id, "no mask", "leave this clip out, or add the mask")
    if labels.mask.shape != (video.shape[0], *video.shape[2:]):
        here, there = list(video.shape[2:]), list(labels.mask.shape[1:])
        raise ClipError(id, "mask of another size", f"frames have {here} pixels and the mask {there}: export it again")
    mask = (labels.mask.to(video.device).float() * 255).round().to(torch.uint8)
    known = torch.ones(len(mask), dtype=torch.bool) if labels.masked is None else labels.masked
    if sounding:
        known = known & sounds(labels, len(mask))
    known = (known.to(video.device) * 255).to(torch.uint8)[:, None, None].expand_as(mask)
    return torch.cat([video, mask[:, None], known[:, None]], 1)

"""The two things that flow: a `Clip` out of a source, a `Batch` into a method."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

SAMPLE_RATE = 16_000


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on that device, without the host waiting for what the device still has to do."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Labels:
    """What is known about a clip. Evaluation reads it; training never does."""

    name: str | None = None  # class
    task: str | None = None
    mask: Tensor | None = None  # bool [T, H, W], the sounding object
    events: Tensor | None = None  # bool [10], which tenths of the clip hold an event


@dataclass(frozen=True)
class Clip:
    id: str
    video: Tensor  # uint8 [T, 3, H, W]
    audio: Tensor  # float32 [S], waveform at 16 kHz in [-1, 1]
    labels: Labels = field(default_factory=Labels)


@dataclass(frozen=True)
class Batch:
    """What training sees. It carries no task and no label, so task-free is true by construction."""

    video: Tensor  # uint8 [B, T, 3, H, W], cropped; normalised on the device
    audio: Tensor  # float [B, time, mel], normalised log-mel filterbanks
    ids: Tensor  # int64 [B], positions in the stream's sources

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Tensor | slice) -> "Batch":
        return Batch(self.video[rows], self.audio[rows], self.ids[rows])

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(t.to(device, non_blocking=True) for t in (self.video, self.audio, self.ids)))

    def pin_memory(self) -> "Batch":
        return Batch(self.video.pin_memory(), self.audio.pin_memory(), self.ids.pin_memory())

    @staticmethod
    def cat(batches: Sequence["Batch"]) -> "Batch":
        return Batch(
            torch.cat([b.video for b in batches]),
            torch.cat([b.audio for b in batches]),
            torch.cat([b.ids for b in batches]),
        )


@runtime_checkable
class Source(Protocol):
    """Clips by position. `source[i]` is always the same clip, or raises `ClipError`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Clip: ...


@runtime_checkable
class BatchSource(Source, Protocol):
    """A source that makes many clips at once faster than one by one, on any device."""

    def tensors(self, indices: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Frames uint8 [B, T, 3, H, W] and waveforms float32 [B, S] of these clips."""
        ...


@runtime_checkable
class ArraySource(BatchSource, Protocol):
    """A batch source that only copies what lies ready: it runs in the stream's own process whatever `workers` says."""

    def lengths(self, indices: Sequence[int]) -> Tensor:
        """How many samples of each clip's waveform count, int64 [B]; the others are padding."""
        ...

    def expect(self, indices: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Begin to read what `tensors` will be asked for next."""
        ...


@runtime_checkable
class Labelled(Protocol):
    """A source that knows labels without decoding."""

    def labels(self, index: int) -> Labels: ...


@runtime_checkable
class Located(Protocol):
    """A source that can say where a clip lies."""

    def place(self, index: int) -> str: ...


def labels_of(source: Source, indices: Tensor | Sequence[int]) -> list[Labels]:
    """The labels of these clips, for evaluation: for the batches of `evaluation_batches`, those of `batch.ids`."""
    which = [int(index) for index in indices]
    return [source.labels(i) if isinstance(source, Labelled) else source[i].labels for i in which]


def place_of(source: Source, index: int) -> str:
    return source.place(index) if isinstance(source, Located) else f"clip {index}"

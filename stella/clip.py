"""What flows through the library: a `Clip` comes out of a source, a `Batch` goes into a method."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Device = torch.device | str

SAMPLE_RATE = 16_000
BACKGROUND = "background"  # the class of a segment without an event
MIDDLE = 0.5  # where a clip's frames come from unless a window is drawn: 0 is its beginning, 1 its end


def send(tensor: Tensor, device: Device) -> Tensor:
    """The tensor on that device, without host synchronisation."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.contiguous().pin_memory()  # an expanded one cannot be pinned
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Labels:
    """What is known about a clip. Only evaluation reads labels."""

    name: str | None = None  # class
    task: str | None = None
    mask: Tensor | None = None  # bool [T, H, W], the sounding object; float in 0 … 1 where annotators disagree
    events: Tensor | None = None  # bool [10], which tenths of the clip hold an event
    masked: Tensor | None = None  # bool [T], the frames whose mask is known; None: all
    others: tuple[str, ...] = ()  # further classes, of a clip that has several


@dataclass(frozen=True)
class Clip:
    id: str
    video: Tensor  # uint8 [T, 3, H, W]
    audio: Tensor  # float32 [S], waveform at 16 kHz in [-1, 1]
    labels: Labels = field(default_factory=Labels)
    centred: bool = False  # a short sound stands in the middle of its spectrogram's padding, not before it


@dataclass(frozen=True)
class Batch:
    """What a method sees. It carries no task and no label, so every method is task-free."""

    video: Tensor  # uint8 [B, T, 3, H, W], cropped; normalised on the device
    audio: Tensor  # float [B, time, mel], normalised log-mel filterbanks
    ids: Tensor  # int64 [B], positions in the stream's sources

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def clips(self) -> int:
        """The clips of the whole batch, also where processes share it."""
        return len(self)

    def __getitem__(self, rows: Tensor | slice) -> "Batch":
        return Batch(self.video[rows], self.audio[rows], self.ids[rows])

    def to(self, device: Device) -> "Batch":
        return Batch(*(t.to(device, non_blocking=True) for t in (self.video, self.audio, self.ids)))

    def pin_memory(self) -> "Batch":
        return Batch(*(t.pin_memory() for t in (self.video, self.audio, self.ids)))

    @staticmethod
    def cat(batches: Sequence["Batch"]) -> "Batch":
        columns = zip(*((b.video, b.audio, b.ids) for b in batches), strict=True)
        return Batch(*map(torch.cat, columns))


@runtime_checkable
class Source(Protocol):
    """Clips by position. `source[i]` always returns the same clip, or raises `ClipError`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Clip: ...


@runtime_checkable
class Windowed(Source, Protocol):
    """A source whose clips are longer than the window their frames come from. `source[i]` takes the middle one."""

    def clip(self, index: int, window: float) -> Clip:
        """The clip with the frames of one window: 0 is the first, 1 the last."""
        ...


@runtime_checkable
class BatchSource(Source, Protocol):
    """A source that makes many clips at once, faster than one by one, on any device. It skips no clip."""

    def tensors(self, indices: Sequence[int], device: Device = "cpu") -> tuple[Tensor, Tensor]:
        """Frames uint8 [B, T, 3, H, W] and waveforms float32 [B, S] of these clips."""
        ...


@runtime_checkable
class ArraySource(BatchSource, Protocol):
    """A batch source that only copies stored tensors, so worker processes would not make it faster.

    `windows` are those of `Windowed.clip`, one for each clip; None: the middle.
    """

    def tensors(
        self, indices: Sequence[int], device: Device = "cpu", windows: Sequence[float] | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def lengths(self, indices: Sequence[int]) -> Tensor:
        """The number of samples of each clip's waveform, int64 [B]; the rest of its row is padding."""
        ...

    def expect(self, indices: Sequence[int], device: Device = "cpu", windows: Sequence[float] | None = None) -> None:
        """Begin to read what `tensors` will be asked for next."""
        ...


@runtime_checkable
class Labelled(Protocol):
    """A source that knows labels without decoding."""

    def labels(self, index: int) -> Labels: ...


@runtime_checkable
class Classified(Protocol):
    """A source whose masks take time to make, so that it tells a clip's class alone."""

    def class_of(self, index: int) -> str | None: ...


@runtime_checkable
class Located(Protocol):
    """A source that knows where each clip is stored."""

    def location(self, index: int) -> str: ...


@dataclass(frozen=True)
class Origin:
    """Which clip this is, in its folder."""

    id: str
    recording: str  # the video it was cut out of: all clips of one are on the same side of a split


@runtime_checkable
class Stored(Protocol):
    """A source of clips on a disk."""

    def origin(self, index: int) -> Origin: ...

    def stamp(self, index: int) -> str:
        """A text that changes with the clip's content, as far as that is known without reading it."""
        ...


def same_stamp(before: str, now: str) -> bool:
    """Whether a stamp is the one that was kept. Packed clips once had stamps without a checksum."""
    return now == before or now.startswith(f"{before}, checksum ")


@runtime_checkable
class Timed(Protocol):
    """A source that knows how long its clips are without decoding them."""

    def seconds(self, index: int) -> float | None:
        """How many seconds there are to take a clip from; None if that is unknown."""
        ...


def clip_of(source: Source, index: int, window: float = MIDDLE) -> Clip:
    return source.clip(index, window) if isinstance(source, Windowed) else source[index]


def labels_of(source: Source, indices: Tensor | Sequence[int]) -> list[Labels]:
    """The labels of these clips: for a batch of `evaluation_batches`, those of `batch.ids`."""
    which = [int(index) for index in indices]
    return [source.labels(i) if isinstance(source, Labelled) else source[i].labels for i in which]


def class_of(source: Source, index: int) -> str | None:
    """The class of a clip, without its other labels where the source can tell."""
    return source.class_of(index) if isinstance(source, Classified) else labels_of(source, [index])[0].name


def names_of(source: Source, indices: Tensor | Sequence[int]) -> list[str | None]:
    """The classes of these clips."""
    return [class_of(source, int(index)) for index in indices]


def location_of(source: Source, index: int) -> str:
    return source.location(index) if isinstance(source, Located) else f"clip {index}"

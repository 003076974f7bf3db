"""Views of sources: a selection of clips from one or several, and clips cached once they are made."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stella.clip import (
    ArraySource,
    BatchSource,
    Clip,
    Device,
    Labels,
    Source,
    Stored,
    Timed,
    Windowed,
    class_of,
    clip_of,
    labels_of,
    location_of,
    send,
)

BLOCK = 32  # clips that a cache makes together

Rows = tuple[int, ...]


class View:
    """Some clips of one or several sources, in an order of its own."""

    def __init__(self, sources: Sequence[Source], clips: Sequence[tuple[int, int]]) -> None:
        self.sources: list[Any] = list(sources)  # batch sources in a `BatchView`, array sources in an `ArrayView`
        self.clips = list(clips)  # for each clip: which source, and its index there

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Clip:
        return clip_of(*self._at(index))

    def clip(self, index: int, window: float) -> Clip:
        return clip_of(*self._at(index), window)

    def labels(self, index: int) -> Labels:
        source, inside = self._at(index)
        return labels_of(source, [inside])[0]

    def class_of(self, index: int) -> str | None:
        return class_of(*self._at(index))

    def location(self, index: int) -> str:
        return location_of(*self._at(index))

    def seconds(self, index: int) -> float | None:
        """How long a clip is; None if its source does not say."""
        source, inside = self._at(index)
        return source.seconds(inside) if isinstance(source, Timed) else None

    def stored(self, index: int) -> tuple[Stored, int] | None:
        """The source on a disk that holds this clip, and its index there; None if it is not on a disk."""
        source, inside = self._at(index)
        return (source, inside) if isinstance(source, Stored) else None

    def _at(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"clip {index} of {len(self)}")
        which, inside = self.clips[index]
        return self.sources[which], inside

    def _by_source(self, indices: Sequence[int]) -> Iterator[tuple[Any, Rows, list[int]]]:
        """Each source of these clips, with their rows in the batch and their indices in the source."""
        for number in sorted({self.clips[index][0] for index in indices}):
            rows = tuple(row for row, index in enumerate(indices) if self.clips[index][0] == number)
            yield self.sources[number], rows, [self.clips[indices[row]][1] for row in rows]


class BatchView(View):
    """A view of batch sources."""

    def tensors(self, indices: Sequence[int], device: Device = "cpu") -> tuple[Tensor, Tensor]:
        return _joined({rows: source.tensors(inside, device) for source, rows, inside in self._by_source(indices)})


class ArrayView(View):
    """A view of array sources."""

    def tensors(
        self, indices: Sequence[int], device: Device = "cpu", windows: Sequence[float] | None = None
    ) -> tuple[Tensor, Tensor]:
        made = {}
        for source, rows, inside in self._by_source(indices):
            made[rows] = source.tensors(inside, device, windows and [windows[row] for row in rows])
        return _joined(made)

    def lengths(self, indices: Sequence[int]) -> Tensor:
        lengths = torch.empty(len(indices), dtype=torch.int64)
        for source, rows, inside in self._by_source(indices):
            lengths[list(rows)] = source.lengths(inside)
        return lengths

    def expect(self, indices: Sequence[int], device: Device = "cpu", windows: Sequence[float] | None = None) -> None:
        for source, rows, inside in self._by_source(indices):
            source.expect(inside, device, windows and [windows[row] for row in rows])


def _joined(parts: dict[Rows, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One batch of parts of it, given by their rows."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    order = torch.tensor([row for rows in parts for row in rows]).argsort()
    video, audio = (torch.cat(tensors) for tensors in zip(*parts.values(), strict=True))
    return video[send(order, video.device)], audio[send(order, audio.device)]


def view(sources: Sequence[Source], clips: Sequence[tuple[int, int]]) -> View:
    """A view that can do what all its sources can."""
    if all(isinstance(source, ArraySource) for source in sources):
        return ArrayView(sources, clips)
    return (BatchView if all(isinstance(source, BatchSource) for source in sources) else View)(sources, clips)


def stored_at(source: Source, index: int) -> tuple[Stored, int] | None:
    """The source on a disk that holds a clip, and its index there; None if it is not on a disk."""
    if isinstance(source, View):
        return source.stored(index)
    return (source, index) if isinstance(source, Stored) else None


def has_windows(source: Source) -> bool:
    """Whether the frames of a source's clips can come from several windows."""
    return all(map(has_windows, source.sources)) if isinstance(source, View) else isinstance(source, Windowed)


def part(source: Source, indices: Sequence[int]) -> View:
    """These clips of a source, in this order."""
    if isinstance(source, View):
        return view(source.sources, [source.clips[index] for index in indices])
    return view([source], [(0, index) for index in indices])


def join(sources: Sequence[Source]) -> View:
    """All clips of several sources, one source after the other."""
    found: dict[int, Source] = {}  # by identity: parts of one source remain one source
    clips: list[tuple[int, int]] = []
    for source in sources:
        each = source if isinstance(source, View) else part(source, range(len(source)))
        found |= {id(inner): inner for inner in each.sources}
        number = [list(found).index(id(inner)) for inner in each.sources]
        clips += [(number[which], inside) for which, inside in each.clips]
    return view(list(found.values()), clips)


class Cached:
    """A batch source that keeps its clips and labels, in RAM or on a device, once they are made.

    The tensors are those of the source: waveforms stay float32. The cache fills in one process, so it is of no use to
    a stream with workers.
    """

    def __init__(self, source: BatchSource, device: Device = "cpu") -> None:
        self.source, self.device = source, torch.device(device)
        self._made: set[int] = set()  # blocks
        self._columns: tuple[Tensor, Tensor] | None = None
        self._labels: dict[int, Labels] = {}

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Clip:
        return self.source[index]

    def labels(self, index: int) -> Labels:
        if index not in self._labels:
            self._labels[index] = labels_of(self.source, [index])[0]
        return self._labels[index]

    def class_of(self, index: int) -> str | None:
        return class_of(self.source, index)

    def tensors(self, indices: Sequence[int], device: Device = "cpu") -> tuple[Tensor, Tensor]:
        # Whole blocks are made, since a few large renderings cost less than many small ones.
        if blocks := sorted({index // BLOCK for index in indices} - self._made):
            missing = [i for block in blocks for i in range(block * BLOCK, min((block + 1) * BLOCK, len(self)))]
            made = self.source.tensors(missing, device)
            if self._columns is None:
                frames, waveforms = (t.new_empty((len(self), *t.shape[1:]), device=self.device) for t in made)
                self._columns = frames, waveforms
            for column, rows in zip(self._columns, made, strict=True):
                column[torch.tensor(missing, device=self.device)] = rows.to(self.device)
            self._made.update(blocks)
        assert self._columns is not None
        wanted = send(torch.tensor(list(indices)), self.device)
        frames, waveforms = (send(column[wanted], device) for column in self._columns)
        return frames, waveforms

"""Views of sources: some of the clips, several sources joined, clips kept once they were made."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stella.clip import ArraySource, BatchSource, Clip, Labels, Source, labels_of, place_of, send

BLOCK = 32  # clips that are made together


class Part:
    """Some clips of a source."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self.source, self.indices = source, list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Clip:
        return self.source[self.indices[index]]

    def labels(self, index: int) -> Labels:
        return labels_of(self.source, [self.indices[index]])[0]

    def place(self, index: int) -> str:
        return place_of(self.source, self.indices[index])

    def inside(self, indices: Sequence[int]) -> list[int]:
        """Where clips of the part are in the whole."""
        return [self.indices[index] for index in indices]


class BatchPart(Part):
    def __init__(self, source: BatchSource, indices: Sequence[int]) -> None:
        super().__init__(source, indices)
        self._batches = source

    def tensors(self, indices: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        return self._batches.tensors(self.inside(indices), device)


class ArrayPart(BatchPart):
    def __init__(self, source: ArraySource, indices: Sequence[int]) -> None:
        super().__init__(source, indices)
        self._arrays = source

    def lengths(self, indices: Sequence[int]) -> Tensor:
        return self._arrays.lengths(self.inside(indices))

    def expect(self, indices: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._arrays.expect(self.inside(indices), device)


def part(source: Source, indices: Sequence[int]) -> Part:
    """These clips of a source, made or read as that makes or reads them."""
    if isinstance(source, ArraySource):
        return ArrayPart(source, indices)
    return BatchPart(source, indices) if isinstance(source, BatchSource) else Part(source, indices)


class Cached:
    """A source whose clips and labels are kept once they were asked for, in RAM or on a device.

    Nothing downstream can tell: waveforms stay float32, because sixteen bits would change them. One process fills it,
    so it is of no use to a stream with workers.
    """

    def __init__(self, source: BatchSource, device: torch.device | str = "cpu") -> None:
        self.source, self.device = source, torch.device(device)
        self._kept = torch.zeros(len(source), dtype=torch.bool)  # which clips are here
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

    def place(self, index: int) -> str:
        return place_of(self.source, index)

    def tensors(self, indices: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        wanted = torch.tensor(list(indices), dtype=torch.int64)
        if missing := self._missing(wanted):
            made = self.source.tensors(missing, device)
            if self._columns is None:
                frames, waveforms = (t.new_empty((len(self), *t.shape[1:]), device=self.device) for t in made)
                self._columns = frames, waveforms
            for column, rows in zip(self._columns, made, strict=True):
                column[torch.tensor(missing, device=self.device)] = rows.to(self.device)
            self._kept[missing] = True
        assert self._columns is not None
        frames, waveforms = (send(column[send(wanted, self.device)], device) for column in self._columns)
        return frames, waveforms

    def _missing(self, wanted: Tensor) -> list[int]:
        """What must be made for these clips: whole blocks, since a few large renderings cost less than many small."""
        blocks = sorted({index // BLOCK for index in wanted[~self._kept[wanted]].tolist()})
        around = [i for block in blocks for i in range(block * BLOCK, min((block + 1) * BLOCK, len(self)))]
        return [index for index in around if not self._kept[index]]


class Joined:
    """Several sources as one, in order: what was clip i of the second is now clip len(first) + i."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._ends = torch.tensor([len(source) for source in sources]).cumsum(0)  # [sources]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Clip:
        source, local = self._locate(index)
        return source[local]

    def labels(self, index: int) -> Labels:
        source, local = self._locate(index)
        return labels_of(source, [local])[0]

    def place(self, index: int) -> str:
        source, local = self._locate(index)
        return place_of(source, local)

    def _locate(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"clip {index} of {len(self)}")
        which = int(torch.searchsorted(self._ends, index, right=True))
        return self.sources[which], index - (int(self._ends[which - 1]) if which else 0)


class JoinedBatches(Joined):
    """As `Joined`, of sources that make many clips at once."""

    def __init__(self, sources: Sequence[BatchSource]) -> None:
        super().__init__(sources)
        self._makers = list(sources)

    def tensors(self, indices: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        wanted = torch.tensor(list(indices), dtype=torch.int64)
        which = torch.searchsorted(self._ends, wanted, right=True)  # [B]
        order: list[Tensor] = []
        made: list[tuple[Tensor, Tensor]] = []
        for number in sorted(set(which.tolist())):
            rows = (which == number).nonzero().flatten()
            start = int(self._ends[number - 1]) if number else 0
            order.append(rows)
            made.append(self._makers[number].tensors((wanted[rows] - start).tolist(), device))
        back = send(torch.cat(order).argsort(), device)
        return torch.cat([frames for frames, _ in made])[back], torch.cat([waveforms for _, waveforms in made])[back]


def join(sources: Sequence[Source]) -> Source:
    """All clips of several sources as one source, which makes batches at once where each of them does."""
    parts = [source for source in sources if isinstance(source, Part)]
    if len(parts) == len(sources) and len({id(each.source) for each in parts}) == 1:
        return part(parts[0].source, [index for each in parts for index in each.indices])
    makers = [source for source in sources if isinstance(source, BatchSource)]
    return JoinedBatches(makers) if len(makers) == len(sources) else Joined(sources)

"""Some clips of a source, as a source of the same kind."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stella.clip import Clip, Labels
from stella.data.source import ArraySource, BatchSource, Source
from stella.data.stream import labels_of, place_of


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

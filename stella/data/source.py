"""What a source of clips is. Nothing downstream knows whether clips are rendered, decoded or read from shards."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from stella.clip import Clip


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

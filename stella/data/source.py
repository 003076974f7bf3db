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

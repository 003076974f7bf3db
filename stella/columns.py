"""What a memory stores of a clip: columns, each with its dtype, shape and form; and how many clips fit into bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stella.codec import Patching
from stella.config import spelt
from stella.errors import StellaError


@dataclass(frozen=True)
class Column:
    """Dtype and shape of what is stored per clip under one name."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    patching: Patching | None = None  # of frames and spectrograms, whole or in patches
    codec: Patching | None = None  # stored as coefficients of these patches; none: as it is

    @property
    def stored(self) -> "Column":
        """The column of what is kept."""
        return Column(torch.uint8, self.codec.coded_shape) if self.codec else self

    @property
    def bytes(self) -> int:
        """Bytes of a clip as stored."""
        stored = self.stored
        return stored.dtype.itemsize * math.prod(stored.shape)

    def encode(self, values: Tensor) -> Tensor:
        """Values [n, …] as they are stored."""
        return self.codec.encode(values) if self.codec else values.to(self.dtype)

    def decode(self, rows: Tensor) -> Tensor:
        """Stored rows as values [n, …]."""
        if self.codec is None:
            return rows
        values = self.codec.decode(rows)
        if not self.dtype.is_floating_point:
            limits = torch.iinfo(self.dtype)
            values = values.round_().clamp_(limits.min, limits.max)
        return values.to(self.dtype).reshape(-1, *self.shape)


ID = {"id": Column(torch.int64)}  # a column of every memory


def coded(columns: Mapping[str, Column]) -> dict[str, Column]:
    """The same columns, frames and spectrograms compressed (`stella.codec`)."""
    return {name: replace(column, codec=column.patching) for name, column in columns.items()}


def bytes_per_clip(columns: Mapping[str, Column]) -> int:
    return sum(column.bytes for column in (ID | dict(columns)).values())


def capacity_for(columns: Mapping[str, Column], *, clips: int | None, bytes: int | None) -> int:
    """Number of clips in a memory whose size is given in clips or in bytes."""
    if (clips is None) == (bytes is None):
        raise StellaError(f"memory.clips={spelt(clips)} and memory.bytes={spelt(bytes)}: set exactly one of them")
    each = bytes_per_clip(columns)
    capacity = clips if clips is not None else (bytes or 0) // each
    if capacity < 0 or (clips is None and capacity < 1):
        given = f"memory.bytes={bytes}" if clips is None else f"memory.clips={clips}"
        raise StellaError(f"{given} holds no clip; one takes {each:,} bytes")
    return capacity

"""The rehearsal memory: columns declared once, filled by reservoir sampling, drawn from without replacement.

Which clip goes where is decided on the CPU from one explicit generator, so a memory's content does not depend on the
device it lies on. Storage follows what the model saw: uint8 frames and half-precision spectrograms, and float32 for the
small columns (`stella.methods.base` declares them).
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stella.config import differences
from stella.errors import StellaError


@dataclass(frozen=True)
class Column:
    """What is kept of each clip under one name."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


ID = {"id": Column(torch.int64)}  # every memory has this one


@dataclass(frozen=True)
class MemoryBatch:
    """Clips drawn from a memory: `drawn["z_a"]` is a column, `len(drawn)` the number of clips."""

    slots: Tensor  # int64 [n] on the CPU, for `Memory.update`
    columns: Mapping[str, Tensor]  # each [n, …]

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def ids(self) -> Tensor:
        return self.columns["id"]


class Memory:
    """A uniform sample of all clips ever added (reservoir sampling; Vitter, 1985), at most `capacity` of them.

    On the CPU it works with tensors on any device: clips travel when they are added (which waits for the device) and
    when they are drawn (which does not). On the model's device nothing travels and nothing waits.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        capacity: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        self.columns = ID | dict(columns)
        self.capacity, self.generator, self.device = capacity, generator, torch.device(device)
        self.seen = 0  # clips ever added
        check_fits(self.bytes, self.device)
        self._rows = {
            name: torch.empty(capacity, *column.shape, dtype=column.dtype, device=self.device)
            for name, column in self.columns.items()
        }

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    @property
    def bytes_per_clip(self) -> int:
        return bytes_per_clip(self.columns)

    @property
    def bytes(self) -> int:
        """What the memory takes, filled or not."""
        return self.capacity * self.bytes_per_clip

    @property
    def ids(self) -> Tensor:
        """Of the clips held, int64 [len], by slot."""
        return self._rows["id"][: len(self)]

    def add(self, ids: Tensor, **columns: Tensor) -> None:
        """Offer clips in this order; each is kept with probability capacity / clips seen so far, itself included."""
        values = {"id": ids, **columns}
        if values.keys() != self.columns.keys():
            given, kept = ", ".join(values), ", ".join(self.columns)
            raise StellaError(f"the memory keeps the columns {kept} and was given {given}; give exactly these")
        self._check(values, len(ids))
        kept_as = self._decide(len(ids))
        if kept_as:
            self._write(list(kept_as), {k: v[self._index(list(kept_as.values()), v)] for k, v in values.items()})

    def draw(self, n: int, to: torch.device | str | None = None) -> MemoryBatch | None:
        """`n` different clips, or all where fewer are held, on the device `to`; None while nothing is held."""
        n = min(n, len(self))
        if n < 1:
            return None
        slots = torch.randperm(len(self), generator=self.generator)[:n]
        to = self.device if to is None else torch.device(to)
        return MemoryBatch(slots, {name: self._take(rows, slots, to) for name, rows in self._rows.items()})

    def update(self, slots: Tensor, **columns: Tensor) -> None:
        """Overwrite these columns of the clips in `slots` (as drawn)."""
        if unknown := columns.keys() - self.columns.keys():
            raise StellaError(
                f"the memory has no column {', '.join(sorted(unknown))}; it has {', '.join(self.columns)}"
            )
        self._check(columns, len(slots))
        self._write(slots.tolist(), columns)

    def state_dict(self) -> dict[str, Any]:
        """All of it, with the filled rows alone. A full memory's rows are no copies: save them before the next add."""
        held = len(self)
        rows = {name: t if held == self.capacity else t[:held].clone() for name, t in self._rows.items()}
        return {"plan": self._plan(), "seen": self.seen, "rows": rows, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if changed := differences(state["plan"], self._plan()):
            raise StellaError(f"the memory was saved with other sizes: {'; '.join(changed)}; set them back")
        self.seen = state["seen"]
        for name, rows in state["rows"].items():
            self._rows[name][: len(self)].copy_(rows)
        self.generator.set_state(state["generator"].cpu())

    def _plan(self) -> dict[str, Any]:
        """What a saved state is only valid with."""
        columns = {name: f"{column.dtype} {list(column.shape)}" for name, column in self.columns.items()}
        return {"capacity": self.capacity, "columns": columns}

    def _decide(self, n: int) -> dict[int, int]:
        """Vitter's algorithm R for the next n clips: slot -> row of the clip that ends there (the last one sent)."""
        count = torch.arange(self.seen + 1, self.seen + n + 1)  # clips seen when each one's turn comes
        chance = torch.rand(n, generator=self.generator, dtype=torch.float64)
        slots = torch.where(count <= self.capacity, count - 1, (chance * count).long())
        self.seen += n
        return {slot: row for row, slot in enumerate(slots.tolist()) if slot < self.capacity}

    def _check(self, values: Mapping[str, Tensor], n: int) -> None:
        for name, value in values.items():
            column = self.columns[name]
            if tuple(value.shape) != (n, *column.shape):
                expected = [n, *column.shape]
                raise StellaError(f"the memory's column {name} takes {expected}, not {list(value.shape)}; check sizes")
            if value.is_floating_point() and not column.dtype.is_floating_point:
                raise StellaError(f"the memory keeps {name} as {column.dtype}; give whole numbers, not {value.dtype}")

    def _write(self, slots: Sequence[int], values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            rows = self._rows[name]
            narrow = value.detach().to(rows.dtype)  # before it travels
            rows.index_copy_(0, self._index(slots, rows), narrow.to(rows.device))

    @staticmethod
    def _index(places: Sequence[int], of: Tensor) -> Tensor:
        return _send(torch.tensor(places), of.device)

    @staticmethod
    def _take(rows: Tensor, slots: Tensor, to: torch.device) -> Tensor:
        if rows.device.type != "cpu" or to.type == "cpu":
            return rows.index_select(0, _send(slots, rows.device)).to(to, non_blocking=True)
        # Gathered straight into pinned memory, so that the copy runs beside the host. Pinning all rows would not save
        # this gather, and torch rounds a pinned allocation up to a power of two.
        staged = torch.empty(len(slots), *rows.shape[1:], dtype=rows.dtype, pin_memory=True)
        return torch.index_select(rows, 0, slots, out=staged).to(to, non_blocking=True)


def bytes_per_clip(columns: Mapping[str, Column]) -> int:
    return sum(column.bytes for column in (ID | dict(columns)).values())


def capacity_for(columns: Mapping[str, Column], *, clips: int | None, bytes: int | None) -> int:
    """How many clips a memory holds that is given in clips or in bytes."""
    if (clips is None) == (bytes is None):
        raise StellaError(
            f"the memory's size is given as clips={clips} and bytes={bytes}; give exactly one and set the other to none"
        )
    each = bytes_per_clip(columns)
    capacity = clips if clips is not None else (bytes or 0) // each
    if capacity < 0 or (clips is None and capacity < 1):
        raise StellaError(f"a memory of clips={clips}, bytes={bytes} holds no clip; one clip takes {each:,} bytes")
    return capacity


def check_fits(bytes: int, device: torch.device | str) -> None:
    """Refuse a memory larger than what the machine or the GPU has free."""
    device = torch.device(device)
    free = _free_ram() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if bytes > free:
        raise StellaError(
            f"the rehearsal memory would take {bytes / 1e9:,.2f} GB and {device} has {free / 1e9:,.2f} GB free; "
            "set memory.clips or memory.bytes lower"
        )


def _free_ram(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """What can still be had: Linux's own estimate, or all there is where it gives none; less under a container."""
    estimate = _numbers(meminfo)
    free = estimate["MemAvailable"] * 1024 if "MemAvailable" in estimate else _physical_ram()
    limit, used = _numbers(group / "memory.max"), _numbers(group / "memory.current")
    if limit and used:
        free = min(free, limit[""] - used[""] + _numbers(group / "memory.stat").get("inactive_file", 0))
    return free


def _physical_ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _numbers(file: Path) -> dict[str, int]:
    """The whole numbers of a file of the kernel's by their names ("" where a line is a number alone)."""
    if not file.is_file():
        return {}
    lines = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
    pairs = [(words[0], words[1]) if len(words) > 1 else ("", words[0]) for words in lines if words]
    return {name: int(number) for name, number in pairs if number.isdigit()}


def _send(index: Tensor, device: torch.device) -> Tensor:
    """A small index on its way to a device, without waiting for it."""
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)

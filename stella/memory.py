"""The rehearsal memory: columns declared once, filled by reservoir sampling, drawn from without replacement.

Which clip goes where is decided on the device the memory lies on, from an explicit generator there: on the model's
device neither `add` nor `draw` waits for anything, and both can be captured in a CUDA graph. Storage follows what the
model saw: uint8 frames and half-precision spectrograms, and float32 for the small columns (`stella.methods.base`
declares them).
"""

import math
import os
from collections.abc import Mapping
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

    slots: Tensor  # int64 [n] on the memory's device, for `Memory.update`
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

    Rows are one more than the capacity: what is not kept is written there, so that shapes do not depend on decisions.
    """

    def __init__(self, columns: Mapping[str, Column], capacity: int, generator: torch.Generator) -> None:
        """On the generator's device."""
        self.columns = ID | dict(columns)
        self.capacity, self.generator, self.device = capacity, generator, generator.device
        check_fits(self.bytes, self.device)
        self._seen = torch.zeros((), dtype=torch.int64, device=self.device)
        self.offered = 0  # `seen` as far as is known without waiting for a device: never less
        self._asked = 0  # the most clips that were ever drawn at once
        self._rows = {
            name: torch.zeros(capacity + 1, *column.shape, dtype=column.dtype, device=self.device)
            for name, column in self.columns.items()
        }

    @property
    def seen(self) -> int:
        """Clips ever added. Reads the device, as `len` does."""
        return int(self._seen)

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    @property
    def drawable(self) -> int:
        """What the shapes of draws depend on: as long as it stays the same, they do."""
        return min(self.offered, self.capacity, self._asked)

    @property
    def short(self) -> bool:
        """Whether a draw of as many clips as the last one asked for would give fewer (or none, before the first)."""
        return self.offered < min(self.capacity, max(self._asked, 1))

    def recount(self) -> None:
        """Wait for the device, and know exactly how many clips there are."""
        self.offered = self.seen

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

    def add(self, ids: Tensor, taken: Tensor | None = None, **columns: Tensor) -> None:
        """Offer clips in this order; each is kept with probability capacity / clips seen so far, itself included.

        Where `taken` (bool, a scalar or one a clip) is false, it is as if the clip had never come.
        """
        values = {"id": ids, **columns}
        if values.keys() != self.columns.keys():
            given, kept = ", ".join(values), ", ".join(self.columns)
            raise StellaError(f"the memory keeps the columns {kept} and was given {given}; give exactly these")
        self._check(values, len(ids))
        taken = torch.tensor(True, device=self.device) if taken is None else taken.to(self.device)
        taken = taken.expand(len(ids))
        slots = self._decide(taken)
        self._seen += taken.sum()
        self.offered += len(ids) if taken.is_cuda else int(taken.sum())
        self._write(slots, values)

    def draw(self, n: int, to: torch.device | str | None = None) -> MemoryBatch | None:
        """`n` different clips, or all where fewer are held, on the device `to`; None while nothing is held.

        (On a GPU, where steps were left out while the memory is still being filled, some may come twice.)
        """
        self._asked = max(self._asked, n)
        n = min(n, self.offered, self.capacity)
        if n < 1:
            return None
        held = self._seen.clamp(1, self.capacity)
        noise = torch.rand(self.capacity, generator=self.generator, device=self.device)
        free = torch.arange(self.capacity, device=self.device) >= held
        slots = noise.masked_fill(free, 2.0).argsort()[:n] % held
        to = self.device if to is None else torch.device(to)
        return MemoryBatch(slots, {name: self._take(rows, slots, to) for name, rows in self._rows.items()})

    def update(self, slots: Tensor, taken: Tensor | None = None, **columns: Tensor) -> None:
        """Overwrite these columns of the clips in `slots` (as drawn), where `taken` is not false."""
        if unknown := columns.keys() - self.columns.keys():
            raise StellaError(
                f"the memory has no column {', '.join(sorted(unknown))}; it has {', '.join(self.columns)}"
            )
        self._check(columns, len(slots))
        slots = slots.to(self.device)
        self._write(slots if taken is None else torch.where(taken.to(self.device), slots, self.capacity), columns)

    def state_dict(self) -> dict[str, Any]:
        """On the CPU, with the filled rows alone. Those of a memory on the CPU are its own, as a module's are: whoever
        keeps them copies them; a checkpoint needs no second memory for them."""
        rows = {name: _alone(t[: len(self)].cpu()) for name, t in self._rows.items()}
        return {"plan": self._plan(), "seen": self.seen, "rows": rows, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if changed := differences(state["plan"], self._plan()):
            raise StellaError(f"the memory was saved with other sizes: {'; '.join(changed)}; set them back")
        self._seen.fill_(state["seen"])
        self.offered = state["seen"]
        for name, rows in state["rows"].items():
            self._rows[name][: len(self)].copy_(rows)
        self.generator.set_state(state["generator"].cpu())

    def _plan(self) -> dict[str, Any]:
        """What a saved state is only valid with."""
        columns = {name: f"{column.dtype} {list(column.shape)}" for name, column in self.columns.items()}
        return {"capacity": self.capacity, "columns": columns}

    def _decide(self, taken: Tensor) -> Tensor:
        """Vitter's algorithm R for the next clips: the slot each goes to, `capacity` where it is not kept."""
        count = self._seen + taken.cumsum(0)  # clips seen when each one's turn has come
        chance = torch.rand(len(taken), generator=self.generator, dtype=torch.float64, device=self.device)
        slots = torch.where(count <= self.capacity, count - 1, (chance * count).long())
        kept = taken & (slots < self.capacity)
        later = ((slots[:, None] == slots) & kept).triu(1).any(1)  # another clip is sent there after this one
        return torch.where(kept & ~later, slots, self.capacity)

    def _check(self, values: Mapping[str, Tensor], n: int) -> None:
        for name, value in values.items():
            column = self.columns[name]
            if tuple(value.shape) != (n, *column.shape):
                expected = [n, *column.shape]
                raise StellaError(f"the memory's column {name} takes {expected}, not {list(value.shape)}; check sizes")
            if value.is_floating_point() and not column.dtype.is_floating_point:
                raise StellaError(f"the memory keeps {name} as {column.dtype}; give whole numbers, not {value.dtype}")

    def _write(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            rows = self._rows[name]
            narrow = value.detach().to(rows.dtype)  # before it travels
            rows.index_copy_(0, slots, narrow.to(rows.device))

    @staticmethod
    def _take(rows: Tensor, slots: Tensor, to: torch.device) -> Tensor:
        if rows.device.type != "cpu" or to.type == "cpu":
            return rows.index_select(0, slots).to(to, non_blocking=True)
        # Gathered straight into pinned memory, so that the copy runs beside the host. Pinning all rows would not save
        # this gather, and torch rounds a pinned allocation up to a power of two.
        staged = torch.empty(len(slots), *rows.shape[1:], dtype=rows.dtype, pin_memory=True)
        return torch.index_select(rows, 0, slots, out=staged).to(to, non_blocking=True)


def _alone(rows: Tensor) -> Tensor:
    """The first rows of a tensor in a storage of no more, without a copy: torch.save writes whole storages."""
    return torch.empty(0, dtype=rows.dtype).set_(rows.untyped_storage()[: rows.nbytes], 0, rows.shape, rows.stride())


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

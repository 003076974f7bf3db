"""The rehearsal memory: declared columns, filled by reservoir sampling, drawn from without replacement.

Reservoir decisions are made on the memory's device, from an explicit generator there. On the model's device neither
`add` nor `draw` waits for the device, and both can be captured in a CUDA graph. Clips are stored as the model saw
them: uint8 frames, float16 spectrograms, float32 for the small columns (`stella.methods.base` declares them). Columns
with a codec are encoded on the device of their values when they are added, and decoded where they are drawn to.

Processes that share a run make the same decisions, from the same generator, and each keeps the slots that are its own
(slot modulo their number): what the memory holds does not depend on how many there are. Rows travel as they are stored,
by a `Route`, of which no host has to know. `prefetch` lets them travel while the next batch is made.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from stella.columns import ID, Column
from stella.config import differences
from stella.errors import StellaError
from stella.peers import ALONE, Arriving, Peers, cut, owners
from stella.routes import Route


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
    """A uniform sample of at most `capacity` of all clips ever added (reservoir sampling; Vitter, 1985).

    Every time that a clip is added counts: one that the stream brings in several epochs may be held several times, each
    time as it was augmented then. `distinct` is the number of different clips.

    A memory on the CPU works with tensors on any device: adding clips waits for the device, drawing does not. On the
    model's device neither waits. One spare row: rejected clips are written there, so shapes stay static.
    """

    def __init__(
        self, columns: Mapping[str, Column], capacity: int, generator: torch.Generator, max_clips: int | None = None
    ) -> None:
        """On the generator's device, with room for the `most` clips that will be added at most (None: any number)."""
        self.columns = ID | dict(columns)
        self._stored = {name: column.stored for name, column in self.columns.items()}
        self.capacity, self.generator, self.device = capacity, generator, generator.device
        self.room = capacity if max_clips is None else min(capacity, max_clips)  # rows
        self._seen = torch.zeros((), dtype=torch.int64, device=self.device)
        self.offered = 0  # upper bound of `seen` that is known without waiting for the device
        self._asked = 0  # the largest draw so far
        self._last = 0  # the last draw, as it was asked for
        self._prefetched: _Prefetched | None = None
        self._commit: Tensor | None = None  # None: every write takes effect
        self.peers = ALONE

    def split(self, peers: Peers) -> None:
        """Keep only the slots of this process from now on; before the first clip is added."""
        self.peers = peers

    @cached_property
    def _rows(self) -> dict[str, Tensor]:
        """The slots of this process, in order, and the spare row; all ids, which are small."""
        own = len(range(self.peers.rank, self.room, self.peers.count))
        return {
            name: torch.zeros(
                (self.room if name == "id" else own) + 1, *column.shape, dtype=column.dtype, device=self.device
            )
            for name, column in self._stored.items()
        }

    @property
    def seen(self) -> int:
        """Number of clips ever added. Waits for the device, as `len` does."""
        return int(self._seen)

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    @property
    def drawable(self) -> int:
        """The shapes of draws depend on this number alone."""
        return min(self.offered, self.capacity, self._asked)

    @property
    def short(self) -> bool:
        """Whether a draw as large as the largest so far would return fewer clips."""
        return self.offered < min(self.capacity, max(self._asked, 1))

    def recount(self) -> None:
        """Wait for the device and read the exact number of clips added."""
        self.offered = self.seen

    @property
    def ids(self) -> Tensor:
        """Ids of the stored clips by slot, int64 [len]."""
        return self._rows["id"][: len(self)]

    @property
    def distinct(self) -> int:
        """Number of different clips that are stored."""
        return len(set(self.ids.tolist()))

    @contextmanager
    def commit_if(self, taken: Tensor) -> Iterator[None]:
        """Inside, `add` and `update` change nothing where `taken` (a bool scalar on any device) is false.

        The trainer skips a non-finite step this way, without the host knowing about it.
        """
        self._commit = taken.to(self.device)
        try:
            yield
        finally:
            self._commit = None

    def add(self, ids: Tensor, admit: Tensor | None = None, **columns: Tensor) -> None:
        """Offer clips in this order; each is kept with probability capacity / clips seen so far, itself included.

        Clips for which `admit` (bool [B]) is false are not offered: they do not count as seen.
        """
        self._cancel_prefetch()
        values = {"id": ids, **columns}
        if values.keys() != self.columns.keys():
            given, kept = ", ".join(values), ", ".join(self.columns)
            raise StellaError(f"the memory has the columns {kept} and was given {given}; give exactly these")
        self._check(values, len(ids))
        counts = self._counts(len(ids))
        total = sum(counts)
        if self.room < min(self.capacity, self.offered + total):
            raise StellaError(f"the memory has room for the {self.room:,} clips it was made for and is given more")
        offered = self._committed(None if admit is None else self._all(admit, counts)).expand(total)
        slots = self._decide(offered)
        self._seen += offered.sum()
        self.offered += total if offered.is_cuda else int(offered.sum())
        self._write(slots, values, counts)

    def draw(self, n: int, each: float = 1.0, to: torch.device | str | None = None) -> MemoryBatch | None:
        """Draw round(each · n) different clips, at least one, or all that are stored; None while the memory is empty.

        They are moved to `to`. (On a GPU the host counts clips as stored that were not admitted, or whose step was
        skipped: while the memory fills, as many more may be drawn than it holds, some of them twice.)
        """
        self._last = n = max(1, round(each * self.peers.total(n)))
        self._asked = max(self._asked, n)
        n, to = min(n, self.offered, self.capacity), self.device if to is None else torch.device(to)
        fetched = self._prefetched
        if fetched is None or self.peers.replicated or len(fetched.slots) != n:
            self._cancel_prefetch()
            return self._fetch(self._choose(n), to) if n > 0 else None
        self._prefetched = None
        return self._receive(fetched.slots, fetched.rows, to)

    def prefetch(self) -> None:
        """Let the rows of the next draw set out, if processes share it and it will be as large as the last one.

        To be called by all of them, after all that a step changes in the memory. No number depends on it.
        """
        n = min(self._last, self.offered, self.capacity)
        if not self.peers.alone and not self.peers.replicated and n >= self.peers.count:
            self._cancel_prefetch()
            before = self.generator.get_state()
            self._prefetched = _Prefetched(*self._send(self._choose(n), self.device), before)

    def _cancel_prefetch(self) -> None:
        if self._prefetched:
            for arrived in self._prefetched.rows.values():
                arrived()  # their memory is not free before
            self.generator.set_state(self._prefetched.before)
            self._prefetched = None

    def _choose(self, n: int) -> Tensor:
        """Slots of `n` different clips."""
        held = self._seen.clamp(1, self.capacity)
        noise = torch.rand(self.room, generator=self.generator, device=self.device)
        free = torch.arange(self.room, device=self.device) >= held
        return noise.masked_fill(free, 2.0).argsort()[:n] % held

    def more(self, drawn: MemoryBatch, n: int) -> bool:
        """Whether more than `n` clips were drawn."""
        return sum(self._counts(len(drawn))) > self.peers.total(n)

    def top(self, drawn: MemoryBatch, scores: Tensor, n: int) -> MemoryBatch:
        """Those `n` of the drawn clips that have the highest scores [len(drawn)], on the scores' device."""
        if self.peers.replicated:
            chosen = scores.topk(n).indices
            # The slots follow the choice to its device: the other way round the host would wait.
            slots = drawn.slots.to(scores.device, non_blocking=True)[chosen]
            return MemoryBatch(slots, {name: rows[chosen] for name, rows in drawn.columns.items()})
        counts = self._counts(len(drawn))
        chosen = self.peers.gather(scores, counts).topk(self.peers.total(n)).indices
        return self._fetch(self.peers.gather(drawn.slots, counts)[chosen.to(drawn.slots.device)], scores.device)

    def update(self, slots: Tensor, **columns: Tensor) -> None:
        """Overwrite these columns of the clips in `slots`, as `draw` returned them."""
        if unknown := columns.keys() - self.columns.keys():
            raise StellaError(
                f"the memory has no column {', '.join(sorted(unknown))}; it has {', '.join(self.columns)}"
            )
        self._cancel_prefetch()
        self._check(columns, len(slots))
        counts = self._counts(len(slots))
        slots = self._all(slots.to(self.device), counts)
        self._write(torch.where(self._committed(), slots, self.room), columns, counts)

    def state_dict(self) -> dict[str, Any]:
        """On the CPU, filled rows only: of this process. Rows of a memory on the CPU are views of its storage, as a
        module's are."""
        filled = {name: len(self) if name == "id" else len(self._own(len(self))) for name in self._rows}
        rows = {name: _own_storage(t[: filled[name]].cpu()) for name, t in self._rows.items()}
        generator = self._prefetched.before if self._prefetched else self.generator.get_state()
        return {"plan": self._plan(), "seen": self.seen, "offered": self.offered, "rows": rows, "generator": generator}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a state that has the rows of all slots."""
        if changed := differences(state["plan"], self._plan()):
            raise StellaError(f"the memory was saved with other sizes: {'; '.join(changed)}; restore them")
        self._prefetched = None
        self._seen.fill_(state["seen"])
        self.offered = state.get("offered", state["seen"])  # older checkpoints lack it
        own = self._own(len(self))
        for name, rows in state["rows"].items():
            mine = rows if name == "id" else rows[own.start :: own.step]
            self._rows[name][: len(mine)].copy_(mine)
        self.generator.set_state(state["generator"].cpu())

    def _plan(self) -> dict[str, Any]:
        """What a saved state is valid for."""
        columns = {name: f"{column.dtype} {list(column.shape)}" for name, column in self._stored.items()}
        return {"capacity": self.capacity, "columns": columns}

    def _committed(self, where: Tensor | None = None) -> Tensor:
        """`where`, and false everywhere in a step that is skipped."""
        where = torch.ones((), dtype=torch.bool, device=self.device) if where is None else where.to(self.device)
        return where if self._commit is None else where & self._commit

    def _decide(self, offered: Tensor) -> Tensor:
        """Vitter's algorithm R: the slot of each clip, or `room` (the spare row) if it is not kept."""
        count = self._seen + offered.cumsum(0)  # clips seen up to and including each one
        chance = torch.rand(len(offered), generator=self.generator, dtype=torch.float64, device=self.device)
        slots = torch.where(count <= self.capacity, count - 1, (chance * count).long())
        slots = torch.where(offered & (slots < self.capacity), slots, self.room)
        # Of the clips of this batch that take the same slot, the last one stays.
        order = torch.arange(len(slots), device=self.device)
        last = torch.zeros(self.room + 1, dtype=torch.int64, device=self.device).scatter_reduce(0, slots, order, "amax")
        return torch.where(last[slots] == order, slots, self.room)

    def _check(self, values: Mapping[str, Tensor], n: int) -> None:
        for name, value in values.items():
            column = self.columns[name]
            if tuple(value.shape) != (n, *column.shape):
                expected = [n, *column.shape]
                raise StellaError(f"the memory's column {name} takes {expected}, not {list(value.shape)}; check sizes")
            if value.is_floating_point() and not column.dtype.is_floating_point:
                raise StellaError(f"the memory stores {name} as {column.dtype}; give integers, not {value.dtype}")

    def _own(self, slots: int) -> range:
        """Those of the first `slots` slots that are kept here."""
        return range(self.peers.rank, slots, self.peers.count)

    def _counts(self, rows: int) -> list[int]:
        """How many rows each process gives."""
        return [rows] if self.peers.replicated else self.peers.counts(rows)

    def _all(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The rows of all processes."""
        return rows if self.peers.replicated else self.peers.gather(rows, counts)

    def _write(self, slots: Tensor, values: Mapping[str, Tensor], counts: list[int]) -> None:
        """Put the rows of all processes, in order of rank, into these slots."""
        peers, route = self.peers, None
        given = {name: self.columns[name].encode(value.detach()).to(self.device) for name, value in values.items()}
        if not peers.replicated:
            to = torch.where(slots < self.room, slots % peers.count, -1)
            route = Route(peers, *owners(counts, self.device), to, max(counts))
            slots = torch.where(route.fits, slots, self.room)
        if "id" in given:
            self._rows["id"].index_copy_(0, slots, self._all(given.pop("id"), counts))
        here = slots if peers.alone else self._here(slots)
        for name, value in given.items():
            if route:
                route.store(value, peers.own(counts), self._rows[name], slots // peers.count)
            else:  # every process has all of them
                self._rows[name].index_copy_(0, here, value)

    def _here(self, slots: Tensor) -> Tensor:
        """Which row each slot is in this process: the spare one, if it is another's."""
        own = (slots < self.room) & (slots % self.peers.count == self.peers.rank)
        return torch.where(own, slots // self.peers.count, len(self._own(self.room)))

    def _fetch(self, slots: Tensor, to: torch.device) -> MemoryBatch:
        """The clips in these slots on that device; of those, the share of this process."""
        return self._receive(*self._send(slots, to), to)

    def _send(self, slots: Tensor, to: torch.device) -> tuple[Tensor, dict[str, Arriving]]:
        """The rows in these slots, on their way to the processes that draw them; with the slots, of which one may be
        there twice if a message is full."""
        peers, rows = self.peers, self._rows
        if peers.alone:
            return slots, {name: partial(self._take, each, slots, to) for name, each in rows.items()}
        owner, at = slots % peers.count, slots // peers.count
        own, sent = self._own_rows(len(slots)), dict[str, Arriving]()
        if peers.replicated:
            sent |= {name: partial(peers.rows_to_all, each, owner, at) for name, each in rows.items() if name != "id"}
        else:
            shares = cut(len(slots), peers.count)
            route = Route(peers, owner, at, owners(shares, slots.device)[0], max(shares))
            slots = slots[route.instead]
            sent |= {name: route.fetch(each, own) for name, each in rows.items() if name != "id"}
        return slots, {"id": partial(rows["id"].__getitem__, slots[own]), **sent}

    def _receive(self, slots: Tensor, sent: Mapping[str, Arriving], to: torch.device) -> MemoryBatch:
        self.peers.note_draw(cut(len(slots), self.peers.count))
        rows = {name: arrived().to(to, non_blocking=True) for name, arrived in sent.items()}
        columns = {name: self.columns[name].decode(each) for name, each in rows.items()}
        return MemoryBatch(slots[self._own_rows(len(slots))], columns)

    def _own_rows(self, drawn: int) -> slice:
        """Those of the drawn clips that are for this process."""
        return slice(None) if self.peers.replicated else self.peers.rows(drawn)

    @staticmethod
    def _take(rows: Tensor, slots: Tensor, to: torch.device) -> Tensor:
        if rows.device.type != "cpu" or to.type == "cpu":
            return rows.index_select(0, slots).to(to, non_blocking=True)
        # Gather into pinned memory, so that the copy is asynchronous. Pinning all rows would not save this gather, and
        # torch rounds pinned allocations up to a power of two.
        staged = torch.empty(len(slots), *rows.shape[1:], dtype=rows.dtype, pin_memory=True)
        return torch.index_select(rows, 0, slots, out=staged).to(to, non_blocking=True)


@dataclass(frozen=True)
class _Prefetched:
    """A draw whose rows are on their way."""

    slots: Tensor
    rows: Mapping[str, Arriving]
    before: Tensor  # the generator's state


def _own_storage(rows: Tensor) -> Tensor:
    """The same rows over a storage that ends with them, without a copy: torch.save writes whole storages."""
    return torch.empty(0, dtype=rows.dtype).set_(rows.untyped_storage()[: rows.nbytes], 0, rows.shape, rows.stride())

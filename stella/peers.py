"""Which process of a run has which rows, and how they reach another one. A process on its own has them all.

`cut` is the one rule: rows in order, a run of them for each process, the first ones larger by one. Whoever shares
rows (the stream its clips, the memory its slots) is given the run's `Peers`. This file has those of a single process;
`train/distributed.py` has those that talk.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stella.clip import Device

Arriving = Callable[[], Tensor]  # waits for rows that are on their way, and returns them


def cut(total: int, count: int) -> list[int]:
    """So many rows for each of `count` processes."""
    return [total // count + (rank < total % count) for rank in range(count)]


class Peers:
    """The processes of a run; this one is alone."""

    alone = True
    rank = 0
    count = 1
    neighbours = 1  # processes on this machine, this one included
    static = False  # shapes must not depend on values: steps are recorded
    replicated = True  # every process has all rows of the current batch

    @property
    def aside(self) -> "Peers":
        """The same processes, for another thread: its collectives do not mix with this one's."""
        return self

    @property
    def first(self) -> bool:
        """Whether this is the one process that writes and speaks."""
        return self.rank == 0

    def rows(self, total: int) -> slice:
        """The rows of this process out of `total`."""
        return self.own(cut(total, self.count))

    def own(self, counts: Sequence[int]) -> slice:
        """The rows of this process, if each has so many."""
        start = sum(counts[: self.rank])
        return slice(start, start + counts[self.rank])

    def counts(self, rows: int) -> list[int]:
        """How many rows every process has, given that this one has `rows`."""
        return [rows]

    def total(self, rows: int) -> int:
        """The sum of what all processes ask for."""
        return rows

    def note_draw(self, counts: Sequence[int]) -> None:
        """Record how many of the clips drawn from memory each process was given."""

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all processes, in order of rank; `counts` has each one's number."""
        return rows

    def move(self, rows: Tensor, owner: Tensor, at: Tensor, to: Tensor) -> Tensor:
        """The rows for this process, in order. Row i is row `at[i]` of process `owner[i]`; it goes to `to[i]`.

        All three are int64 on the CPU and the same in all processes.
        """
        return rows[at.to(rows.device)]

    def all_to_all(self, rows: Tensor, sizes: tuple[list[int], list[int]] | None) -> Arriving:
        """The rows that each process sends to this one, without waiting for them; `rows` has those for each in turn.

        `sizes` are the numbers of rows from and to each process (none: equal ones).
        """
        return lambda: rows

    def rows_to_all(self, rows: Tensor, owner: Tensor, at: Tensor) -> Tensor:
        """Row `at[i]` of process `owner[i]`, for all i, to all processes; int64 on the device of the rows."""
        return rows[at]

    def gather_objects(self, thing: Any) -> list[Any]:
        """What each process tells the others."""
        return [thing]

    def maxima(self, *numbers: int) -> list[int]:
        """The largest of each number over the processes."""
        return list(numbers)


ALONE = Peers()


def owners(counts: Sequence[int], device: Device = "cpu") -> tuple[Tensor, Tensor]:
    """The process of each row, and its position there, for rows in order of rank."""
    return _owners(tuple(counts), torch.device(device))


@cache
def _owners(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    each = torch.tensor(counts)
    owner = torch.arange(len(counts)).repeat_interleave(each)
    at = torch.arange(int(each.sum())) - (each.cumsum(0) - each)[owner]
    return owner.to(device), at.to(device)

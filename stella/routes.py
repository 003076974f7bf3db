"""Rows that move from process to process: drawn and kept clips of the memory, videos of mismatched pairs."""

import math
from functools import cache

import torch
from torch import Tensor

from stella.peers import Arriving, Peers


class Route:
    """Row `at[i]` of process `owner[i]` goes to process `to[i]` (negative: nowhere).

    All three are int64, on the device of the rows, and the same in all processes. Every process sends one message to
    each of the others. Messages have exact sizes, so the host waits for the counts. Where steps are recorded
    (`peers.static`), all messages have one fixed size, and no host waits.
    Rows that overflow their message are dropped (probability below 1e-9, `message`); `fits` marks them, alike in all
    processes.
    """

    def __init__(self, peers: Peers, owner: Tensor, at: Tensor, to: Tensor, max_rows: int) -> None:
        """No process gives or takes more than `max_rows` rows."""
        self.peers, self.owner, self.at = peers, owner, at
        size = message(max_rows, peers.count) if peers.static else len(owner)
        number = torch.arange(len(owner), device=owner.device)
        pair = torch.where(to < 0, -1, owner * peers.count + to)
        order = pair.argsort(stable=True)
        first = torch.searchsorted(pair[order], pair[order])
        place = (number - first).clamp(max=size - 1)
        self._place = torch.empty_like(order).scatter(0, order, place)  # in its message
        held = torch.empty_like(order).scatter(0, order, order[first + place])
        self.stays = owner == to
        self.fits = self.stays | (held == number)
        self.instead = torch.where(self.fits, number, held)  # another row of the same message
        travels = self.fits & ~self.stays & (to >= 0)
        leaves, self._comes = travels & (owner == peers.rank), travels & (to == peers.rank)
        self._from = _Messages(peers, owner, self._comes, size)
        self._to = _Messages(peers, to, leaves, size)
        self._sizes = (self._from.sizes, self._to.sizes) if self._from.sizes and self._to.sizes else None
        self._sent = self._to.placed(leaves, self._place, at, 0)

    def fetch(self, rows: Tensor, own: slice) -> Arriving:
        """Rows for this process, which are those of `own`, as they are now; `instead` of what does not fit."""
        arriving, here = self.peers.all_to_all(rows[self._sent], self._sizes), self.stays[own]
        kept = rows[torch.where(here, self.at[own], 0)]
        place = torch.where(here, 0, self._from.begin[own] + self._place[own])

        def arrived() -> Tensor:
            came = arriving()
            return torch.where(here.view(-1, *[1] * (rows.dim() - 1)), kept, came[place]) if len(came) else kept

        return arrived

    def store(self, values: Tensor, own: slice, into: Tensor, at: Tensor) -> None:
        """Put this process's values, the rows `own`, into rows `at` [all] of their processes; the last row is spare."""
        arriving, spare = self.peers.all_to_all(values[self._sent], self._sizes), len(into) - 1
        rows = self._from.placed(self._comes, self._place, at, spare)
        into.index_copy_(0, rows, arriving())
        into.index_copy_(0, torch.where(self.stays[own], at[own], spare), values)


class _Messages:
    """Where the messages from, or to, each process begin."""

    def __init__(self, peers: Peers, process: Tensor, which: Tensor, size: int) -> None:
        """Row i, if it is one of `which`, is in the message from or to `process[i]`."""
        self.sizes: list[int] | None = None
        if peers.static:
            self.rows, self.begin = peers.count * size, size * process
        else:
            sizes = process[which].bincount(minlength=peers.count).cpu()
            self.sizes, self.rows = sizes.tolist(), int(sizes.sum())
            self.begin = (sizes.cumsum(0) - sizes).to(process.device)[process]

    def placed(self, which: Tensor, place: Tensor, values: Tensor, empty: int) -> Tensor:
        """Values [all] by their place in the messages."""
        at = torch.where(which, self.begin + place, self.rows)
        return torch.full((self.rows + 1,), empty, device=values.device).scatter(0, at, values)[:-1]


@cache
def message(rows: int, processes: int) -> int:
    """Capacity of a message if each process sends `rows` rows to processes drawn uniformly at random: some message
    overflows with probability below 1e-9 (union bound)."""
    chance, tail, size = 1 / processes, 0.0, rows
    while size > 1:
        tail += math.comb(rows, size) * chance**size * (1 - chance) ** (rows - size)
        if tail * processes**2 > 1e-9:
            break
        size -= 1
    return size

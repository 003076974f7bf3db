"""Several processes that train as one: `torchrun --nproc-per-node N -m stella pretrain …`

Each process has its rows of every batch (`stella.peers.cut`), and all have the same weights. A step of N processes is
that of one process with the same batch, up to rounding, because of this:

- **The batch is the stream's.** All streams are at the same position and make their own rows of each batch.
- **Random numbers are those of the whole batch.** Every process draws them all, from generators in the same state, and
  takes its rows.
- **The loss is the mean over all clips.** Each process computes the mean of its rows' losses, weighted by their number,
  so that the average over the processes is the mean (`losses.mean`). DDP averages the gradients so, and so does FSDP
  (`train/fsdp.py`), with which no process has all weights.
- **All clips are negatives of one another**: own rows against everybody's columns, gathered with their gradients.
- **The memory's decisions are the same everywhere**; its slots are spread, and rows travel to whoever needs them.
- **What the whole batch decides** (ESMER's mean error, MIR's choice, mismatched pairs, virtual steps) is computed from
  everybody's values.

Methods and losses know nothing of this: `train/sharing.py` has the functions that are replaced while a loss is
computed, as `fast/parts.py` does for speed.

A batch or a draw of fewer clips than processes is not worth sharing: each process then has all of its rows and computes
the same (`World.replicated`).
"""

import copy
import inspect
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stella.clip import Batch
from stella.errors import StellaError
from stella.memory import Memory
from stella.methods.base import Losses, Method
from stella.peers import Arriving, Peers, cut


@dataclass(frozen=True)
class SharedRows:
    """Clips that processes share: one run of them (the batch, or a draw), or two (x ∪ m), each in order of rank."""

    runs: tuple[tuple[int, ...], ...]  # clips of each process

    @property
    def counts(self) -> list[int]:
        return [sum(each) for each in zip(*self.runs, strict=True)]

    @property
    def total(self) -> int:
        return sum(map(sum, self.runs))

    def of(self, rank: int, device: torch.device) -> Tensor:
        """The positions of a process's rows among all, int64."""
        return _positions(self.runs, rank, device)


@cache
def _positions(runs: tuple[tuple[int, ...], ...], rank: int, device: torch.device) -> Tensor:
    begins = accumulate((sum(run) for run in runs), initial=0)
    starts = [begin + sum(run[:rank]) for begin, run in zip(begins, runs, strict=False)]
    rows = [torch.arange(s, s + run[rank]) for s, run in zip(starts, runs, strict=True)]
    return torch.cat(rows).to(device)


class BatchSpread:
    """How the clips of a batch, and those drawn for it, are spread."""

    def __init__(self, batch: Sequence[int], replicated: bool) -> None:
        self.batch, self.replicated = tuple(batch), replicated
        self.drawn: tuple[int, ...] | None = None


@dataclass(frozen=True)
class LocalBatch(Batch):
    """This process's rows of a batch."""

    spread: BatchSpread

    @property
    def clips(self) -> int:
        return sum(self.spread.batch)


class World(Peers):
    """The processes of this run, by torch.distributed: the same collectives in the same order everywhere."""

    alone = False

    def __init__(self, minutes: float = 10.0) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", self.count))
        self.limit = timedelta(minutes=minutes)
        # What hosts tell each other, and rows in main memory: the first group may be NCCL's.
        self.hosts = dist.new_group(backend="gloo", timeout=self.limit)
        self.spread_now = BatchSpread([0] * self.count, replicated=False)

    # ---- rows

    @property
    def replicated(self) -> bool:  # type: ignore[override]
        return self.spread_now.replicated

    def receive(self, batch: Batch, total: int, memory: Memory | None) -> LocalBatch:
        """A batch of the stream, of which this process has its rows; all of them if they are too few to be shared."""
        drawable = 0 if memory is None else min(memory.offered, memory.capacity)
        counts = cut(total, self.count)
        if total >= self.count and (drawable == 0 or drawable >= self.count):
            return LocalBatch(batch.video, batch.audio, batch.ids, BatchSpread(counts, replicated=False))
        video, audio, ids = (self.gather(each, counts) for each in (batch.video, batch.audio, batch.ids))
        return LocalBatch(video, audio, ids, BatchSpread(counts, replicated=True))

    def rows_like(self, rows: int) -> SharedRows:
        """The set of which this process has `rows` rows: the batch, the last draw, or both."""
        sets, ambiguous = _sets(self.spread_now.batch, self.spread_now.drawn)
        found = [each for each in sets if each.counts[self.rank] == rows]
        if ambiguous:  # to some process; so all tell their numbers
            told = self.gather_objects(rows)
            found = [each for each in sets if each.counts == told]
        if not found:
            raise StellaError(
                f"this method uses {rows} rows that are neither those of the batch, nor of the last draw from memory, "
                "nor both; run it in one process"
            )
        return found[0]

    def counts(self, rows: int) -> list[int]:
        return self.rows_like(rows).counts

    def total(self, rows: int) -> int:
        if self.replicated:
            return rows
        return rows * self.count if len(set(self.spread_now.batch)) == 1 else sum(self.gather_objects(rows))

    def note_draw(self, counts: Sequence[int]) -> None:
        self.spread_now.drawn = tuple(counts)

    # ---- collectives

    @cached_property
    def aside(self) -> "World":
        other = copy.copy(self)
        other.hosts = dist.new_group(backend="gloo", timeout=self.limit)
        return other

    def gather_objects(self, thing: Any) -> list[Any]:
        told: list[Any] = [None] * self.count
        dist.all_gather_object(told, thing, group=self.hosts)
        return told

    def maxima(self, *numbers: int) -> list[int]:
        told = torch.tensor(numbers)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.hosts)
        return [int(number) for number in told]

    def _group(self, rows: Tensor) -> Any:
        return self.hosts if rows.device.type == "cpu" else dist.group.WORLD

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Without gradient."""
        longest = max(counts)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        sent = _bytes(padded)
        got = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(got, sent, group=self._group(rows))
        return torch.cat([each[:n].view(rows.dtype) for each, n in zip(got, counts, strict=True)]).view(
            -1, *rows.shape[1:]
        )

    def move(self, rows: Tensor, owner: Tensor, at: Tensor, to: Tensor) -> Tensor:
        mine = owner == self.rank
        leaving = [at[mine & (to == rank)] for rank in range(self.count)]
        arriving = owner[to == self.rank]
        sent = _bytes(rows[torch.cat(leaving).to(rows.device)])
        got = sent.new_empty(len(arriving), *sent.shape[1:])
        sizes = arriving.bincount(minlength=self.count).tolist(), [len(each) for each in leaving]
        dist.all_to_all_single(got, sent, *sizes, group=self._group(rows))
        order = arriving.argsort(stable=True).argsort().to(rows.device)
        return got.view(rows.dtype).view(len(arriving), *rows.shape[1:])[order]

    def all_to_all(self, rows: Tensor, sizes: tuple[list[int], list[int]] | None) -> Arriving:
        sent = _bytes(rows)
        got = sent.new_empty(sum(sizes[0]) if sizes else len(sent), *sent.shape[1:])
        come, go = sizes or (None, None)
        work = dist.all_to_all_single(got, sent, come, go, group=self._group(rows), async_op=True)

        def arrived() -> Tensor:
            work.wait()
            return got.view(rows.dtype).view(-1, *rows.shape[1:])

        return arrived

    def rows_to_all(self, rows: Tensor, owner: Tensor, at: Tensor) -> Tensor:
        here = owner == self.rank
        given = _bytes(rows[torch.where(here, at, 0)]) * here[:, None]
        dist.all_reduce(given, group=self._group(rows))
        return given.view(rows.dtype).view(len(at), *rows.shape[1:])

    def reduce_scatter_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The sum over the processes of everybody's rows [sum(counts), …], of which this one is given its own."""
        longest = max(counts)
        parts = [F.pad(part, (0, 0, 0, longest - len(part))) for part in torch.split(rows, list(counts))]
        own = torch.empty_like(parts[self.rank])
        dist.reduce_scatter(own, parts, group=self._group(rows))
        return own[: counts[self.rank]]

    def average(self, values: Tensor) -> Tensor:
        """The mean over the processes."""
        values = (values / self.count).contiguous()
        dist.all_reduce(values, group=self._group(values))
        return values

    # ---- a step

    def averaging(self, method: Method) -> "Averaged":
        """`method.loss` as a module whose gradients are averaged while the backward pass goes on.

        Parts are compiled one by one (`fast/parts.py`), so that gradients come early: none is to be split for DDP.
        """
        torch._dynamo.config.optimize_ddp = False
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch 2.13
        how: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: False}
        return Averaged(_Loss(method), **how)

    def on(self, batch: Batch) -> None:
        """From now on, losses and memory work on this batch."""
        assert isinstance(batch, LocalBatch)
        self.spread_now = batch.spread

    def with_mean_parts(self, found: Losses) -> Losses:
        """The same losses with the parts' means over the processes, which are the same in all."""
        values = self.average(torch.stack([part.detach() for part in found.parts.values()]))
        return replace(found, parts=dict(zip(found.parts, values.unbind(), strict=True)))


@lru_cache(maxsize=64)
def _sets(batch: tuple[int, ...], drawn: tuple[int, ...] | None) -> tuple[list[SharedRows], bool]:
    """The sets of rows that a method can mean, and whether two of them have equally many in some process."""
    runs = [(batch,)] if drawn is None else [(batch,), (drawn,), (batch, drawn)]
    sets = [SharedRows(each) for each in dict.fromkeys(runs)]
    numbers = list(zip(*(each.counts for each in sets), strict=True))  # of each process
    return sets, any(len(set(each)) < len(sets) for each in numbers)


def _bytes(rows: Tensor) -> Tensor:
    """Rows [n, …] as bytes [n, size]: gloo does not know every dtype."""
    flat = rows.contiguous().reshape(len(rows), math.prod(rows.shape[1:]))
    return flat.view(torch.uint8)


class Averaged(DistributedDataParallel):
    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Around a loss: gradients are averaged in the backward pass of a step's last batch."""
        return nullcontext() if last else self.no_sync()


class _Loss(nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: Batch) -> Losses:
        return self.method.loss(batch)

"""Several processes that train as one: `torchrun --nproc-per-node N -m stella pretrain …`

Each process has its rows of every batch (`stella.peers.cut`), and all have the same weights. A step of N processes is
that of one process with the same batch, up to rounding, because of this:

- **The batch is the stream's.** All streams are at the same position and make their own rows of each batch.
- **Random numbers are those of the whole batch.** Every process draws them all, from generators in the same state, and
  takes its rows.
- **The loss is the mean over all clips.** Each process computes the mean of its rows' losses, weighted by their number,
  so that the average over the processes is the mean (`losses.mean`). DDP averages the gradients so.
- **All clips are negatives of one another**: own rows against everybody's columns, gathered with their gradients.
- **The memory's decisions are the same everywhere**; its slots are spread, and rows travel to whoever needs them.
- **What the whole batch decides** (ESMER's mean error, MIR's choice, mismatched pairs, virtual steps) is computed from
  everybody's values.

Methods and losses know nothing of this. While a loss is computed, the functions listed in `World._swaps` are replaced
by versions for several processes wherever they are bound, as `fast.parts` does for speed.

A batch or a draw of fewer clips than processes is not worth sharing: each process then has all of its rows and computes
the same (`World.whole`).
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stella import losses, selection
from stella.clip import Batch
from stella.errors import StellaError
from stella.memory import Memory
from stella.methods.base import Losses, Method
from stella.methods.virtual import LooksAhead
from stella.model import avm
from stella.model.avm import AVM, Matching, Pairs, Scored
from stella.model.cav import CAV
from stella.peers import Peers, cut, owners

Function = Callable[..., Any]


@dataclass(frozen=True)
class Rows:
    """Clips that processes share: one run of them (the batch, or a draw), or two (x ∪ m), each in order of rank."""

    runs: tuple[tuple[int, ...], ...]  # clips of each process

    @property
    def counts(self) -> list[int]:
        return [sum(each) for each in zip(*self.runs, strict=True)]

    @property
    def total(self) -> int:
        return sum(map(sum, self.runs))

    def of(self, rank: int) -> Tensor:
        """The positions of a process's rows among all, int64."""
        begins = accumulate((sum(run) for run in self.runs), initial=0)
        starts = [begin + sum(run[:rank]) for begin, run in zip(begins, self.runs, strict=False)]
        return torch.cat([torch.arange(s, s + run[rank]) for s, run in zip(starts, self.runs, strict=True)])


class Layout:
    """How the clips of a batch, and those drawn for it, are spread."""

    def __init__(self, batch: Sequence[int], whole: bool) -> None:
        self.batch, self.whole = tuple(batch), whole
        self.drawn: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Part(Batch):
    """This process's rows of a batch."""

    layout: Layout

    @property
    def clips(self) -> int:
        return sum(self.layout.batch)


class World(Peers):
    """The processes of this run, by torch.distributed: the same collectives in the same order everywhere."""

    def __init__(self, minutes: float = 10.0) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        # What hosts tell each other, and rows in main memory: the first group may be NCCL's.
        self.hosts = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
        self.here = Layout([0] * self.count, whole=False)

    # ---- rows

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return self.here.whole

    def receive(self, batch: Batch, total: int, memory: Memory | None) -> Part:
        """A batch of the stream, of which this process has its rows; all of them if they are too few to be shared."""
        drawable = 0 if memory is None else min(memory.offered, memory.capacity)
        counts = cut(total, self.count)
        if total >= self.count and (drawable == 0 or drawable >= self.count):
            return Part(batch.video, batch.audio, batch.ids, Layout(counts, whole=False))
        rows = (self.gather(each, counts) for each in (batch.video, batch.audio, batch.ids))
        return Part(*rows, Layout(counts, whole=True))

    def layout(self, rows: int) -> Rows:
        """Which rows these are, of which this process has so many: the batch's, those of the last draw, or both."""
        sets, ambiguous = _sets(self.here.batch, self.here.drawn)
        found = [each for each in sets if each.counts[self.rank] == rows]
        if ambiguous:  # to some process; so all tell their numbers
            told = self.tell(rows)
            found = [each for each in sets if each.counts == told]
        if not found:
            raise StellaError(
                f"this method uses {rows} rows that are neither those of the batch, nor of the last draw from memory, "
                "nor both; run it in one process"
            )
        return found[0]

    def counts(self, rows: int) -> list[int]:
        return self.layout(rows).counts

    def wanted(self, rows: int) -> int:
        if self.whole:
            return rows
        return rows * self.count if len(set(self.here.batch)) == 1 else sum(self.tell(rows))

    def drew(self, counts: Sequence[int]) -> None:
        self.here.drawn = tuple(counts)

    # ---- collectives

    def tell(self, thing: Any) -> list[Any]:
        told: list[Any] = [None] * self.count
        dist.all_gather_object(told, thing, group=self.hosts)
        return told

    def _group(self, rows: Tensor) -> Any:
        return self.hosts if rows.device.type == "cpu" else dist.group.WORLD

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Without gradient."""
        most = max(counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        sent = _bytes(padded)
        got = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(got, sent, group=self._group(rows))
        return torch.cat([each[:n].view(rows.dtype) for each, n in zip(got, counts, strict=True)]).view(
            -1, *rows.shape[1:]
        )

    def move(self, rows: Tensor, owner: Tensor, at: Tensor, to: Tensor | None) -> Tensor:
        if to is None:
            given = self.gather(
                rows[at[owner == self.rank].to(rows.device)], owner.bincount(minlength=self.count).tolist()
            )
            order = owner.argsort(stable=True)
        else:
            mine = owner == self.rank
            leaving = [at[mine & (to == rank)] for rank in range(self.count)]
            arriving = owner[to == self.rank]
            sent = _bytes(rows[torch.cat(leaving).to(rows.device)])
            got = sent.new_empty(len(arriving), *sent.shape[1:])
            sizes = arriving.bincount(minlength=self.count).tolist(), [len(each) for each in leaving]
            dist.all_to_all_single(got, sent, *sizes, group=self._group(rows))
            given = got.view(rows.dtype).view(len(arriving), *rows.shape[1:])
            order = arriving.argsort(stable=True)
        return given[order.argsort().to(rows.device)]

    def average(self, values: Tensor) -> Tensor:
        """The mean over the processes."""
        values = values / self.count
        dist.all_reduce(values, group=self._group(values))
        return values

    # ---- a step

    def averaging(self, method: Method) -> DistributedDataParallel:
        """`method.loss` as a module whose gradients are averaged while the backward pass goes on."""
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch 2.13
        return DistributedDataParallel(_Loss(method), gradient_as_bucket_view=True, **{buffers: False})

    @contextmanager
    def on(self, batch: Batch) -> Iterator[None]:
        """Inside, losses and memory work on this batch: on what the processes share, or each on all of it."""
        assert isinstance(batch, Part)
        self.here = batch.layout
        with nullcontext() if self.whole else _replaced(self._swaps()):
            yield

    def told(self, found: Losses) -> Losses:
        """The same losses with the parts' means over the processes, which are the same in all."""
        values = self.average(torch.stack([part.detach() for part in found.parts.values()]))
        return replace(found, parts=dict(zip(found.parts, values.unbind(), strict=True)))

    def _swaps(self) -> list[tuple[Any, str, Function]]:
        """(owner, name, version for several processes) of all that depends on other rows than a process's own."""
        swaps = [(owner, name, getattr(self, "_" + plain)) for plain in SHARED for owner, name in _bound(plain)]
        swaps.append((selection, "correlation", self._correlation(selection.correlation)))
        return [*swaps, (LooksAhead, "gradients", self._gradients(LooksAhead.gradients))]

    def _uniform(self, rows: int, *shape: int, generator: torch.Generator) -> Tensor:
        layout = self.layout(rows)
        drawn: Tensor = PLAIN["uniform"](layout.total, *shape, generator=generator)
        return drawn[layout.of(self.rank).to(drawn.device)]

    def _mean(self, values: Tensor) -> Tensor:
        return values.sum() * (self.count / self.layout(len(values)).total)

    def _every(self, values: Tensor) -> Tensor:
        return self.gather(values.detach(), self.counts(len(values)))

    def _pair_nll(self, z_a: Tensor, z_v: Tensor, tau: float = 0.05) -> tuple[Tensor, Tensor]:
        """Own rows against everybody's columns (Eq. 9)."""
        counts = self.counts(len(z_a))
        own = torch.arange(len(z_a), device=z_a.device), sum(counts[: self.rank])
        with torch.autocast(z_a.device.type, enabled=False):
            a, v = (F.normalize(z.to(torch.promote_types(z.dtype, torch.float32)), dim=-1) for z in (z_a, z_v))
            all_a, all_v = GatherRows.apply(torch.cat([a, v], 1), self, counts).chunk(2, 1)  # type: ignore[no-untyped-call]
            to_v, to_a = a @ all_v.T / tau, v @ all_a.T / tau  # [own, all]
            at = own[0], own[0] + own[1]
            return to_v.logsumexp(1) - to_v[at], to_a.logsumexp(1) - to_a[at]

    def _pair_past(self, rows: Tensor, batch: int) -> Tensor:
        """Clip i of all with drawn row i of all, modulo their number."""
        drawn = self.here.drawn
        if drawn is None or drawn == self.here.batch:
            return rows
        start = sum(self.here.batch[: self.rank])
        which = torch.arange(start, start + batch, device=rows.device) % sum(drawn)
        return self.gather(rows, drawn)[which]

    def _correlation(self, one: Function) -> Function:
        def correlation(k: Tensor, query_now: Tensor, query_past: Tensor | None, *more: Any) -> Tensor:
            past = None if query_past is None else self._pair_past(query_past, len(k))
            with _replaced([(selection, "pair_past", PLAIN["pair_past"])]):  # they are paired; `one` may be compiled
                out: Tensor = one(k, query_now, past, *more)
            return out

        return correlation

    def _draw_pairs(self, batch: int, generator: torch.Generator) -> Pairs:
        pairs: Pairs = PLAIN["draw_pairs"](self.layout(batch).total, generator)
        return pairs

    def _match(self, model: CAV, module: AVM, scored: Scored, pairs: Pairs) -> Matching:
        """Each own clip with its own video or another clip's, which may come from another process.

        All are fused again, so that shapes do not depend on the draw.
        """
        counts = self.counts(len(scored.x_a))
        owner, at = owners(counts)
        video = torch.arange(len(owner))
        video[pairs.audio.cpu()] = pairs.video.cpu()
        matched = video == torch.arange(len(owner))
        with torch.no_grad():
            x_v = self.move(scored.x_v, owner[video], at[video], owner)
            o_a, o_v = model.fuse_joint(scored.x_a, x_v, scored.positions_a, scored.positions_v)
        return Matching(module(o_a, o_v), matched[owner == self.rank].to(o_a))

    def _gradients(self, one: Function) -> Function:
        def gradients(method: LooksAhead, loss: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
            found = one(method, loss, inputs)
            if not isinstance(inputs[0], nn.Parameter):  # rows: what all processes' losses say of them is added up
                return tuple(gradient / self.count for gradient in found)
            flat = self.average(torch.cat([gradient.flatten() for gradient in found]))
            pieces = flat.split([gradient.numel() for gradient in found])
            return tuple(piece.view_as(gradient) for piece, gradient in zip(pieces, found, strict=True))

        return gradients


SHARED = ("uniform", "mean", "every", "pair_nll", "pair_past", "draw_pairs", "match")
PLAIN: dict[str, Function] = {
    name: vars(next(owner for owner in (losses, selection, avm) if name in vars(owner)))[name] for name in SHARED
}


def _bound(name: str) -> list[tuple[Any, str]]:
    """All modules that have this function, under whatever name."""
    if name not in _places:
        plain, modules = PLAIN[name], list(sys.modules.values())
        _places[name] = [(m, key) for m in modules for key, value in list(vars(m).items()) if value is plain]
    return _places[name]


_places: dict[str, list[tuple[Any, str]]] = {}


@contextmanager
def _replaced(swaps: Sequence[tuple[Any, str, Function]]) -> Iterator[None]:
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in swaps]
    try:
        for owner, name, function in swaps:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


@lru_cache(maxsize=64)
def _sets(batch: tuple[int, ...], drawn: tuple[int, ...] | None) -> tuple[list[Rows], bool]:
    """The sets of rows that a method can mean, and whether two of them have equally many in some process."""
    runs = [(batch,)] if drawn is None else [(batch,), (drawn,), (batch, drawn)]
    sets = [Rows(each) for each in dict.fromkeys(runs)]
    numbers = list(zip(*(each.counts for each in sets), strict=True))  # of each process
    return sets, any(len(set(each)) < len(sets) for each in numbers)


def _bytes(rows: Tensor) -> Tensor:
    """Rows [n, …] as bytes [n, size]: gloo does not know every dtype."""
    flat = rows.contiguous().reshape(len(rows), math.prod(rows.shape[1:]))
    return flat.view(torch.uint8)


class _Loss(nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: Batch) -> Losses:
        return self.method.loss(batch)


class GatherRows(torch.autograd.Function):
    """Rows of all processes in order of rank. The gradient of a row is the sum of what all processes' losses say."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World, counts: list[int]) -> Tensor:
        ctx.world, ctx.counts = world, counts
        return world.gather(rows, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        world, start = ctx.world, sum(ctx.counts[: ctx.world.rank])
        total = world.average(gradients[0]) * world.count
        return total[start : start + ctx.counts[world.rank]], None, None

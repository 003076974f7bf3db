"""What depends on other rows than a process's own, in versions for several processes. Applied around a loss:

    with shared(world, batch):
        loss = method.loss(batch)

Inside, each function of `SHARED` is its version for several processes wherever it is bound; outside, it is the plain
code. Methods, losses and selection know nothing of this, as they know nothing of `fast`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stella import losses, selection
from stella.clip import Batch
from stella.methods.virtual import LooksAhead
from stella.model import avm
from stella.model.avm import AVM, PairLogits, Pairs, Scored
from stella.model.cav import CAV
from stella.peers import owners
from stella.routes import Route
from stella.train.distributed import World

Function = Callable[..., Any]

SHARED: dict[str, Any] = {
    "uniform": selection,
    "pair_past": selection,
    "mean": losses,
    "every": losses,
    "pair_nll": losses,
    "draw_pairs": avm,
    "match": avm,
}
PLAIN: dict[str, Function] = {name: vars(owner)[name] for name, owner in SHARED.items()}
_places: dict[str, tuple[int, list[tuple[Any, str]]]] = {}  # how many modules there were, and those that have it


@contextmanager
def shared(world: World, batch: Batch) -> Iterator[None]:
    """Inside, losses of this batch are computed over the rows of all processes, unless each has all of them."""
    world.on(batch)
    if world.replicated:
        yield
        return
    ours = Shared(world)
    swaps = [(owner, key, getattr(ours, name)) for name in SHARED for owner, key in _bound(name)]
    swaps.append((selection, "correlation", ours.correlation(selection.correlation)))
    swaps.append((LooksAhead, "gradients", ours.gradients(LooksAhead.gradients)))
    with replaced(swaps):
        yield


@contextmanager
def replaced(swaps: Sequence[tuple[Any, str, Function]]) -> Iterator[None]:
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in swaps]
    try:
        for owner, name, function in swaps:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _bound(name: str) -> list[tuple[Any, str]]:
    """All modules that have this function, under whatever name; methods in files of one's own among them.

    They are looked up again when a module was imported since.
    """
    loaded, found = _places.get(name, (0, []))
    if loaded != len(sys.modules):
        plain, modules = PLAIN[name], list(sys.modules.values())
        found = [(m, key) for m in modules for key, value in _names(m) if value is plain]
        _places[name] = len(modules), found
    return found


def _names(module: Any) -> list[tuple[str, Any]]:
    """What a module has by name; nothing of a None, which stands in `sys.modules` for one that must not be imported."""
    return list(getattr(module, "__dict__", {}).items())


class Shared:
    """The functions of `SHARED`, over the rows of all processes."""

    def __init__(self, world: World) -> None:
        self.world = world

    def uniform(self, rows: int, *shape: int, generator: torch.Generator) -> Tensor:
        """Everybody's noise, of which this process takes its rows."""
        alike = self.world.rows_like(rows)
        drawn: Tensor = PLAIN["uniform"](alike.total, *shape, generator=generator)
        return drawn[alike.of(self.world.rank, drawn.device)]

    def mean(self, values: Tensor) -> Tensor:
        return values.sum() * (self.world.count / self.world.rows_like(len(values)).total)

    def every(self, values: Tensor) -> Tensor:
        return self.world.gather(values.detach(), self.world.counts(len(values)))

    def pair_nll(self, z_a: Tensor, z_v: Tensor, tau: float = 0.05) -> tuple[Tensor, Tensor]:
        """Own rows against everybody's columns (Eq. 9)."""
        counts = self.world.counts(len(z_a))
        row = torch.arange(len(z_a), device=z_a.device)
        own = row, row + sum(counts[: self.world.rank])
        with torch.autocast(z_a.device.type, enabled=False):
            a, v = (F.normalize(losses.wide(z), dim=-1) for z in (z_a, z_v))
            both: Tensor = GatherRows.apply(torch.cat([a, v], 1), self.world, counts)  # type: ignore[no-untyped-call]
            all_a, all_v = both.chunk(2, 1)
            to_v, to_a = a @ all_v.T / tau, v @ all_a.T / tau  # [own, all]
            return to_v.logsumexp(1) - to_v[own], to_a.logsumexp(1) - to_a[own]

    def pair_past(self, rows: Tensor, batch: int) -> Tensor:
        """Clip i of all with drawn row i of all, modulo their number."""
        now, drawn = self.world.spread_now.batch, self.world.spread_now.drawn
        if drawn is None or drawn == now:
            return rows
        start = sum(now[: self.world.rank])
        which = torch.arange(start, start + batch, device=rows.device) % sum(drawn)
        return self.world.gather(rows, drawn)[which]

    def correlation(self, one: Function) -> Function:
        """Pairs the rows beforehand: `one` may be compiled."""

        def correlation(k: Tensor, query_now: Tensor, query_past: Tensor | None, *more: Any) -> Tensor:
            past = None if query_past is None else self.pair_past(query_past, len(k))
            with replaced([(selection, "pair_past", PLAIN["pair_past"])]):
                out: Tensor = one(k, query_now, past, *more)
            return out

        return correlation

    def draw_pairs(self, batch: int, generator: torch.Generator) -> Pairs:
        pairs: Pairs = PLAIN["draw_pairs"](self.world.rows_like(batch).total, generator)
        return pairs

    def match(self, model: CAV, module: AVM, scored: Scored, pairs: Pairs) -> PairLogits:
        """Each own clip with its own video, or with another clip's, which may come from another process.

        Matched pairs are fused again too, so that shapes do not depend on the draw.
        """
        counts, device = self.world.counts(len(scored.x_a)), scored.x_v.device
        owner, at = owners(counts, device)
        clip, own = torch.arange(len(owner), device=device), self.world.own(counts)
        video = clip.scatter(0, pairs.audio.to(device), pairs.video.to(device))
        with torch.no_grad():
            x_v = Route(self.world, owner[video], at[video], owner, max(counts)).fetch(scored.x_v, own)()
            o_a, o_v = model.fuse_joint(scored.x_a, x_v, scored.positions_a, scored.positions_v)
        return PairLogits(module(o_a, o_v), (video == clip)[own].to(o_a))

    def gradients(self, one: Function) -> Function:
        """Of virtual steps, averaged over the processes; of rows, which every process's loss depends on, added up."""
        count = self.world.count

        def gradients(method: LooksAhead, loss: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
            found = one(method, loss, inputs)
            if not isinstance(inputs[0], nn.Parameter):
                return tuple(gradient / count for gradient in found)  # the gather's gradient has added them up
            flat = self.world.average(torch.cat([gradient.flatten() for gradient in found]))
            pieces = torch.split(flat, [gradient.numel() for gradient in found])
            return tuple(piece.view_as(gradient) for piece, gradient in zip(pieces, found, strict=True))

        return gradients


class GatherRows(torch.autograd.Function):
    """Rows of all processes in order of rank. The gradient of a row is the sum of what all processes' losses say."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World, counts: list[int]) -> Tensor:
        ctx.world, ctx.counts = world, counts
        return world.gather(rows, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.world.reduce_scatter_rows(gradients[0], ctx.counts), None, None

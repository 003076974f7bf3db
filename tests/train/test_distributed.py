"""Several real processes train as one does: values, gradients, weights, memory."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.noise import Noise
from helpers.team import SHAPES, compare, fork

from stella import losses, routes
from stella.clip import Clip
from stella.columns import Column
from stella.data.stream import Stream, StreamConfig
from stella.errors import ClipError
from stella.memory import Memory
from stella.methods import METHODS
from stella.peers import ALONE, Peers, cut, owners
from stella.rng import generator
from stella.routes import Route, message
from stella.train import sharing
from stella.train.distributed import BatchSpread, World

ODD = [f"{name}:{clips}" for name in ("er", "stella", "mir", "lump", "gmed") for clips in (3, 5, 7)]


@pytest.mark.parametrize(
    ("count", "steps", "static", "cases"),
    [
        (1, 3, True, ["stella"]),  # as `benchmarks.scaling gpu` does
        (2, 5, True, ["stella", "mir"]),
        (2, 5, False, ["stella", "esmer"]),
        (
            2,
            5,
            False,
            ["chorus/0.1", "chorus/1.5", "er/0.1", "derpp/0.1", "stella/0.1"],
        ),  # fewer drawn clips than processes too
        (2, 5, False, ["derpp+dct", "chorus/1.5+dct", "gmed:5", "lump:3", "er/3:3"]),
        pytest.param(2, 20, False, [*METHODS, *ODD], marks=pytest.mark.slow),
        pytest.param(4, 20, False, [*METHODS, *ODD], marks=pytest.mark.slow),
        pytest.param(2, 20, True, [*METHODS, *ODD], marks=pytest.mark.slow),
        pytest.param(4, 20, True, [*METHODS, *ODD], marks=pytest.mark.slow),
    ],
)
def test_processes_train_as_one_does(count: int, steps: int, static: bool, cases: list[str]) -> None:
    """In batches that divide, that do not, and that are smaller than the processes are many.

    With messages of exact sizes, and of one size as in steps that are recorded.
    """
    for case, found in compare(count, steps, cases, static=static).items():
        assert found["losses"] < 1e-12 and found["gradients"] < 1e-12 and found["weights"] < 1e-8, (case, found)
        assert found.get("memory", 0) < 1e-3 and found.get("ids", 0) == 0, (case, found)  # columns in half precision


@pytest.mark.slow
def test_several_batches_a_step_and_slow_weights() -> None:
    for case, found in compare(2, 20, ["gmed", "cls_er", "stella"], accumulate=3, ema=0.9).items():
        assert found["losses"] < 1e-12 and found["weights"] < 1e-8 and found["slow"] < 1e-8, (case, found)


def test_the_comparison_sees_a_gather_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def cut(ctx: Any, gradient: Any) -> Any:
        return gradient.split(ctx.counts)[ctx.world.rank], None, None

    monkeypatch.setattr(sharing.GatherRows, "backward", staticmethod(cut))
    found = compare(2, 2, ["finetune"])["finetune"]
    assert found["gradients"] > 1e-3 and found["weights"] > 1e-3, found


def test_functions_of_a_module_that_is_imported_later_are_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method in a file of one's own, loaded after another method's first step."""
    sharing._bound("mean")
    monkeypatch.setitem(sys.modules, "blocked", None)  # type: ignore[arg-type]  # Python's sign for "not to be imported"
    later = ModuleType("later")
    later.average = losses.mean  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "later", later)
    assert (later, "average") in sharing._bound("mean")


class Faulty:
    """Clips one by one, some of which cannot be used; counts how often each is read."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.clips, self.bad = Noise(3, length), bad
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Clip:
        self.read.append(index)
        if index in self.bad:
            raise ClipError(f"clip {index}", "no audio track", "leave it out")
        return self.clips[index]


def delivered(sources: list[Any], peers: Peers = ALONE) -> list[list[list[Any]]]:
    """The ids of each batch, with sums of augmented pixels and filterbanks; what was read of each source; skipped."""
    config = StreamConfig(batch_size=5, epochs=2, most_bad=0.9, **SHAPES)
    stream = Stream([(str(i), source) for i, source in enumerate(sources)], config, "cpu", None, peers)
    batches = [
        [*batch.ids.tolist(), *batch.video.sum((1, 2, 3, 4)).tolist(), *batch.audio.double().sum((1, 2)).tolist()]
        for batch in stream
    ]
    read = [source.read for source in sources if isinstance(source, Faulty)]
    return [batches, read, [sorted(int(id) for id in stream.skipped.records)]]


def sources() -> list[Any]:
    """Of single clips, with every third bad, with a chunk of which none is good, without a bad one; and of tensors."""
    return [Faulty(17, {0, 3, 6, 9}), Faulty(11, set(range(8))), Faulty(7, set()), Noise(5, 6), Noise(6, 2)]


@pytest.mark.parametrize("count", [3])
def test_an_epoch_reads_every_clip_once(count: int) -> None:
    """No two processes read the same clip, and together they deliver the batches of one, whatever is skipped."""
    alone = delivered(sources())
    found = fork(count, lambda world: delivered(sources(), world))
    assert [each[2] for each in found] == [alone[2]] * count  # all know what was skipped
    for number, batch in enumerate(alone[0]):
        rows = torch.tensor(batch, dtype=torch.float64).view(3, -1)
        shares = [torch.tensor(each[0][number], dtype=torch.float64).view(3, -1) for each in found]
        together = torch.cat(shares, 1)
        assert torch.equal(together[:2], rows[:2]) and torch.allclose(together[2], rows[2], rtol=1e-6)
        assert [each.shape[1] for each in shares] == cut(rows.shape[1], count)
    for source, once in enumerate(alone[1]):
        assert sorted(index for each in found for index in each[1][source]) == sorted(once)


def draws(world: World, ahead: bool) -> list[list[Any]]:
    """Drawn rows, saved generators, and how many columns set out while a draw was waited for; the last batch is short.

    A step changes drawn rows after its draw, and step 5 once more after the next draw was begun.
    """
    memory = Memory({"x": Column(torch.float32, (2,))}, 8, generator("memory"))
    memory.split(world)
    waited, found = [0], []
    all_to_all = world.all_to_all

    def counted(*given: Any) -> Any:
        waited[0] += 1
        return all_to_all(*given)

    for step, size in enumerate([4, 4, 4, 4, 4, 4, 4, 3, 4]):
        world.spread_now = BatchSpread(cut(size, 2), replicated=False)
        ids = torch.arange(10 * step, 10 * step + size)[world.rows(size)]
        world.all_to_all = counted  # type: ignore[method-assign]
        waited[0] = 0
        drawn = memory.draw(len(ids))
        world.all_to_all = all_to_all  # type: ignore[method-assign]
        memory.add(ids, x=ids[:, None].float().expand(-1, 2))
        if drawn is not None:
            memory.update(drawn.slots, x=drawn["x"] + 0.25)
            found.append([drawn.ids.tolist(), drawn["x"].tolist(), waited[0]])
        if ahead:
            memory.prefetch()
        if step == 5 and drawn is not None:
            memory.update(drawn.slots, x=drawn["x"] + 0.5)
        found.append([memory.state_dict()["generator"].tolist(), memory.ids.tolist()])
    return found


def test_draws_ahead_change_nothing() -> None:
    """Used, of another size, overtaken by a change, or saved: the same rows, and the same random numbers after it."""
    for plain, ahead in fork(2, lambda world: [draws(world, False), draws(world, True)]):
        assert [each[:2] for each in plain] == [each[:2] for each in ahead]
        assert [each[2] for each in ahead if len(each) > 2] == [0, 0, 0, 0, 0, 1, 1, 1]  # overtaken, short, after it
        assert {each[2] for each in plain if len(each) > 2} == {1}


def test_rows_and_their_owners() -> None:
    assert cut(7, 3) == [3, 2, 2] and cut(1, 4) == [1, 0, 0, 0]
    owner, at = owners([2, 0, 3])
    assert owner.tolist() == [0, 0, 2, 2, 2] and at.tolist() == [0, 1, 0, 1, 2]


def test_rows_move_between_processes() -> None:
    """Against indexing of all rows, for every dtype of a memory's columns."""

    def work(world: World) -> list[bool]:
        found = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int16, torch.int64, torch.bool):
            draw = torch.Generator().manual_seed(1)
            everyone = torch.randint(2 if dtype == torch.bool else 100, (9, 2, 3), generator=draw).to(dtype)
            owner, at = owners([4, 5])
            which = torch.randint(9, (6,), generator=draw)
            to = torch.randint(2, (6,), generator=draw)
            own = everyone[owner == world.rank]
            moved = world.move(own, owner[which], at[which], to)
            found.append(moved.equal(everyone[which[to == world.rank]]))
            found.append(world.rows_to_all(own, owner[which], at[which]).equal(everyone[which]))
            found.append(world.gather(own, [4, 5]).equal(everyone))
        return found

    assert all(map(all, fork(2, work)))


@pytest.mark.parametrize("messages", ["exact", "static", "full"])
def test_rows_by_routes(messages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against indexing of all rows; with messages that are too small, `instead` of the rows that `fits` says."""
    if messages == "full":
        monkeypatch.setattr(routes, "message", lambda rows, processes: 1)

    def work(world: World) -> list[bool]:
        found, draw, over = [], torch.Generator().manual_seed(1), 0
        world.static = messages != "exact"
        counts = [4, 5, 3]
        everyone = torch.randint(100, (12, 2), generator=draw)
        own = world.own(counts)
        owner, at = owners(counts)
        for _ in range(10):
            which = torch.randint(12, (7,), generator=draw)
            to, _ = owners(cut(7, 3))
            route = Route(world, owner[which], at[which], to, 5)
            mine = world.rows(7)
            found.append(route.fetch(everyone[own], mine)().equal(everyone[which[route.instead]][mine]))
            found.append(route.instead[route.fits].equal(torch.arange(7)[route.fits]))
            over += int((~route.fits).sum())
            # Into slots of which each is taken once, or none: slot s is row s // 3 of process s % 3.
            slots = torch.randperm(20, generator=draw)[:12]
            to = torch.where(slots < 15, slots % 3, -1)
            route = Route(world, owner, at, to, 5)
            rows = torch.zeros(6, 2, dtype=torch.int64)
            route.store(everyone[own], own, rows, slots // 3)
            expected = torch.zeros(15, 2, dtype=torch.int64)
            taken = (slots < 15) & route.fits
            expected[slots[taken]] = everyone[taken]
            found.append(rows[:5].equal(expected[world.rank :: 3]))
            over += int((~route.fits & (slots < 15)).sum())
        return [*found, (over > 0) == (messages == "full")]

    assert all(map(all, fork(3, work)))


@pytest.mark.parametrize("room", [99, 1])
def test_rows_stay_with_their_ids(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is shared, whole in all processes, or finds no place in its message: x is a clip's id throughout."""
    monkeypatch.setattr(routes, "message", lambda rows, processes: min(room, rows))

    def work(world: World) -> list[Any]:
        world.static = True
        memory, found, twice = Memory({"x": Column(torch.float32, (2,))}, 24, generator("memory")), [], 0
        memory.split(world)
        for step, size in enumerate([6, 6, 1, 12, 1] * 8):
            world.spread_now = BatchSpread(cut(size, 2), replicated=size < 2)
            ids = torch.arange(20 * step, 20 * step + size)
            ids = ids if size < 2 else ids[world.rows(size)]
            if (drawn := memory.draw(len(ids))) is not None:
                found.append(drawn["x"].equal(drawn.ids[:, None].float().expand(-1, 2)))
                twice += sum(world.gather_objects(len(drawn) - len(set(drawn.ids.tolist())))) if size > 1 else 0
            memory.add(ids, x=ids[:, None].float().expand(-1, 2))
            own = memory.state_dict()["rows"]["x"]
            found.append(own.equal(memory.ids[world.rank :: 2, None].float().expand(-1, 2)))
        return [all(found), twice > 0]

    assert fork(2, work) == [[True, room == 1]] * 2


def test_messages_have_room_for_what_chance_sends() -> None:
    assert message(48, 1) == 48 and message(6, 4) == 6  # no row can be too many
    assert message(48, 8) == 25 and message(48, 64) == 13
    draw = torch.Generator().manual_seed(0)
    sent = torch.randint(8, (20_000, 8, 48), generator=draw)
    most = torch.stack([(sent == rank).sum(2) for rank in range(8)]).max()
    assert 15 < most <= message(48, 8)

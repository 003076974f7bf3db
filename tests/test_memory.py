"""The rehearsal memory: a uniform sample of the stream, in exactly the bytes declared."""

import math
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stella.columns import Column, bytes_per_clip, capacity_for
from stella.errors import StellaError
from stella.memory import Memory
from stella.peers import Peers
from stella.rng import generator

COLUMNS = {"video": Column(torch.uint8, (2, 3)), "z": Column(torch.float16, (4,))}
EACH = 6 + 8 + 8  # with the id
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make(capacity: int, seed: object = 0, device: str = "cpu") -> Memory:
    return Memory(COLUMNS, capacity, generator("memory", seed, device=device))


def clips(first: int, n: int, device: str = "cpu") -> dict[str, Tensor]:
    """Clips whose every column tells their id."""
    ids = torch.arange(first, first + n, device=device)
    return {"ids": ids, "video": (ids % 256).view(-1, 1, 1).expand(n, 2, 3), "z": ids.float()[:, None].expand(n, 4)}


def fill(memory: Memory, total: int, batch: int) -> Memory:
    for first in range(0, total, batch):
        memory.add(**clips(first, min(batch, total - first)))
    return memory


def held(memory: Memory) -> list[int]:
    ids: list[int] = memory.ids.tolist()
    return ids


# ---- reservoir


@settings(max_examples=30, deadline=None)
@given(
    capacity=st.integers(0, 12), batches=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 99)
)
def test_is_vitters_algorithm_whatever_the_batches(capacity: int, batches: list[int], seed: int) -> None:
    """One clip after the other: the t-th takes a place u = floor(t·chance) if that is one of the memory's."""
    memory, chance = make(capacity, seed), generator("memory", seed)
    slots: list[int] = []
    first = 0
    for batch in batches:
        memory.add(**clips(first, batch))
        for clip in range(first, first + batch):
            place = int(torch.rand(1, generator=chance, dtype=torch.float64) * (clip + 1))
            if clip < capacity:
                slots.append(clip)
            elif place < capacity:
                slots[place] = clip
        first += batch
    assert held(memory) == slots and len(memory) == len(slots) == min(first, capacity)
    assert (memory.seen, memory.capacity) == (first, capacity) and (memory.draw(4) is None) == (not slots)


def test_is_uniform_over_all_clips_seen() -> None:
    capacity, total, runs = 8, 40, 1000
    counts: Counter[int] = Counter()
    for seed in range(runs):
        counts.update(held(fill(make(capacity, seed), total, 7)))
    share = capacity / total
    observed = torch.tensor([counts[clip] for clip in range(total)], dtype=torch.float64)
    expected = runs * share
    # Clips exclude one another, so a count's variance is expected·(1 - share), and counts sum to a constant.
    chi_square = ((observed - expected) ** 2 / (expected * (1 - share))).sum() * (total - 1) / total
    p_value = torch.special.gammaincc(torch.tensor((total - 1) / 2, dtype=torch.float64), chi_square / 2)
    assert 0.001 < p_value < 0.999


# ---- draw and update


def test_draws_different_clips_with_all_their_columns() -> None:
    memory = fill(make(30), 100, 10)
    for _ in range(50):
        drawn = memory.draw(12)
        assert drawn is not None
        assert len(drawn) == 12 == len(set(drawn.ids.tolist()))
        assert drawn.ids.tolist() == [held(memory)[slot] for slot in drawn.slots]
        assert torch.equal(drawn["z"], drawn.ids.half()[:, None].expand(-1, 4))
        assert torch.equal(drawn["video"], drawn.ids.to(torch.uint8).view(-1, 1, 1).expand(-1, 2, 3))


def test_a_share_of_the_batch_is_rounded_once_for_all_processes() -> None:
    class Four(Peers):
        def total(self, rows: int) -> int:
            return 4 * rows

    memory = fill(make(30), 30, 10)
    for peers, own in ((Peers(), 8), (Four(), 2)):
        memory.peers = peers
        sizes = [len(memory.draw(own, each) or ()) for each in (0.01, 0.25, 1.0, 2.1)]
        assert sizes == [1, 2, 8, 17]


def test_draws_all_where_fewer_are_held() -> None:
    memory = make(30)
    memory.add(**clips(0, 3))
    drawn = memory.draw(5)
    assert drawn is not None
    assert sorted(drawn.ids.tolist()) == [0, 1, 2]


def test_draws_each_clip_equally_often() -> None:
    memory = fill(make(10), 10, 10)
    counts = Counter(clip for _ in range(4000) for clip in memory.draw(3).ids.tolist())
    chi_square = sum((counts[clip] - 1200) ** 2 / (1200 * 0.7) for clip in range(10)) * 9 / 10
    assert torch.special.gammaincc(torch.tensor(4.5), torch.tensor(chi_square / 2)) > 0.001


def test_a_drawn_batch_is_a_copy() -> None:
    memory = fill(make(4), 4, 4)
    drawn = memory.draw(4)
    drawn["z"].zero_()
    assert torch.equal(memory.state_dict()["rows"]["z"][:, 0], torch.arange(4).half())


def test_update_changes_these_columns_of_these_slots() -> None:
    memory = fill(make(6), 6, 6)
    drawn = memory.draw(2)
    memory.update(drawn.slots, z=torch.full((2, 4), -1.0))
    rows = memory.state_dict()["rows"]
    changed = {i for i in range(6) if rows["z"][i, 0] == -1}
    assert changed == set(drawn.slots.tolist())
    assert torch.equal(rows["id"], torch.arange(6))


def test_rows_carry_no_gradient() -> None:
    memory = make(2)
    columns = clips(0, 2) | {"z": torch.ones(2, 4, requires_grad=True)}
    memory.add(**columns)
    memory.update(torch.tensor([0]), z=torch.ones(1, 4, requires_grad=True))
    assert not memory.draw(2)["z"].requires_grad


@pytest.mark.parametrize("before", [0, 4, 30])
def test_a_skipped_step_changes_nothing(before: int) -> None:
    memory = fill(make(10), before, 4)
    rows = deepcopy(memory.state_dict()["rows"])
    with memory.commit_if(torch.tensor(False)):
        memory.add(**clips(900, 5))
        if before:
            memory.update(memory.draw(3).slots, z=torch.full((3, 4), torch.nan))
    after = memory.state_dict()
    assert after["seen"] == before and all(torch.equal(rows[name], after["rows"][name]) for name in rows)
    drawn = memory.draw(10)
    assert drawn is None if before == 0 else len(set(drawn.ids.tolist())) == min(before, 10)


@pytest.mark.parametrize("capacity", [3, 40])
def test_clips_that_are_not_admitted_do_not_count(capacity: int) -> None:
    memory, plain, coin = make(capacity), make(capacity), generator("coin")
    for first in range(0, 60, 12):
        taken = torch.rand(12, generator=coin) < 0.5
        state = memory.generator.get_state()
        offered = clips(first, 12)
        memory.add(**offered, admit=taken)
        # The naive version draws for the clips that come alone: give it those chances.
        chance = torch.rand(12, generator=torch.Generator().set_state(state), dtype=torch.float64)[taken]
        for one, u in zip(offered["ids"][taken].tolist(), chance.tolist(), strict=True):
            place = plain.seen if plain.seen < capacity else int(u * (plain.seen + 1))
            plain._seen += 1
            if place < capacity:
                plain._rows["id"][place] = one
    assert memory.seen == plain.seen and held(memory) == held(plain)


# ---- bytes


def test_bytes_are_exact() -> None:
    memory = fill(make(50), 50, 10)
    assert bytes_per_clip(memory.columns) == EACH
    assert sum(rows.nbytes for rows in memory.state_dict()["rows"].values()) == 50 * EACH


def test_capacity_is_given_in_clips_or_in_bytes() -> None:
    assert capacity_for(COLUMNS, clips=12, bytes=None) == 12
    assert capacity_for(COLUMNS, clips=None, bytes=12 * EACH + EACH - 1) == 12


@pytest.mark.parametrize(
    ("clips", "bytes", "said"),
    [
        (None, None, "memory.clips=none and memory.bytes=none: set exactly one"),
        (10, 1000, "memory.clips=10 and memory.bytes=1000: set exactly one"),
        (None, EACH - 1, f"memory.bytes={EACH - 1} holds no clip; one takes {EACH} bytes"),
        (-1, None, "memory.clips=-1 holds no clip"),
        (None, -5, "memory.bytes=-5 holds no clip"),
    ],
)
def test_a_size_given_twice_or_not_or_for_no_clip_is_refused(clips: int | None, bytes: int | None, said: str) -> None:
    with pytest.raises(StellaError, match=said):
        capacity_for(COLUMNS, clips=clips, bytes=bytes)


# ---- state


@pytest.mark.parametrize("total", [5, 60])
def test_goes_on_from_a_saved_state_as_if_nothing_had_happened(total: int, tmp_path: Path) -> None:
    memory, other = fill(make(20), total, 8), make(20, "another seed")
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    other.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    for m in (memory, other):
        m.add(**clips(total, 9))
    assert held(memory) == held(other)
    assert torch.equal(memory.draw(6)["z"], other.draw(6)["z"])
    assert memory.seen == other.seen


def test_after_a_skipped_step_it_goes_on_with_draws_as_large() -> None:
    """On a GPU, where the host counts the clips of that step."""
    memory, other, older = fill(make(20), 5, 5), make(20, "another seed"), make(20)
    memory.offered += 5
    state = memory.state_dict()
    other.load_state_dict(state)
    assert memory.draw(10).ids.tolist() == other.draw(10).ids.tolist() and len(memory.draw(10)) == 10
    older.load_state_dict({name: part for name, part in state.items() if name != "offered"})
    assert len(older.draw(10)) == 5


def test_only_filled_rows_travel(tmp_path: Path) -> None:
    memory = Memory({"video": Column(torch.uint8, (1000,))}, 1000, generator(0))
    memory.add(torch.arange(2), video=torch.zeros(2, 1000, dtype=torch.uint8))
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    assert (tmp_path / "memory.pt").stat().st_size < 20_000


def test_on_the_cpu_a_state_takes_no_second_memory() -> None:
    memory = fill(make(20), 15, 5)
    for name, rows in memory.state_dict()["rows"].items():
        assert rows.data_ptr() == memory._rows[name].data_ptr()
        assert rows.untyped_storage().nbytes() == 15 * memory.columns[name].bytes


def test_a_state_of_other_sizes_is_refused() -> None:
    state = fill(make(20), 5, 5).state_dict()
    with pytest.raises(StellaError, match="capacity was 20 and is now 21"):
        make(21).load_state_dict(state)
    with pytest.raises(StellaError, match=r"columns\.z was 'torch.float16 \[4\]' and is now 'torch.float32 \[4\]'"):
        Memory(COLUMNS | {"z": Column(torch.float32, (4,))}, 20, generator(0)).load_state_dict(state)


# ---- several passes of the same clips, and a stream that ends


def test_every_pass_of_a_clip_counts() -> None:
    """A uniform sample of passes, not of clips: compared with exact chances of drawing passes without replacement."""
    n, epochs, capacity, runs = 10, 3, 12, 400
    copies, distinct = [], []
    for seed in range(runs):
        memory = make(capacity, seed)
        for _ in range(epochs):
            fill(memory, n, 5)
        assert memory.seen == n * epochs and len(memory) == capacity
        assert memory.distinct == len(set(held(memory)))
        distinct.append(memory.distinct)
        copies.append(max(Counter(held(memory)).values()))
    none_of_a_clip = math.comb((n - 1) * epochs, capacity) / math.comb(n * epochs, capacity)
    assert sum(distinct) / runs == pytest.approx(n * (1 - none_of_a_clip), abs=0.15) and max(copies) == epochs


@pytest.mark.parametrize("most", [0, 1, 12, 20, 50])
def test_a_stream_that_ends_takes_no_more_room_and_holds_the_same(most: int) -> None:
    whole, cut = make(20), Memory(COLUMNS, 20, generator("memory", 0), most)
    assert {len(rows) for rows in cut._rows.values()} == {min(20, most) + 1}
    for first in range(0, most, 4):
        for memory in (whole, cut):
            memory.add(**clips(first, min(4, most - first)))
    assert held(whole) == held(cut)
    if most:
        drawn = cut.draw(6)
        assert drawn is not None and len(drawn) == len(set(drawn.ids.tolist())) == min(6, most)
        assert drawn["z"][:, 0].tolist() == drawn.ids.tolist()
        cut.update(drawn.slots, z=drawn["z"])
    longer = make(20)
    longer.load_state_dict(cut.state_dict())  # the memory of a learner that takes a run over
    longer.add(**clips(most, 30))
    assert longer.seen == most + 30
    if most < 20:
        with pytest.raises(StellaError, match=f"room for the {most} clips it was made for"):
            cut.add(**clips(most, 1))


# ---- bad input


def test_other_columns_shapes_and_kinds_are_refused() -> None:
    memory, good = make(5), clips(0, 2)
    with pytest.raises(StellaError, match="has the columns id, video, z and was given id, video"):
        memory.add(good["ids"], video=good["video"])
    with pytest.raises(StellaError, match=r"column z takes \[2, 4\], not \[2, 5\]"):
        memory.add(**good | {"z": torch.zeros(2, 5)})
    with pytest.raises(StellaError, match=r"stores video as torch.uint8; give integers, not torch.float32"):
        memory.add(**good | {"video": torch.zeros(2, 2, 3)})
    with pytest.raises(StellaError, match="no column w; it has id, video, z"):
        memory.update(torch.tensor([0]), w=torch.zeros(1))
    assert memory.seen == 0


# ---- on a GPU


@cuda
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_clips_of_a_gpu_stay_together_wherever_the_memory_lies(device: str) -> None:
    memory = make(20, device=device)
    for first in range(0, 100, 10):
        memory.add(**clips(first, 10, "cuda"))
        drawn = memory.draw(7, to="cuda")
        assert drawn["z"].device.type == "cuda"
        assert torch.equal(drawn["z"][:, 0], drawn.ids.half()) and len(set(drawn.ids.tolist())) == 7
    other, state = make(20, "another seed", device), memory.state_dict()
    assert {rows.device.type for rows in state["rows"].values()} == {"cpu"}
    other.load_state_dict(state)
    assert held(other) == held(memory)
    assert torch.equal(other.draw(5).ids, memory.draw(5).ids)


def test_writes_outside_a_skipped_step_take_effect_again() -> None:
    memory = make(4)
    with pytest.raises(ZeroDivisionError), memory.commit_if(torch.tensor(False)):
        raise ZeroDivisionError
    fill(memory, 3, 3)
    assert memory.seen == 3

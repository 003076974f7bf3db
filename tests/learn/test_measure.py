"""Measures of a round against naive versions, the choice of clips to measure with, and the times of their curves."""

from datetime import datetime, timedelta

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from stella.evaluate.retrieval import Embeddings
from stella.learn.held import THIRD, is_held, kept, measured, stored
from stella.learn.home import Plan
from stella.learn.items import Item
from stella.learn.measure import by_round, fall, fell, judged, measures, too_few
from stella.learn.page import time_labels


def random(n: int, seed: int) -> Embeddings:
    gen = torch.Generator().manual_seed(seed)
    a, v = (F.normalize(torch.randn(n, 4, generator=gen), dim=1) for _ in range(2))
    return Embeddings(a, v, torch.arange(n))


def naive(e: Embeddings, which: list[int]) -> float:
    total, hits = 0, 0
    for query, gallery in ((e.a, e.v), (e.v, e.a)):
        for i in which:
            order = sorted(range(len(e)), key=lambda j: -float(query[i].double() @ gallery[j].double()))
            for k in (1, 5, 10):
                total, hits = total + 1, hits + (order.index(i) < k)
    return 100 * hits / total


def test_accuracy_is_that_of_the_whole_gallery() -> None:
    rounds = torch.tensor([1] * 9 + [2] * 11 + [3] * 7)
    before, after = random(27, 0), random(27, 1)
    found = measures(before, after, rounds, 3, None)
    old, own = list(range(20)), list(range(20, 27))
    for name, which in (("old", old), ("new", own)):
        assert found[name]["before"] == pytest.approx(naive(before, which))
        assert found[name]["after"] == pytest.approx(naive(after, which))
    assert found["rounds"]["2"]["after"] == pytest.approx(naive(after, list(range(9, 20))))
    assert fall(found) == pytest.approx(naive(before, old) - naive(after, old))
    assert found["worst"] and all(each["after"] > each["before"] and each["clip"] < 20 for each in found["worst"])


def test_a_fall_has_the_error_of_its_clips() -> None:
    before, after = random(27, 0), random(27, 1)
    old = measures(before, after, torch.tensor([1] * 20 + [2] * 7), 2, None)["old"]
    each = torch.tensor([naive(before, [i]) - naive(after, [i]) for i in range(20)])
    assert old["clips"] == 20 and old["error"] == pytest.approx(each.std().item() / 20**0.5)
    single = measures(before, after, torch.tensor([1] + [2] * 26), 2, None)["old"]
    assert single["clips"] == 1 and single["error"] is None


@pytest.mark.parametrize(
    ("clips", "guard", "said"),
    [
        (1, 5.0, "judged by 1 old clip, too few for a guard of 5: one alone can cost 100.0 points"),
        (33, 3.0, "judged by 33 old clips, too few for a guard of 3: one alone can cost 3.0 points"),
        (34, 3.0, "judged by 34 old clips"),
        (19, 5.0, "judged by 19 old clips, too few for a guard of 5: one alone can cost 5.3 points"),
        (20, 5.0, "judged by 20 old clips"),
    ],
)
def test_a_guard_says_by_how_many_clips_it_judges(clips: int, guard: float, said: str) -> None:
    record = {"guard": guard, "old": {"clips": clips, "before": 50.0, "after": 43.75, "error": 2.5}}
    assert judged(record) == said and too_few(record) == ("too few" in said)
    assert fell(record) == "6.2 ± 2.5 points"
    del record["old"]["error"]  # type: ignore[attr-defined]  # of an earlier version
    assert fell(record) == "6.2 points"


@pytest.mark.parametrize(
    ("points", "error", "chance"), [(6, 3.1, True), (6, 2.9, False), (4, 3.1, False), (6, None, False)]
)
def test_a_fall_beyond_the_guard_says_if_it_may_be_chance(points: float, error: float | None, chance: bool) -> None:
    record = {"guard": 5.0, "old": {"clips": 40, "before": 50.0, "after": 50.0 - points, "error": error}}
    assert judged(record) == "judged by 40 old clips" + "; less than two standard errors: it may be chance" * chance


def test_the_worst_are_chosen_among_the_old_clips() -> None:
    known, after = random(40, 0), random(40, 1)
    before = Embeddings(known.a, known.a, known.ids)  # every clip is found first
    worst = measures(before, after, torch.tensor([1] * 20 + [2] * 20), 2, None)["worst"]
    assert len(worst) == 8 and all(each["clip"] < 20 for each in worst)


def test_forgetting_adds_up_falls_in_galleries_that_grow() -> None:
    """F: the mean over earlier rounds of best level − present level; a level falls by what its clips lost."""
    states = [random(30, seed) for seed in range(4)]
    rounds = torch.tensor([1] * 10 + [2] * 10 + [3] * 10)
    last, level, best = None, {}, {}
    for new in (1, 2, 3):
        n = 10 * new
        before, after = (Embeddings(s.a[:n], s.v[:n], s.ids[:n]) for s in states[new - 1 : new + 1])
        last = measures(before, after, rounds[:n], new, last)
        for r in range(1, new + 1):
            own = list(range(10 * r - 10, 10 * r))
            level[r] = naive(after, own) if r == new else level[r] - naive(before, own) + naive(after, own)
            best[r] = max(best.get(r, level[r]), level[r])
    assert last is not None
    assert last["F"] == pytest.approx(sum(best[r] - level[r] for r in (1, 2)) / 2)


def test_rounds_without_clips_keep_their_level_if_nothing_old_is_measured() -> None:
    first = measures(random(20, 0), random(20, 1), torch.tensor([1] * 20), 1, None)
    then = measures(random(20, 1), random(20, 2), torch.tensor([2] * 20), 2, first)
    before = first["rounds"]["1"]
    assert then["rounds"]["1"] == {"clips": 0, "level": before["level"], "best": before["best"]}
    assert then["F"] == 0 and then["old"] is None


def test_rounds_without_clips_fall_as_the_old_clips_do() -> None:
    """A state that forgets everything: F says so, whichever rounds are in the sample."""
    known = Embeddings(random(40, 0).a, random(40, 0).a, torch.arange(40))  # every clip is found first
    first = measures(known, known, torch.tensor([1] * 20 + [2] * 20), 2, None)
    last = first | {"rounds": {str(r): {"clips": 9, "level": 100.0, "best": 100.0} for r in range(1, 9)}}
    then = measures(known, random(40, 1), torch.tensor([3] * 20 + [9] * 20), 9, last)
    fell = then["old"]["before"] - then["old"]["after"]
    assert then["old"]["before"] == pytest.approx(100) and fell > 60
    assert then["F"] == pytest.approx(fell)
    assert then["rounds"]["3"]["clips"] == 20 and then["rounds"]["4"]["clips"] == 0


def test_nothing_is_measured_without_clips() -> None:
    found = measures(random(1, 0), random(1, 0), torch.tensor([1]), 1, None)
    assert found["old"] is None and found["F"] is None and fall(found) is None


def test_memory_is_counted_by_round() -> None:
    assert by_round(torch.tensor([0, 4, 5, 9, 9]), [5, 0, 4, 1]) == [2, 0, 1, 2]


def item(name: str) -> Item:
    return Item("/in", name, "", name, name)


def test_a_recording_is_set_aside_by_its_name_alone() -> None:
    chosen = [is_held(item(f"film {i}"), 0.1) for i in range(5000)]
    assert 420 < sum(chosen) < 580
    assert not any(is_held(item(f"film {i}"), 0.0) for i in range(100))
    assert all(is_held(Item("/elsewhere", "", f"film {i}@1.000", f"film {i}", ""), 0.1) == chosen[i] for i in range(99))


def test_the_kept_clips_are_a_uniform_sample_of_all_that_came() -> None:
    """Whatever came when: of ten rounds each keeps about its share, and keeping fewer keeps some of the same."""
    plans = [Plan(1, "", 0, [], [item(f"{r}/{i}") for i in range(200)]) for r in range(10)]
    some = kept(plans, 500)
    counts = torch.tensor([clip.round for clip in some]).bincount(minlength=11)[1:]
    assert len(some) == 500 and counts.min() > 25 and counts.max() < 80
    assert {c.key for c in kept(plans, 100)} < {c.key for c in some}
    early = {c.key for c in kept(plans[:5], 500)}
    assert {c.key for c in some if c.round <= 5} <= early


def test_of_hundreds_of_rounds_the_newest_is_always_measured() -> None:
    plans = [Plan(1, "", 0, [], [item(f"{r}/{i}") for i in range(25)]) for r in range(200)]
    for n in (1, 2, 3, 50, 200):
        found = measured(plans[:n], 80)
        own = [clip for clip in found if clip.round == n]
        assert len(found) == min(80, 25 * n) and len({clip.key for clip in found}) == len(found)
        assert len(own) == 25
        assert found == sorted(found, key=lambda clip: (clip.round, clip.key))
    old = torch.tensor([clip.round for clip in measured(plans, 500) if clip.round < 200])
    assert len(old) == 475 and 0.35 < (old > 100).double().mean() < 0.65  # of all time


@given(
    rounds=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    held=st.integers(0, 40),
    share=st.floats(0, 1),
    again=st.booleans(),
)
def test_what_a_round_is_measured_with_is_on_the_disk(rounds: list[int], held: int, share: float, again: bool) -> None:
    """Whatever comes: its own clips are stored then, the others after the round before, and none is there twice."""
    plans = [
        Plan(1, "", 0, [], [item(f"{0 if again and i == 0 else r}/{i}") for i in range(count)])
        for r, count in enumerate(rounds)
    ]
    there: set[str] = set()
    for n in range(1, len(plans) + 1):
        most = round(share * held)
        own = [clip for clip in stored(plans[:n], held) if clip.round == n]
        there |= {clip.key for clip in own}
        found = measured(plans[:n], most)
        assert {clip.key for clip in found} <= there and len({clip.key for clip in found}) == len(found) <= most
        new = [clip for clip in found if clip.round == n]
        assert len(new) >= min(len(plans[n - 1].held), most // THIRD)
        there &= {clip.key for clip in stored(plans[:n], held)}
        assert len(there) <= held + held // THIRD


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (0, ["22:31"]),
        (20, ["22:31"]),
        (90, ["22:31", "22:32"]),
        (7200, ["22:31", "23:31", "00:31"]),
        (86400, ["16 Nov 22:31", "17 Nov 10:31", "17 Nov 22:31"]),
        (86390, ["16 Nov 22:31", "17 Nov 10:31", "17 Nov 22:31"]),
        (86400 * 365, ["2026-11-16", "2027-05-18", "2027-11-16"]),
        (86400 * 10, ["16 Nov", "21 Nov", "26 Nov"]),
    ],
)
def test_times_below_the_curves_are_told_apart(seconds: int, labels: list[str]) -> None:
    first = datetime(2026, 11, 16, 22, 31, 10)
    found = time_labels(first, first + timedelta(seconds=seconds))
    assert sorted(found, key=lambda label: found[label]) == labels
    assert found[labels[0]] == first

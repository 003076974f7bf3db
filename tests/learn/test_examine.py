"""Clips that are set aside go through the model in batches of one size, are read once, and come out as one by one."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.learning import config_for, packed, quiet

import stella
from stella.clip import Batch, Clip
from stella.evaluate import retrieval
from stella.learn import examine
from stella.learn.examine import BATCH, Examiner
from stella.learn.held import HeldOut, kept
from stella.learn.home import Home, Settings
from stella.learn.loop import learn
from stella.learn.vectors import Vectors, read_vectors
from stella.methods.base import Method
from stella.runs.build import build_method
from stella.runs.config import machine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A learner after three rounds, of whose clips 29 are set aside."""
    folder = tmp_path_factory.mktemp("learner")
    sources = packed(folder / "in", (30, 19, 23))
    config = config_for(sources[0], method="stella")
    learn(folder / "home", sources, config, Settings(share=0.4), clips=30, console=quiet())
    return Home(folder / "home")


@pytest.fixture
def held(home: Home) -> HeldOut:
    found = HeldOut(home.held, kept(home.plans(), 1000))
    assert len(found) > BATCH and len(found) % BATCH
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each clip was decoded."""
    counts: Counter[str] = Counter()
    plain = HeldOut.__getitem__

    def read(self: HeldOut, index: int) -> Clip:
        counts[self.keys[index]] += 1
        return plain(self, index)

    monkeypatch.setattr(HeldOut, "__getitem__", read)
    return counts


def examiner(home: Home, device: str = "cpu") -> tuple[Examiner, Method]:
    config = replace(home.config, train=replace(home.config.train, device=device))
    return Examiner(config, machine(config.train)), build_method(config, torch.device(device))


def close(ours: Vectors, theirs: Vectors, apart: float = 1e-5) -> bool:
    same = ours.keys() == theirs.keys()
    return same and all(
        (a - b).abs().max() < apart for key in ours for a, b in zip(ours[key], theirs[key], strict=True)
    )


def test_a_learners_vectors_are_those_of_its_clips_one_by_one(home: Home, held: HeldOut) -> None:
    config = replace(home.config.stream, batch_size=1, workers=0)
    one_by_one = retrieval.embed(stella.load(home.root).cav, held, config)
    found = read_vectors(home.round(home.current).embeddings)
    assert close(found, dict(zip(held.keys, zip(one_by_one.a, one_by_one.v, strict=True), strict=True)))


@pytest.mark.parametrize("device", DEVICES)
def test_all_passes_have_one_size(home: Home, held: HeldOut, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, set[int]] = {}

    def noted(name: str) -> None:
        plain: Callable[..., Any] = getattr(examine, name)

        def call(model: Any, second: Any, *more: Any) -> Any:
            sizes.setdefault(name, set()).add(len(more[0] if name == "judged" else second))
            return plain(model, second, *more)

        monkeypatch.setattr(examine, name, call)

    for name in ("unit_a", "unit_v", "judged"):
        noted(name)
    ours, method = examiner(home, device)
    for clips in (2, BATCH, len(held)):  # galleries that grow
        some = held.only(held.keys[:clips])
        ours.read(some)
        assert ours.embed(method, some, {}).keys() == set(some.keys)
    found = ours.matching(method, held)
    assert 0 <= found["matching"] <= 100 and found["pairs"] == 2 * BATCH
    assert sizes == {"unit_a": {BATCH}, "unit_v": {BATCH}, "judged": {BATCH}}


def test_clips_are_decoded_once_and_forgotten_when_they_are_not_measured(
    home: Home, held: HeldOut, reads: Counter[str]
) -> None:
    ours, method = examiner(home)
    some = held.only(held.keys[3:])
    for _ in range(2):
        ours.read(some)
        ours.embed(method, some, {})
        ours.matching(method, some)
    assert reads == Counter(some.keys)
    ours.read(held.only(held.keys[:3]))
    ours.read(held)
    assert reads == Counter(held.keys) + Counter(some.keys)


def test_what_has_no_place_is_decoded_each_time_with_the_same_outcome(
    home: Home, held: HeldOut, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_all, method = examiner(home)
    with_all.read(held)
    expected = with_all.embed(method, held, {}), with_all.matching(method, held)
    reads.clear()
    monkeypatch.setattr(examine, "READY", BATCH)
    few, _ = examiner(home)
    few.read(held)
    assert close(few.embed(method, held, {}), expected[0], 1e-9) and few.matching(method, held) == expected[1]
    assert set(reads) == set(held.keys) and {reads[key] for key in held.keys[:BATCH]} == {1}
    assert min(reads[key] for key in held.keys[BATCH:]) == 1 < max(reads.values())


def test_what_is_known_is_not_embedded(home: Home, held: HeldOut, reads: Counter[str]) -> None:
    ours, method = examiner(home)
    known = {key: (torch.zeros(3), torch.ones(3)) for key in held.keys[5:]}
    found = ours.embed(method, held, known)
    assert list(found) == held.keys and set(reads) == set(held.keys[:5])
    assert all(found[key] is known[key] for key in held.keys[5:])


def test_a_clip_that_cannot_be_read_is_left_out(home: Home, held: HeldOut, tmp_path: Path) -> None:
    for clip in held.clips:
        (tmp_path / f"{clip.key}.tar").write_bytes((home.held / f"{clip.key}.tar").read_bytes())
    damaged, gone = held.keys[-1], held.keys[4]
    ours, method = examiner(home)
    expected = ours.embed(method, held, {})
    (tmp_path / f"{damaged}.tar").write_bytes(b"nothing of a tar")
    there = HeldOut(tmp_path, held.clips)
    (tmp_path / f"{gone}.tar").unlink()  # after the list was made
    ours, _ = examiner(home)
    ours.read(there)
    assert close(ours.embed(method, there, {}), {k: v for k, v in expected.items() if k not in (damaged, gone)})
    assert ours.matching(method, there)["matching"] is not None


@pytest.mark.parametrize(("measured", "pairs"), [(1, 0), (9, 18), (20, 32), (80, 32), (128, 64), (500, 160)])
def test_a_quarter_of_the_clips_are_judged_by_the_matching_module(
    measured: int, pairs: int, home: Home, held: HeldOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, method = examiner(home)
    clips = [ours._read(held, held.keys[:1])[held.keys[0]]] * 2

    def batches(self: Examiner, held: HeldOut, keys: list[str]) -> list[tuple[list[str], Batch]]:
        return [(keys, Batch.cat(clips * (len(keys) // 2 + 1)))]

    monkeypatch.setattr(Examiner, "_batches", batches)
    some = HeldOut(held.folder, [held.clips[0]] * measured)
    found = ours.matching(method, some)
    assert found["pairs"] == pairs and (found["matching"] is None) == (measured == 1)

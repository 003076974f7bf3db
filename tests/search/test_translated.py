"""An index whose model goes on learning: old vectors answer translated queries until they are embedded again."""

from pathlib import Path

import pytest
import torch
from helpers.fake_model import FakeModel, Windows
from helpers.indexes import content
from torch import Tensor

from stella.embed.translate import Measured
from stella.errors import StellaError
from stella.search import asked, translations
from stella.search import index as module
from stella.search.catalogue import ModelRow
from stella.search.index import Index

DIM = 8


class State(FakeModel):
    """A state of a learner: it sees the files as FakeModel("one") does, in a space that is turned."""

    def __init__(self, number: int) -> None:
        super().__init__("one", DIM)
        self.fingerprint = f"state {number}"
        gen = torch.Generator().manual_seed(number)
        self.turn: Tensor = torch.linalg.qr(torch.randn(DIM, DIM, generator=gen)).Q

    def _windows(self, data: bytes, kind: str) -> Windows:
        found = super()._windows(data, kind)
        return Windows(found.vectors @ self.turn, found.start, found.end)


class Learner:
    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.states = home, [State(0)]
        self.clips = torch.nn.functional.normalize(torch.randn(400, DIM), dim=1)
        home.mkdir()
        (home / "home.json").write_text("{}")
        monkeypatch.setattr(module, "load", lambda what, device=None: self.states[-1])
        self.learn()

    def learn(self) -> None:
        state = State(len(self.states))
        self.states.append(state)
        both = self.clips @ state.turn
        folder = self.home / "rounds" / f"{len(self.states):06d}"
        folder.mkdir(parents=True)
        Measured(state.fingerprint, [str(i) for i in range(len(both))], both, both).write(folder / "embeddings.pt")


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Learner:
    torch.manual_seed(0)
    monkeypatch.setattr("stella.embed.translate.PRIOR", 1e-6)
    return Learner(tmp_path / "home", monkeypatch)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for name in "abcdef":
        (folder / f"{name}.mp4").write_bytes(name.encode() * 40)
    return folder


def found(index: Index, videos: Path, name: str = "c") -> tuple[list[tuple[str, float]], str]:
    answer = index.search(videos / f"{name}.mp4", 4)
    return [(hit.path, round(hit.score, 2)) for hit in answer.hits], answer.note


def test_old_vectors_answer_translated_queries_and_the_answer_says_so(
    tmp_path: Path, learner: Learner, videos: Path
) -> None:
    index = Index(tmp_path / "index")
    index.update(videos, model=learner.home)
    before, note = found(index, videos)
    assert note == ""
    for _ in range(2):
        learner.learn()
        after, note = found(Index(index.path), videos)
        assert after == before and note.startswith("4 of 4 were found by vectors of another state of the learner")
        assert f"stella index {index.path} --refresh" in note
    note = found(Index(index.path, shown="films"), videos)[1]  # as a server names it
    assert "stella index films --refresh" in note and str(index.path) not in note
    hit = Index(index.path).search(videos / "c.mp4", 1).hits[0]
    more = Index(index.path).search(index.moment(hit.place).query, 1, to=hit.modality)  # a query of the old state
    assert more.hits[0].place == hit.place and more.note == ""


def test_new_files_are_embedded_by_the_new_state_and_answer_beside_old_ones(
    tmp_path: Path, learner: Learner, videos: Path
) -> None:
    index = Index(tmp_path / "index")
    index.update(videos, model=learner.home)
    before, _ = found(index, videos)
    learner.learn()
    (videos / "g.mp4").write_bytes((videos / "c.mp4").read_bytes() + b"c")
    (videos / "b.mp4").rename(videos / "b2.mp4")
    done = index.update()
    assert (done.counts.added, done.counts.redone, done.counts.renamed) == (1, 0, 1)
    assert {row[1] for row in content(index.path)} == {"state 1", "state 2"}
    state = index.state()
    assert (state.stale, state.target) == (6, None) and sum(state.windows.values()) == len(content(index.path))
    assert dict(found(index, videos)[0]).items() >= dict(before[:1]).items()
    assert "were found by vectors" in found(index, videos)[1]
    own = index.search(videos / "g.mp4", 1, to="video")
    assert own.hits[0].path == "g.mp4" and own.note == ""


def test_a_refresh_begins_with_what_is_asked_for_most(tmp_path: Path, learner: Learner, videos: Path) -> None:
    index = Index(tmp_path / "index")
    index.update(videos, model=learner.home)
    learner.learn()
    (videos / "new.mp4").write_bytes(b"new" * 20)
    index.update()
    learner.learn()
    (videos / "newer.mp4").write_bytes(b"newer" * 20)
    for _ in range(3):
        assert index.search(videos / "e.mp4", 1, to="video").hits[0].path == "e.mp4"
    assert index.search(videos / "new.mp4", 1, to="video").hits[0].path == "new.mp4"
    index.update(refresh=True)
    assert learner.states[-1].asked == ["newer.mp4", "e.mp4", "new.mp4", "a.mp4", "b.mp4", "c.mp4", "d.mp4", "f.mp4"]
    assert {row[1] for row in content(index.path)} == {"state 3"} and index.state().stale == 0
    assert found(index, videos)[1] == "" and not (index.path / "asked").exists()
    fresh = Index(tmp_path / "fresh")
    fresh.update(videos, model=learner.home)
    assert content(index.path) == content(fresh.path)


def test_a_refresh_that_stops_leaves_an_index_that_answers(
    tmp_path: Path, learner: Learner, videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(tmp_path / "index")
    index.update(videos, model=learner.home)
    before, _ = found(index, videos)
    learner.learn()
    plain = State.embed_both

    def stops(self: State, path: Path, overlap: float = 0.5) -> object:
        if len(self.asked) == 3:
            raise KeyboardInterrupt
        return plain(self, path, overlap)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(State, "embed_both", stops)
        index.update(refresh=True)
    assert index.state().stale == 3 and found(index, videos)[0] == before
    learner.learn()  # and the model goes on once more
    assert found(Index(index.path), videos)[0] == before
    index.update(refresh=True)
    assert index.state().stale == 0 and found(index, videos) == (before, "")


def test_without_common_clips_the_index_is_stale(tmp_path: Path, learner: Learner, videos: Path) -> None:
    index = Index(tmp_path / "index")
    index.update(videos, model=learner.home)
    learner.learn()
    for path in learner.home.glob("rounds/000002/embeddings.pt"):
        path.unlink()
    with pytest.raises(
        StellaError, match=r"has changed since it made the vectors of .*; embed all files again: stella index"
    ):
        Index(index.path).search(videos / "a.mp4")
    with pytest.raises(StellaError, match="add --refresh"):
        Index(index.path).update()
    Index(index.path).update(refresh=True)
    assert {row[1] for row in content(index.path)} == {"state 2"}


def test_only_the_translations_that_were_needed_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(translations, "MOST", 2)
    monkeypatch.setattr(translations, "is_learner", lambda home: True)
    monkeypatch.setattr(translations, "translation", lambda home, query, to: made.append(to) or torch.eye(2))
    known = translations.Translations()
    for to in ("a", "b", "a", "c", "a", "b"):
        known.carry(torch.ones(2), "now", ModelRow(1, to, 2, "home"))
    assert made == ["a", "b", "c", "b"]


def test_who_may_only_read_leaves_no_trace(tmp_path: Path) -> None:
    asked.note(tmp_path / "nowhere", [1, 2])
    assert asked.counts(tmp_path / "nowhere") == {}
    asked.note(tmp_path, [1, 2])
    asked.note(tmp_path, [2])
    assert asked.counts(tmp_path) == {1: 1, 2: 2}


def test_without_a_translation_the_state_that_made_the_index_answers_while_it_is_kept(
    tmp_path: Path, learner: Learner, videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(tmp_path / "index")
    index.update(videos, model=learner.home)
    before = found(index, videos)
    learner.learn()
    for path in learner.home.glob("rounds/000003/embeddings.pt"):  # too few clips in common
        Measured("state 2", ["another"], torch.ones(1, DIM), torch.ones(1, DIM)).write(path)
    weights = learner.home / "rounds" / "000002" / "model.safetensors"
    weights.touch()
    states = learner.states
    monkeypatch.setattr(module, "load", lambda what, device=None: states[1] if Path(what) == weights else states[2])
    (learner.home / "current").symlink_to("rounds/000003")
    after, note = found(Index(index.path), videos)
    assert after == before[0] and before[1] == ""
    assert note.startswith("the learner has gone on learning (round 3); the query was embedded by the kept weights")
    (videos / "g.mp4").write_bytes(b"g" * 40)
    done = Index(index.path).update()  # by the same weights: vectors of two spaces are never mixed
    assert done.counts.added == 1 and {row[1] for row in content(index.path)} == {"state 1"}
    assert done.note.startswith(
        "the learner has gone on learning (round 3); new files are embedded by the kept weights"
    )
    assert found(Index(index.path), videos, "g")[0][0][0] == "g.mp4"
    weights.unlink()
    with pytest.raises(StellaError, match="embed all files again"):
        Index(index.path).search(videos / "a.mp4")
    with pytest.raises(StellaError, match="add --refresh"):
        Index(index.path).update()
    done = Index(index.path).update(refresh=True)
    assert {row[1] for row in content(index.path)} == {"state 2"} and done.note == ""


def rolled_back(learner: Learner, monkeypatch: pytest.MonkeyPatch, common: bool) -> None:
    """The last state is undone, as `stella learn HOME --rollback` does it. Its weights are kept."""
    last = sorted(learner.home.glob("rounds/*"))[-1]
    if not common:
        Measured(learner.states[-1].fingerprint, [], torch.empty(0, DIM), torch.empty(0, DIM)).write(
            last / "embeddings.pt"
        )
    (learner.home / "undone").mkdir()
    undone = last.rename(learner.home / "undone" / f"{last.name}-0a1b2c")
    (undone / "model.safetensors").touch()
    (learner.home / "current").symlink_to(f"rounds/{len(learner.states) - 1:06d}")
    *_, before, gone = learner.states
    monkeypatch.setattr(module, "load", lambda what, device=None: gone if "undone" in str(what) else before)


@pytest.mark.parametrize("common", [True, False])
def test_after_a_rollback_the_index_answers_and_a_refresh_brings_it_back(
    tmp_path: Path, learner: Learner, videos: Path, monkeypatch: pytest.MonkeyPatch, common: bool
) -> None:
    """By the state in use, translated, or else by the kept weights of the state that made the index."""
    learner.learn()
    index = Index(tmp_path / "index")
    index.update(videos, model=learner.home)
    before, _ = found(index, videos)
    rolled_back(learner, monkeypatch, common)
    after, note = found(Index(index.path), videos)
    assert after == before and f"stella index {index.path} --refresh" in note
    assert str(index.path) not in found(Index(index.path, shown="films"), videos)[1]
    by = "4 of 4 were found by vectors of another state" if common else "the query was embedded by the kept weights"
    assert note.startswith(f"the learner went back to round 2; {by}")
    assert index.state().stale == 6
    index.update(refresh=True)
    assert index.state().stale == 0 and found(Index(index.path), videos) == (before, "")
    assert {row[1] for row in content(index.path)} == {"state 1"}

"""An index and its server, whose model is a learner."""

import shutil
from pathlib import Path

import pytest
from helpers.learning import copy, quiet
from helpers.media_files import write_video

import stella
from stella.embed import translate
from stella.errors import StellaError
from stella.learn.home import Home
from stella.learn.loop import learn, rollback
from stella.serve.answers import HttpError
from stella.serve.learner import Attached
from stella.serve.versions import Versions


def test_an_index_and_its_server_notice_a_new_state(
    three: Path, sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "LEAST", 4)
    home, videos = copy(three, tmp_path / "home"), tmp_path / "videos"
    rollback(home, 2, quiet())
    for seed in range(3):
        write_video(videos / f"{seed}.mp4", seed=seed)
    index = stella.Index(tmp_path / "index")
    index.update(videos, model=home)
    versions, old = Versions(index), stella.load(home).fingerprint
    assert old == index.serving().fingerprint == translate.Measured.read(Home(home).round(2).embeddings).fingerprint
    learn(home, sources, console=quiet())
    new = stella.load(home).fingerprint
    assert old != new == translate.Measured.read(Home(home).round(3).embeddings).fingerprint
    now = versions.look()
    assert now.weights and now.weights.fingerprint == old and "gone on learning (round 3)" in now.stale
    found = stella.Index(index.path).search(videos / "0.mp4", to="video")
    assert found.hits[0].path == "0.mp4" and "found by vectors of another state of the learner" in found.note
    Home(home).round(2).weights.unlink()  # as after --keep rounds
    now = versions.look()
    assert now.weights and now.weights.fingerprint == new  # queries are translated
    attached = Attached(str(versions.home()))
    tree = attached.tree()
    assert tree["doing"] == "no learner is running"
    with Home(home).locked():
        assert attached.tree()["doing"] == "waiting for new clips"
    memory = Home(home).history()[-1]["memory"]
    assert tree["memory"]["rounds"] == memory["rounds"] and tree["memory"]["distinct"] == memory["distinct"] > 0
    assert tree["round"] == len(tree["history"]) == 3 and tree["clips"] == sum(p.clips for p in Home(home).plans())
    assert attached.picture(tree["forgetting"][0]["key"]).startswith(b"\xff\xd8") and str(tmp_path) not in str(tree)
    with pytest.raises(HttpError, match="no such clip"):
        attached.picture("../../home")
    assert index.state().stale == 3
    stella.Index(index.path).update(refresh=True)
    assert index.state().stale == 0 and versions.look().stale == "" and index.search(videos / "0.mp4").note == ""


@pytest.mark.parametrize("common", [4, 1000])
def test_an_index_and_its_server_outlive_a_rollback(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, common: int
) -> None:
    """With as many clips set aside as a translation needs, and with fewer."""
    monkeypatch.setattr(translate, "LEAST", common)
    home, videos = copy(three, tmp_path / "home"), tmp_path / "videos"
    for seed in range(3):
        write_video(videos / f"{seed}.mp4", seed=seed)
    index = stella.Index(tmp_path / "index")
    index.update(videos, model=home)
    versions, old = Versions(index), index.serving().fingerprint
    rollback(home, 2, quiet())
    for now in (versions.look(), Versions(index).now):  # a running server, and one that is started now
        assert now.weights and now.weights.fingerprint == old == stella.load(now.weights.file).fingerprint
        assert now.stale.startswith("the learner went back to round 2, and this index is of another version")
    found = stella.Index(index.path).search(videos / "0.mp4", to="video")
    assert found.hits[0].path == "0.mp4"
    assert found.note.startswith("the learner went back to round 2; ")
    assert ("was translated" if common == 4 else "by the kept weights") in found.note
    assert index.state().stale == 3
    stella.Index(index.path).update(refresh=True)
    assert index.serving().fingerprint == stella.load(home).fingerprint and index.state().stale == 0
    assert versions.look().stale == "" and index.search(videos / "0.mp4").note == ""


@pytest.mark.parametrize("common", [4, 1000])
def test_a_learner_that_was_moved_is_known_by_its_states(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, common: int
) -> None:
    """With as many clips set aside as a translation needs, and with fewer."""
    monkeypatch.setattr(translate, "LEAST", common)
    home, videos = copy(three, tmp_path / "home"), tmp_path / "videos"
    write_video(videos / "0.mp4")
    old = stella.load(home / "rounds" / "000002" / "model.safetensors").fingerprint
    index = stella.Index(tmp_path / "index")
    rollback(home, 2, quiet())
    index.update(videos, model=home)
    assert index.serving().fingerprint == old
    shutil.rmtree(home)
    moved, fresh = copy(three, tmp_path / "moved"), stella.Index(index.path)  # it has gone on to round 3
    with pytest.raises(StellaError, match=r"home, which made the vectors, is gone; name the place where it is now"):
        fresh.search(videos / "0.mp4")
    with pytest.raises(StellaError, match=r"than base-tiny; name the place where .*home is now, or embed all files"):
        fresh.search(videos / "0.mp4", model="base-tiny")
    found = fresh.search(videos / "0.mp4", to="video", model=moved)
    assert found.hits[0].path == "0.mp4"
    assert ("was translated" if common == 4 else "by the kept weights") in found.note
    versions = Versions(stella.Index(index.path), str(moved))
    assert versions.now.weights and versions.home() == str(moved)
    write_video(videos / "1.mp4", seed=1)
    assert stella.Index(index.path).update(model=moved).counts.added == 1
    assert stella.Index(index.path).search(videos / "0.mp4", to="video").hits[0].path == "0.mp4"  # from now on


def test_a_search_reads_no_state_again(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be hundreds of rounds."""
    write_video(tmp_path / "videos" / "0.mp4")
    index = stella.Index(tmp_path / "index")
    index.update(tmp_path / "videos", model=three)
    index.search(tmp_path / "videos" / "0.mp4")
    monkeypatch.setattr(translate.Measured, "read", lambda path: pytest.fail(f"{path} is read again"))
    assert index.search(tmp_path / "videos" / "0.mp4").hits

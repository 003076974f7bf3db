import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from helpers.disk import small_disk
from helpers.fake_model import FakeModel
from helpers.indexes import Content, content

from stella.errors import ClipError, StellaError
from stella.search import update, vectors
from stella.search.catalogue import Catalogue
from stella.search.index import Index
from stella.search.maintain import Summary, bad_files
from stella.search.sources import MediaFolder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "dogs").mkdir(parents=True)
    (root / "cats").mkdir()
    for name in ("dogs/a.mp4", "dogs/b.mkv", "cats/c.mp4", "cats/d.wav", "e.mov"):
        (root / name).write_text(name * 3 + name[0])
    return root


def made(root: Path, source: Path, model: FakeModel | None = None) -> Index:
    index = Index(root)
    index.update(source, model=model or FakeModel())
    return index


def fresh(tmp_path: Path, source: Path, model: FakeModel | None = None) -> Content:
    """The content of an index made from scratch."""
    root = tmp_path / f"fresh-{len(list(tmp_path.iterdir()))}"
    made(root, source, model)
    return content(root)


def done(summary: Summary) -> dict[str, int]:
    c = summary.counts
    return {"added": c.added, "redone": c.redone, "renamed": c.renamed, "dropped": c.dropped, "bad": c.bad.total()}


def test_an_index_holds_every_window_of_every_file(tmp_path: Path, source: Path) -> None:
    model = FakeModel()
    index = made(tmp_path / "index", source, model)
    expected = []
    for path in ("dogs/a.mp4", "dogs/b.mkv", "cats/c.mp4", "cats/d.wav", "e.mov"):
        for modality, part in zip(("video", "audio"), model.embed_both(source / path), strict=True):
            for i in range(len(part.vectors) if part else 0):
                data = part.vectors[i].half().numpy().tobytes()
                expected.append((path.encode(), "fake-one", modality, float(i), float(i + 2), data))
    assert content(tmp_path / "index") == sorted(expected)
    state = index.state()
    assert state.files == {"ok": 5} and sum(state.windows.values()) == len(expected) and not state.dead
    assert state.sources == [source] and state.model and state.model.fingerprint == "fake-one"


def test_an_update_does_what_is_new_and_nothing_twice(tmp_path: Path, source: Path) -> None:
    index = made(tmp_path / "index", source)
    model = FakeModel()
    assert done(index.update(source, model=model)) == dict.fromkeys(("added", "redone", "renamed", "dropped", "bad"), 0)
    assert model.asked == []
    (source / "new.mp4").write_text("new")
    (source / "e.mov").write_text("changed")
    (source / "dogs/b.mkv").unlink()
    (source / "dogs/a.mp4").rename(source / "cats/moved.mp4")
    os.utime(source / "cats/c.mp4", (1, 1))  # the same content
    (source / "cats/bad.mp4").write_text("bad")
    counts = done(index.update(model=model))  # the folder is known
    assert counts == {"added": 1, "redone": 1, "renamed": 1, "dropped": 1, "bad": 1}
    assert sorted(model.asked) == ["bad.mp4", "e.mov", "new.mp4"]
    assert content(tmp_path / "index") == fresh(tmp_path, source)
    moved = index.search(model.embed_video(source / "cats/moved.mp4").vectors[0], 1).hits[0]
    assert (moved.path, moved.label) == ("cats/moved.mp4", "cats")
    assert index.state().files == {"ok": 5, "bad": 1, "gone": 1} and index.state().dead > 0
    assert done(index.update(model=model)) == dict.fromkeys(counts, 0)
    (source / "dogs/b.mkv").write_text("back again")
    assert done(index.update(model=model))["added"] == 1
    assert content(tmp_path / "index") == fresh(tmp_path, source)


def test_bad_files_are_listed_and_tried_again_when_they_change(tmp_path: Path, source: Path) -> None:
    (source / "bad.mp4").write_text("bad")
    (source / "lost.mp4").symlink_to("nowhere")
    index, model = made(tmp_path / "index", source), FakeModel()
    with closing(Catalogue(index.path)) as catalogue:
        listed = bad_files(catalogue)
    assert [(bad.file, bad.reason) for bad in listed] == [
        (source / "bad.mp4", "not a media file; fetch it again"),
        (source / "lost.mp4", "missing file; check the path"),
    ]
    index.update(model=model)
    assert model.asked == []
    (source / "bad.mp4").chmod(0o600)
    index.update(model=model)
    assert model.asked == ["bad.mp4"]
    (source / "bad.mp4").write_text("good")
    assert done(index.update(model=model))["added"] == 1
    (source / "bad.mp4").write_text("bad again")
    index.update(model=model)
    assert content(index.path) == fresh(tmp_path, source)


def test_an_index_of_nothing_usable_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.mp4").write_text("bad")
    index = Index(tmp_path / "index")
    why = r"none of 1 file of .*source can be used \(1 not a media file\): .*source/a\.mp4 \(not a media file\)$"
    with pytest.raises(StellaError, match=why):
        index.update(source, model=FakeModel())
    assert not index.path.exists()
    for number in range(6):
        (source / f"b{number}.mp4").write_text("bad")
    with pytest.raises(StellaError, match=r"none of 7 files .*a\.mp4 .*b3\.mp4 \(not a media file\) and 2 more$"):
        index.update(source, model=FakeModel())
    for path in source.iterdir():
        path.unlink()
    with pytest.raises(StellaError, match="holds no videos"):
        index.update(source, model=FakeModel())
    with pytest.raises(StellaError, match=r"base-tinny cannot be read"):
        index.update(source, model="base-tinny")
    assert not index.path.exists()


def test_a_call_that_fails_leaves_an_older_index_as_it_was(tmp_path: Path, source: Path) -> None:
    index = made(tmp_path / "index", source)
    before = content(index.path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StellaError, match="holds no videos"):
        index.update(tmp_path / "empty", model=FakeModel())
    assert content(index.path) == before and index.state().sources == [source.resolve()]
    for file in source.rglob("*.*"):
        file.unlink()
    with pytest.raises(StellaError):
        index.update(model=FakeModel())
    assert index.path.exists()


def test_names_may_be_any_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    folder = os.fsencode(source) + b"/caf\xe9 [red]"
    Path(os.fsdecode(folder)).mkdir(parents=True)
    Path(os.fsdecode(folder + b"/\xff\n.mp4")).write_text("odd!")
    index, model = made(tmp_path / "index", source), FakeModel()
    (hit,) = index.search(torch.ones(8), 1).hits
    assert os.fsencode(hit.file) == folder + b"/\xff\n.mp4" and hit.label == os.fsdecode(b"caf\xe9 [red]")
    assert len(index.search(torch.ones(8), path=os.fsdecode(b"caf\xe9*"), label=hit.label).hits) == 1
    index.update(source, model=model)
    assert model.asked == []


def test_two_models_are_never_mixed_and_a_refresh_switches_at_the_end(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = made(tmp_path / "index", source)
    old, two = content(index.path), FakeModel("two", dim=12)
    with pytest.raises(StellaError, match="all its vectors are stale; add --refresh"):
        index.update(source, model=two)
    with pytest.raises(StellaError, match="were made by another model than this model; leave it out"):
        index.search(str(source / "dogs/a.mp4"), model=two)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MediaFolder, "embed", _fails_after(MediaFolder.embed, 2))
        index.update(model=two, refresh=True)
    state = index.state()
    assert state.model and state.target and (state.model.fingerprint, state.target.dim) == ("fake-one", 12)
    assert state.stale == 3 and [row for row in content(index.path) if row[1] == "fake-one"] == old
    one = FakeModel()
    assert index.search(str(source / "dogs/a.mp4"), 1, to="video", model=one).hits[0].path == "dogs/a.mp4"
    (source / "new.mp4").write_text("new")
    (source / "e.mov").write_text("changed")
    done_now = index.update(model=two, refresh=True)
    assert done_now.switched and len(two.asked) == len(set(two.asked)) == 6
    assert content(index.path) == fresh(tmp_path, source, FakeModel("two", dim=12))
    state = index.state()
    assert state.model and state.model.fingerprint == "fake-two" and not state.target and not state.stale
    assert len(list((index.path / "vectors").iterdir())) == 2


def _fails_after(plain, calls: int):
    count = iter(range(calls))

    def embed(*args):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return plain(*args)

    return embed


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("version", ["one", "two"])  # new files, and a refresh
def test_ctrl_c_during_a_commit_leaves_a_whole_index(
    version: str, moment: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, plain = made(tmp_path / "index", source), Catalogue.change
    for name in ("new.mp4", "newer.mp4"):
        (source / name).write_text(name)
    model, before = FakeModel(version), content(index.path)

    @contextmanager
    def interrupted(self: Catalogue) -> Iterator[sqlite3.Connection]:
        with plain(self) as db:
            yield db
            (windows,) = db.execute("SELECT count(*) FROM windows").fetchone()
            if hit := windows > len(before):
                patch.undo()
            if hit and moment == "before":
                raise KeyboardInterrupt
        if hit:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(update, "COMMIT_SECONDS", -1)
        patch.setattr(Catalogue, "change", interrupted)
        index.update(model=model, refresh=True)
    found = content(index.path)
    assert (found == before) if moment == "before" else (set(found) > set(before))
    index.update(model=model, refresh=True)
    assert content(index.path) == fresh(tmp_path, source, model)


def test_another_target_drops_the_first_one(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = made(tmp_path / "index", source)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MediaFolder, "embed", _fails_after(MediaFolder.embed, 2))
        index.update(model=FakeModel("two"), refresh=True)
    index.update(model=FakeModel("three"), refresh=True)
    assert content(index.path) == fresh(tmp_path, source, FakeModel("three"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MediaFolder, "embed", _fails_after(MediaFolder.embed, 2))
        index.update(model=FakeModel("two"), refresh=True)
    assert not index.update(model=FakeModel("three"), refresh=True).switched  # back to the one that serves
    assert content(index.path) == fresh(tmp_path, source, FakeModel("three")) and index.state().target is None


def test_shards_are_filled_one_after_the_other_and_compacted(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "ROWS", 3)
    index = made(tmp_path / "index", source)
    before = content(index.path)
    assert len(list((index.path / "vectors").iterdir())) > 4 and before == fresh(tmp_path, source)
    reader = Index(index.path)
    query = torch.ones(8)
    assert reader.search(query, 99, merge=False).hits == index.search(query, 99, merge=False).hits
    for name in ("dogs/a.mp4", "cats/c.mp4"):
        (source / name).unlink()
    index.update(model=FakeModel())
    dead, size = index.state().dead, index.state().bytes
    assert dead and index.compact() == dead and index.compact() == 0
    state = index.state()
    assert state.dead == 0 and state.bytes == size - 16 * dead
    assert sum(path.stat().st_size for path in (index.path / "vectors").iterdir()) == state.bytes
    assert content(index.path) == fresh(tmp_path, source)
    found = [(hit.path, hit.start, hit.score) for hit in reader.search(query, 99, merge=False).hits]
    assert found == [(hit.path, hit.start, hit.score) for hit in Index(index.path).search(query, 99, merge=False).hits]


def test_a_reader_keeps_its_snapshot_while_a_writer_goes_on(tmp_path: Path, source: Path) -> None:
    """A compaction between reading the catalogue and mapping the vectors is noticed, and the search begins again."""
    index = made(tmp_path / "index", source)
    (source / "e.mov").unlink()
    index.update(model=FakeModel())
    reader = Index(index.path)
    expected = [(hit.path, hit.start) for hit in Index(index.path).search(torch.ones(8)).hits]
    opened, plain = [], reader._mapped.open

    def late(*args):
        args[0].meta("version")  # the snapshot begins
        if not opened:
            opened.append(Index(index.path).compact())
        return plain(*args)

    reader._mapped.open = late  # type: ignore[method-assign]
    assert [(hit.path, hit.start) for hit in reader.search(torch.ones(8)).hits] == expected and opened[0] > 0


def test_several_folders_in_one_index(tmp_path: Path, source: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    (second / "e.mov").write_text("another")
    index = made(tmp_path / "index", source)
    index.update(second, model=FakeModel())
    assert index.state().sources == [source, second] and index.state().files == {"ok": 6}
    assert {hit.file for hit in index.search(torch.ones(8), 20).hits} >= {source / "e.mov", second / "e.mov"}
    with pytest.raises(StellaError, match="hold the same files"):
        index.update(source / "dogs", model=FakeModel())
    with pytest.raises(StellaError, match="is no folder of"):
        index.forget(tmp_path)
    index.forget(second)
    assert content(index.path) == fresh(tmp_path, source)


def test_what_an_index_refuses(tmp_path: Path, source: Path) -> None:
    index, model = made(tmp_path / "index", source), FakeModel()
    with pytest.raises(StellaError, match="holds no index; make one with: stella index SRC"):
        Index(tmp_path / "nowhere").search(torch.ones(8))
    with pytest.raises(StellaError, match="is no index and holds '"):
        Index(source).update(tmp_path / "index", model=model)
    with pytest.raises(StellaError, match="is not a folder"):
        index.update(tmp_path / "nowhere", model=model)
    with pytest.raises(StellaError, match="is not a folder"):
        Index(tmp_path / "none").update(tmp_path / "nowhere", model=model)
    assert not (tmp_path / "none").exists()
    with pytest.raises(StellaError, match="has no folder yet"):
        Index(tmp_path / "empty").update(model=model)
    with pytest.raises(StellaError, match="k=0 must be at least 1"):
        index.search(torch.ones(8), 0)
    with pytest.raises(StellaError, match=r"shape \[7\] does not fit vectors of 8"):
        index.search(torch.ones(7))
    with pytest.raises(StellaError, match="finite and not zero"):
        index.search(torch.zeros(8))
    with pytest.raises(StellaError, match="does not know where its model came from"):
        index.search(str(source / "e.mov"))
    with closing(sqlite3.connect(index.path / "catalogue.sqlite")) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(StellaError, match="is an index of format 7"):
        index.state()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "catalogue.sqlite").write_text("no database at all" * 99)
    with pytest.raises(StellaError, match=r"catalogue\.sqlite cannot be read"):
        Index(tmp_path / "other").state()


def test_a_full_disk_leaves_a_whole_index(tmp_path: Path, source: Path) -> None:
    model = FakeModel(dim=256)
    index = made(tmp_path / "index", source, model)
    before = content(index.path)
    for number in range(100):
        (source / f"{number}.mp4").write_text(f"file {number} abc")
    with small_disk(50_000), pytest.raises(StellaError, match=r"f16 cannot be written \(File too large\); free some"):
        index.update(model=model)
    assert set(before) <= set(content(index.path))
    with small_disk(8_000), pytest.raises(StellaError, match=r"catalogue.sqlite cannot be written \(disk I/O error\)"):
        index.update(model=model)
    index.update(model=model)
    assert content(index.path) == fresh(tmp_path, source, model)


def test_one_writer_at_a_time(tmp_path: Path, source: Path) -> None:
    index = made(tmp_path / "index", source)

    class Nosy(FakeModel):
        def embed_both(self, path: Path, overlap: float = 0.5):
            with pytest.raises(StellaError, match=f"is in use by process {os.getpid()}"):
                Index(index.path).update(source, model=FakeModel())
            assert index.search(torch.ones(8)).hits  # a reader never waits
            return super().embed_both(path)

    (source / "new.mp4").write_text("new")
    assert done(index.update(model=Nosy()))["added"] == 1


def test_a_model_that_gives_no_numbers_makes_a_file_bad(tmp_path: Path, source: Path) -> None:
    class Broken(FakeModel):
        def embed_audio(self, path: Path | str):
            if Path(path).name == "e.mov":
                raise ClipError(path, "damaged audio", "fetch it again")
            found = super().embed_audio(path)
            found.vectors[0, 0] = float("nan") if Path(path).name == "a.mp4" else 0
            return found

    summary = Index(tmp_path / "index").update(source, model=Broken())
    assert summary.counts.bad == {"non-finite vectors": 1, "damaged audio": 1}
    assert "; bad: 1 non-finite vectors, 1 damaged audio; 3 files" in str(summary)


def test_an_index_on_a_read_only_disk_answers(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = made(tmp_path / "index [1]", source)
    expected = index.search(torch.ones(8)).hits
    monkeypatch.setattr(os, "access", lambda *_: False)
    before = sorted(index.path.rglob("*"))
    with closing(Catalogue(index.path)) as catalogue:
        assert sorted(index.path.rglob("*")) == before and catalogue.meta("overlap") == 0.5
        with pytest.raises(StellaError, match="cannot be written"), catalogue.change():
            catalogue.set_meta("target", 1)
    assert index.search(torch.ones(8)).hits == expected


def test_the_overlap_of_windows_is_the_same_for_the_whole_index(tmp_path: Path, source: Path) -> None:
    index = Index(tmp_path / "index")
    with pytest.raises(StellaError, match="overlap=1 is the share"):
        index.update(source, model=FakeModel(), overlap=1)
    index.update(source, model=FakeModel(), overlap=0.25)
    index.update(model=FakeModel())
    index.update(model=FakeModel(), overlap=0.25)
    with pytest.raises(StellaError, match=r"overlap by 0.25, not 0.5; use another index"):
        index.update(model=FakeModel(), overlap=0.5)

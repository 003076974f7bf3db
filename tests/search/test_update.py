"""What an update does with folders and files, beyond `test_index`."""

import os
import shutil
from pathlib import Path

import pytest
from helpers.fake_model import FakeModel
from helpers.indexes import content
from typer.testing import CliRunner

from stella.cli import app
from stella.errors import StellaError
from stella.search import index as module
from stella.search.index import Index
from stella.search.sources import MediaFolder


def folder(root: Path, **files: str) -> Path:
    root.mkdir()
    for name, text in files.items():
        (root / f"{name}.mp4").write_text(text)
    return root


@pytest.mark.parametrize("gone", [False, True])
def test_a_folder_that_is_empty_or_gone_keeps_its_vectors_and_stops_no_other(tmp_path: Path, gone: bool) -> None:
    """It may be a disk that is not mounted."""
    one, two = folder(tmp_path / "one", a="aaa", b="bb"), folder(tmp_path / "two", c="cccc")
    index, model = Index(tmp_path / "index"), FakeModel()
    index.update(one, two, model=model)
    before = content(index.path)
    kept = one.rename(tmp_path / "kept")
    if not gone:
        one.mkdir()
    (two / "d.mp4").write_text("dd")
    done = index.update(model=model)
    assert done.counts.added == 1 and done.counts.dropped == 0 and list(done.counts.passed_over) == [one]
    assert set(before) < set(content(index.path)) and index.state().sources == [one, two]
    shutil.rmtree(one, ignore_errors=True)
    kept.rename(one)
    assert index.update(model=model).counts.passed_over == {} and model.asked.count("a.mp4") == 1
    shutil.rmtree(two)
    shutil.rmtree(one)
    with pytest.raises(StellaError, match=r"one is not a folder; .*two is not a folder"):
        index.update(model=model)


def test_the_command_names_folders_that_it_passes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load", lambda what, device=None: FakeModel())
    monkeypatch.chdir(tmp_path)
    one, _ = folder(tmp_path / "one", a="aaa"), folder(tmp_path / "two", c="cccc")
    run = CliRunner()
    assert run.invoke(app, ["index", "one", "two", "index"], env={"COLUMNS": "500"}).exit_code == 0
    (one / "a.mp4").unlink()
    done = run.invoke(app, ["index", "index"], env={"COLUMNS": "500"})
    text = " ".join(done.output.split())
    assert done.exit_code == 1 and f"passed over: {one} holds no videos" in text
    assert f"if its files are gone for good: stella index --forget {one} index" in text


def test_of_two_copies_of_a_lost_file_one_is_its_new_name(tmp_path: Path) -> None:
    source, index = folder(tmp_path / "source", a="same", b="other"), Index(tmp_path / "index")
    index.update(source, model=FakeModel())
    (source / "a.mp4").rename(source / "x.mp4")
    shutil.copy(source / "x.mp4", source / "y.mp4")
    counts = index.update(model=FakeModel()).counts
    assert (counts.renamed, counts.added, counts.dropped) == (1, 1, 0)
    fresh = Index(tmp_path / "fresh")
    fresh.update(source, model=FakeModel())
    assert content(index.path) == content(fresh.path)


def test_folders_in_one_another_are_refused_either_way(tmp_path: Path) -> None:
    outer = folder(tmp_path / "outer", a="a")
    inner = folder(outer / "inner", b="b")
    for number, (first, second) in enumerate(((outer, inner), (inner, outer))):
        index = Index(tmp_path / f"index-{number}")
        index.update(first, model=FakeModel())
        with pytest.raises(StellaError, match="hold the same files"):
            index.update(second, model=FakeModel())


@pytest.mark.timeout(30)
def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    source = MediaFolder(tmp_path)
    assert [source.digest(item) for item in source.items()] == [None]

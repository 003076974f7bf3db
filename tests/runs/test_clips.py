"""A run and its clips on a disk: resumed with the same ones only, from any directory; evaluated on what is named."""

import io
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.packs import packed
from helpers.small import quick
from helpers.videos import Videos
from rich.console import Console

from stella.config import to_tree
from stella.data.folder import FolderConfig
from stella.data.pack import pack
from stella.data.scenes import Scenes
from stella.errors import StellaError
from stella.files import write_json
from stella.runs.clips import keep_clips
from stella.runs.config import settle
from stella.runs.evaluate import evaluate_weights
from stella.runs.loop import pretrain, resume

QUIET = Console(file=io.StringIO())


@pytest.fixture
def videos(tmp_path: Path) -> FolderConfig:
    """Files that are never read: only their names and sizes matter."""
    for number in range(30):
        path = tmp_path / "videos" / f"{number:02d}\udce9,.mp4"  # a name that is not UTF-8, with a comma
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(number))
    return FolderConfig(path=str(tmp_path / "videos"), eval_share=0.3)


def test_other_clips_are_refused_by_name(videos: FolderConfig, tmp_path: Path) -> None:
    def keep() -> None:
        keep_clips(tmp_path / "clips.csv", videos.train_tasks(), videos.eval_tasks(), started=True)

    keep()
    keep()
    root = Path(videos.path)
    trained = root / videos.open().files[videos.train_tasks()[0][1].clips[0][1]]
    content = trained.read_bytes()
    trained.write_bytes(b"another film")
    with pytest.raises(StellaError, match=rf"{trained.name} had \d+ bytes and has 12 bytes; restore them, or start"):
        keep()
    trained.write_bytes(content)
    keep()
    renamed = trained.rename(root / "new.mp4")
    with pytest.raises(StellaError, match=rf"{trained.name} is gone; new.mp4 is new"):
        keep()
    renamed.rename(trained)
    for number in range(9):
        (root / f"more{number}.mp4").touch()
    with pytest.raises(StellaError, match=r"more0.mp4 is new; .* and 6 more; restore"):
        keep()
    keep_clips(tmp_path / "clips.csv", videos.train_tasks(), videos.eval_tasks(), started=False)  # of a refused run
    keep()


def test_packed_clips_of_other_content_are_refused_unless_the_list_has_no_checksums(tmp_path: Path) -> None:
    one, other = (packed(tmp_path / name, Videos(8, task)) for name, task in (("one", "a"), ("other", "bb")))
    other.header = replace(other.header, ids=one.header.ids)  # now with the same names and lengths
    file = tmp_path / "clips.csv"
    keep_clips(file, [("t", one)], [], started=False)
    keep_clips(file, [("t", one)], [], started=True)
    with pytest.raises(StellaError, match=r"a/0 had 2000 samples, checksum \w{8} and has 2000 samples, checksum"):
        keep_clips(file, [("t", other)], [], started=True)
    file.write_text(re.sub(r'"(\d+ samples), checksum \w+"', r"\1", file.read_text()))
    keep_clips(file, [("t", other)], [], started=True)
    file.write_text(file.read_text().replace("2000", "2001"))
    with pytest.raises(StellaError, match="a/0 had 2001 samples and has 2000"):
        keep_clips(file, [("t", one)], [], started=True)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of packed scenes, a and b."""
    root = tmp_path_factory.mktemp("arrays")
    for name, clips in (("a", 24), ("b", 12)):
        scenes = Scenes("task1" if name == "a" else "task2", "train", clips)
        pack(scenes, root / name, pixels=96, spec_frames=256, size=96, workers=0, progress=False)
    return root


OWN = ("data.source=packed", "data.eval_share=0.4", "model.image_size=96", "model.spec_frames=256")


def test_a_run_means_the_same_clips_from_another_directory(
    arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(arrays)
    (tmp_path / "elsewhere").mkdir()
    result = pretrain(quick("finetune", *OWN, "data.path=a"), tmp_path / "run", console=QUIET)
    lines = (tmp_path / "run" / "clips.csv").read_text().splitlines()
    assert lines[0] == "set,task,clip,stamp" and len(lines) == 25
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert evaluate_weights(str(tmp_path / "run"))["recall"] == result.evaluations[-1]["recall"]
    assert resume(tmp_path / "run", console=QUIET).finished
    monkeypatch.chdir(arrays)
    said = Console(file=io.StringIO(), width=200)
    assert evaluate_weights(str(tmp_path / "run"), None, ["data.path=b"], said)["clips"] == [12]  # all of it
    held_out = evaluate_weights(str(tmp_path / "run"), None, ["data.path=a"], said)
    assert held_out["clips"] == result.evaluations[-1]["clips"]
    assert f"12 clips of 1 task, all of {arrays / 'b'}" in said.file.getvalue()  # type: ignore[attr-defined]
    assert f", held out of {arrays / 'a'}" in said.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_is_not_resumed_with_other_clips(arrays: Path, tmp_path: Path) -> None:
    shutil.copytree(arrays / "a", tmp_path / "a")
    config = quick("finetune", *OWN, f"data.path={tmp_path / 'a'}")
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "config.json", to_tree(settle(config)))  # as a run that was killed at once
    keep_clips(tmp_path / "run" / "clips.csv", config.data.train_tasks(), config.data.eval_tasks(), started=False)
    header = (tmp_path / "a" / "clips.json").read_text()
    first = Scenes("task1", "train", 24)[0].id
    (tmp_path / "a" / "clips.json").write_text(header.replace(f'"{first}"', '"another"'))
    with pytest.raises(StellaError, match=f"{first} is gone; another is new"):
        pretrain(config, tmp_path / "run", resume=True, console=QUIET)

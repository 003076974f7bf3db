"""Nothing is evaluated that was trained on: folder, shards, arrays, pieces of one recording, learner, downstream.

A folder grows. At every moment, and from each moment to the next, the recordings of both sides are different.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.media_files import write_video

from stella.clip import Source
from stella.data import workers as pool
from stella.data.folder import FolderConfig
from stella.data.pack import pack
from stella.data.packed import PackedConfig
from stella.data.prepare import prepare
from stella.data.shards import ShardsConfig
from stella.data.tasks import FilesConfig, recording_of
from stella.data.views import stored_at
from stella.learn.held import is_held
from stella.learn.items import Scanner, Seen
from stella.media.inputs import Inputs

SHARE = 0.45
INPUTS = Inputs(0.5, 16, 18, 2, None, 48)


def add(videos: Path, first: int, count: int) -> None:
    for number in range(first, first + count):
        write_video(videos / f"{(7 * number) % 50:02d} talk.mp4", 1.6 if number % 4 == 0 else 0.5, seed=number)


def folder(videos: Path, root: Path, step: int) -> FilesConfig:
    return FolderConfig(path=str(videos), eval_share=SHARE, duration=0.5)


def shards(videos: Path, root: Path, step: int, split: bool = False) -> FilesConfig:
    """The same command again takes up what is new."""
    prepare(videos, root / "s", seconds=0.5, size=18, fps=4, split=split, workers=1, progress=False)
    return ShardsConfig(path=str(root / "s"), eval_share=SHARE)


def pieces(videos: Path, root: Path, step: int) -> FilesConfig:
    return shards(videos, root, step, split=True)


def packed(videos: Path, root: Path, step: int) -> FilesConfig:
    """Packed pieces: all that is left of a recording is its name."""
    tasks = pieces(videos, root, step).all_tasks()
    pack(tasks, root / "p", pixels=16, spec_frames=48, workers=0, progress=False)
    return PackedConfig(path=str(root / "p"), eval_share=SHARE)


def recordings(source: Source) -> set[str]:
    found = [stored_at(source, index) for index in range(len(source))]
    return {stored.origin(index).recording for stored, index in (each for each in found if each)}


def sides(config: FilesConfig) -> tuple[set[str], set[str]]:
    train, test = ([source for _, source in tasks] for tasks in (config.train_tasks(), config.eval_tasks()))
    parts = config.downstream("retrieval")
    apart = [recordings(part) for part in (parts.train, parts.validation, parts.test)]
    assert not apart[0] & apart[1] and not apart[0] & apart[2] and not apart[1] & apart[2] and all(apart)
    return set().union(*map(recordings, train)), set().union(*map(recordings, test))


def learner(videos: Path, root: Path, step: int) -> tuple[set[str], set[str]]:
    found = [item for item, _ in Scanner(INPUTS).scan(str(videos), Seen())]
    held = {item.recording for item in found if is_held(item, SHARE)}
    return {item.recording for item in found} - held, held


@pytest.mark.parametrize("make", [folder, shards, pieces, packed, learner])
def test_no_recording_is_on_both_sides_while_a_folder_grows(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "START_METHOD", "fork")
    videos, ever = tmp_path / "v", (set[str](), set[str]())
    for step, (first, count) in enumerate(((0, 9), (9, 3))):
        add(videos, first, count)
        found = make(videos, tmp_path, step)
        now = found if isinstance(found, tuple) else sides(found)
        assert all(len(side) > 1 for side in now) and len(now[0] | now[1]) == first + count
        for known, more in zip(ever, now, strict=True):
            known |= more
        assert not ever[0] & ever[1]


def test_a_piece_belongs_to_its_recording() -> None:
    assert {recording_of(id) for id in ("a/m.mp4@0.000", "a/m.mp4@30.720", "a/m.mp4")} == {"a/m.mp4"}

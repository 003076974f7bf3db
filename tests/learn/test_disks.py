"""Disks that are full, or gone, while a learner watches: it waits for them."""

import errno
from pathlib import Path
from typing import Any

import pytest
from helpers.media_files import write_video
from helpers.small import quick
from rich.console import Console

from stella.learn import held
from stella.learn.home import Home, Settings
from stella.learn.loop import PAUSE, Outcome, Session, Watch, learn

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def watched(home: Path, root: Path, said: Path, share: float = 0.0) -> Outcome:
    """What a learner does that watches videos until nothing is left; `said` gets what it says."""
    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    with said.open("w") as file:
        when, console = Watch(clips=12, every=0, settle=0, scan=0.01, idle=0), Console(file=file, width=300)
        return learn(home, [str(root)], config, Settings(share=share), watch=when, console=console)


def test_a_full_disk_while_videos_are_set_aside_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, waits, write_bytes = tmp_path / "in", list[float](), held.write_bytes
    for seed in range(6):
        write_video(root / f"{seed}.mp4", seed=seed)

    def full(*given: Any) -> None:
        if len(waits) < 2:
            raise NO_SPACE
        write_bytes(*given)

    monkeypatch.setattr(held, "write_bytes", full)
    monkeypatch.setattr(Session, "_wait", lambda self, seconds: waits.append(seconds))
    [record] = watched(tmp_path / "home", root, tmp_path / "said", 0.5).rounds
    assert record["set_aside"] == len(Home(tmp_path / "home").plan(1).held) > 0 and record["skipped"] == {}
    assert waits[:2] == [PAUSE] * 2 and (tmp_path / "said").read_text().count("cannot be written (No space") == 1

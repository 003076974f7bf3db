"""Watching a folder into which real files arrive."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.archives import pack
from helpers.learning import quiet
from helpers.media_files import write_video
from helpers.small import quick
from rich.console import Console

from stella.data.skipped import Skipped
from stella.files import Line
from stella.learn import items, loop, round
from stella.learn.home import Home, Settings
from stella.learn.items import LOST, Scanner
from stella.learn.loop import Session, Watch, learn
from stella.learn.page import render
from stella.learn.round import Learner
from stella.runs.stop import Stop, Stopped
from stella.serve.learner import Attached


@pytest.mark.slow
def test_files_that_grow_are_waited_for_and_bad_ones_are_counted(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for seed in range(5):
        write_video(root / f"{seed}.mp4", 1.0, seed=seed)
    (root / "bad.mp4").write_bytes(b"no video at all")
    whole = write_video(tmp_path / "growing.mp4", 1.0, seed=7).read_bytes()

    def grow() -> None:
        with (root / "growing.mp4").open("wb") as file:
            for start in range(0, len(whole), len(whole) // 10 + 1):
                file.write(whole[start : start + len(whole) // 10 + 1])
                file.flush()
                time.sleep(0.2)
        (root / "0.mp4").rename(root / "renamed.mp4")

    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    writer = threading.Thread(target=grow)
    writer.start()
    when = Watch(clips=4, every=1, settle=0.6, scan=0.1, idle=3)
    done = learn(tmp_path / "home", [str(root)], config, Settings(share=0.0), watch=when, console=quiet())
    writer.join()
    home = Home(tmp_path / "home")
    clips = [item for plan in home.plans() for item in plan.train]
    skipped = {id: line["reason"] for n in range(1, home.current + 1) for id, line in read_skipped(home, n).items()}
    learnt = [item.stamp for number, item in enumerate(clips) if number not in skipped]
    assert len(learnt) == len(set(learnt)) == 6 and f"{len(whole)} " in " ".join(learnt)
    assert home.seen().bad.keys() == {str(root / "bad.mp4")}
    lost = [reason for reason in skipped.values() if reason in LOST]  # renamed after the round began
    assert sum(sum(record["skipped"].values()) for record in done.rounds) == len(skipped) == 1 + len(lost) <= 2


def test_clips_that_could_not_be_used_are_not_told_as_learnt(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for seed in range(3):
        write_video(root / f"{seed}.mp4", 1.0, seed=seed)
    (root / "bad.mp4").write_bytes(b"no video at all")
    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    with (tmp_path / "said").open("w") as file:
        for new in ((config, Settings(share=0.0)), (None, None)):
            learn(tmp_path / "home", [str(root)], *new, console=Console(file=file, width=300))
    said = (tmp_path / "said").read_text()
    assert "round 1: 3 clips learnt in 1 step, 0 set aside" in said and "skipped 1 not a media file" in said
    assert "nothing new: 3 clips learnt in 1 round" in said
    assert "3 clips learnt in 1 round since" in render(Home(tmp_path / "home"))
    assert Attached(str(tmp_path / "home")).tree()["clips"] == 3


def test_a_call_that_could_use_nothing_says_so_and_fails(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    (root / "bad.mp4").write_bytes(b"no video at all")
    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    with (tmp_path / "said").open("w") as file:
        console = Console(file=file, width=300)
        assert learn(tmp_path / "home", [str(root)], config, Settings(share=0.0), console=console).exit_code == 1
        assert learn(tmp_path / "home", [str(root)], console=console).exit_code == 0  # nothing new
        write_video(root / "good.mp4", 1.0)
        (root / "other.mp4").write_bytes(b"neither")
        assert learn(tmp_path / "home", [str(root)], console=console).exit_code == 0
    said = (tmp_path / "said").read_text()
    assert said.count("none of the new clips could be used") == 1
    assert Home(tmp_path / "home").round(1).skipped.read_text().count("not a media file") == 1


def test_a_bad_clip_that_was_to_be_set_aside_is_not_set_aside(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    for number in range(6):
        (root / f"{number}.mp4").write_bytes(b"no video, " + bytes([number]))
    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    done = learn(tmp_path / "home", [str(root)], config, Settings(share=0.5), console=quiet())
    assert Home(tmp_path / "home").plan(1).held and done.rounds[0]["set_aside"] == 0 and done.exit_code == 1


def test_clips_that_wait_for_their_round_are_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, waits = tmp_path / "in", list[float]()
    write_video(root / "one.mp4")

    def wait(self: Session, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise Stopped

    monkeypatch.setattr(Session, "_wait", wait)
    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    with (tmp_path / "said").open("w") as file, pytest.raises(AssertionError):  # no signal came
        when, console = Watch(clips=5, every=7200, settle=0), Console(file=file, width=300)
        learn(tmp_path / "home", [str(root)], config, Settings(share=0.0), watch=when, console=console)
    assert (tmp_path / "said").read_text().count("new clips are waiting; the round begins within 2 h") == 1


@pytest.mark.parametrize(("longest", "least", "most"), [(60.0, 0.5, 3.0), (0.2, 0.2, 0.2)])
def test_a_slow_scan_is_followed_by_a_long_wait(
    longest: float, least: float, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times as long as it took, but not if it is slow because it reads new files: that is done once."""
    monkeypatch.setattr(loop, "LONGEST", longest)
    root, waits, scan, content = tmp_path / "in", list[float](), Scanner.scan, items.content
    write_video(root / "one.mp4")

    def slow_scan(*given: Any) -> Any:
        time.sleep(0.05)
        return scan(*given)

    def slow_content(*given: Any) -> Any:
        time.sleep(0.3)
        return content(*given)

    def wait(self: Session, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise Stopped
        if len(waits) == 2:
            write_video(root / "two.mp4", seed=2)

    monkeypatch.setattr(Scanner, "scan", slow_scan)
    monkeypatch.setattr(items, "content", slow_content)
    monkeypatch.setattr(Session, "_wait", wait)
    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    with pytest.raises(AssertionError):  # no signal came
        when = Watch(clips=5, every=7200, settle=0, scan=0.1)
        learn(tmp_path / "home", [str(root)], config, Settings(share=0.0), watch=when, console=quiet())
    assert waits[0] == 0.1 and least <= waits[1] == waits[2] <= most


def test_after_a_round_without_a_usable_clip_it_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips that are lost may be listed again at once."""
    root, waits = tmp_path / "in", list[float]()
    root.mkdir()
    (root / "bad.mp4").write_text("no video")

    def wait(self: Session, seconds: float) -> None:
        waits.append(seconds)
        raise Stopped

    monkeypatch.setattr(Session, "_wait", wait)
    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    with pytest.raises(AssertionError):  # no signal came
        when = Watch(clips=1, every=7200, settle=0, scan=0.1)
        learn(tmp_path / "home", [str(root)], config, Settings(share=0.0), watch=when, console=quiet())
    assert waits == [loop.PAUSE] and Home(tmp_path / "home").current == 1


def test_a_folder_that_is_emptied_in_a_round_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clips are learnt from where they were moved to."""
    root, moved, opened = tmp_path / "in", tmp_path / "moved", round.opened
    for seed in range(3):
        write_video(root / f"{seed}.mp4", seed=seed)
    moved.mkdir()

    def emptied(*args: Any) -> Any:
        for path in root.iterdir():
            path.rename(moved / path.name)
        raise Stopped  # as a kill

    monkeypatch.setattr(round, "opened", emptied)
    with pytest.raises(AssertionError):  # no signal came
        once(tmp_path / "home", root, tmp_path / "said")
    monkeypatch.setattr(round, "opened", opened)
    assert Home(tmp_path / "home").next.plan.exists()
    done = learn(tmp_path / "home", [str(moved)], console=quiet())
    assert [(record["learnt"], record["skipped"]) for record in done.rounds] == [(0, {"missing file": 3}), (3, {})]


def once(home: Path, root: Path, said: Path) -> list[str]:
    """The videos of the round that a call does, if it does one; `said` gets what it says."""
    before = Home(home).current
    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    new = (None, None) if Home(home).exists else (config, Settings(share=0.0))
    with said.open("w") as file:
        learn(home, [str(root)], *new, console=Console(file=file, width=300))
    return [item.path for plan in Home(home).plans()[before:] for item in plan.train]


def test_a_call_learns_what_changed_under_a_known_path(tmp_path: Path) -> None:
    root, given = tmp_path / "in", (tmp_path / "home", tmp_path / "in", tmp_path / "said")
    for seed in range(2):
        write_video(root / "today.mp4", seed=seed)
        assert once(*given) == ["today.mp4"] and once(*given) == []
    ids = {item.id for plan in Home(tmp_path / "home").plans() for item in plan.train}
    assert len(ids) == 2 and "nothing new: 2 clips learnt in 2 rounds" in (tmp_path / "said").read_text()


def test_a_call_waits_for_files_that_have_just_been_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once. One that is still being written is left, and learnt whole by the next call. Old files need no wait."""
    root, waits = tmp_path / "in", list[float]()
    given = (tmp_path / "home", root, tmp_path / "said")
    monkeypatch.setattr(loop, "SETTLE", 10.0)
    old = write_video(root / "old.mp4", seed=0)
    os.utime(old, (1, 1))
    whole = write_video(tmp_path / "new.mp4", seed=1).read_bytes()
    (root / "new.mp4").write_bytes(whole[:-100])

    def wait(self: Session, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            (root / "new.mp4").write_bytes(whole)

    monkeypatch.setattr(Session, "_wait", wait)
    assert once(*given) == ["old.mp4"] and 5 < waits[0] <= 10
    assert "1 video changed meanwhile, left for the next call" in (tmp_path / "said").read_text()
    assert once(*given) == ["new.mp4"] and len(waits) == 2
    assert once(*given) == [] and len(waits) == 2


def test_a_file_that_changes_after_it_was_found_is_learnt_once_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in an archive."""
    root, given = tmp_path / "in", (tmp_path / "home", tmp_path / "in", tmp_path / "said")
    videos = [write_video(tmp_path / f"{seed}.mp4", seed=seed).read_bytes() for seed in range(4)]
    write_video(root / "other.mp4", seed=9)

    def put(loose: bytes, archived: bytes) -> None:
        (root / "today.mp4").write_bytes(loose)
        pack(root / "day.tar", {"today.mp4": archived})

    def late(*args: Any) -> Any:
        put(*videos[2:])
        return opened(*args)

    put(*videos[:2])
    opened = round.opened
    monkeypatch.setattr(round, "opened", late)
    assert once(*given) == ["day.tar/today.mp4", "other.mp4", "today.mp4"]
    assert "1 clip learnt in 1 step, 0 set aside" in (tmp_path / "said").read_text()
    assert once(*given) == ["day.tar/today.mp4", "today.mp4"] and once(*given) == []
    put(*videos[:2])
    assert once(*given) == ["day.tar/today.mp4", "today.mp4"]  # what was there first was never read


def read_skipped(home: Home, number: int) -> dict[str | int, Line]:
    return Skipped(home.round(number).skipped).records


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before it is opened", "while it is read"])
def test_a_disk_that_vanishes_in_a_round_is_waited_for(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its files counts as bad."""
    root, away, opened = tmp_path / "in", tmp_path / "away", round.opened
    for seed in range(5):
        write_video(root / f"{seed}.mp4", 1.0, seed=seed)

    def vanishing(*args: Any) -> Any:
        if moment == "before it is opened":
            root.rename(away)
        found = opened(*args)
        if moment == "while it is read":
            root.rename(away)
        monkeypatch.setattr(round, "opened", opened)
        return found

    def wait(self: Session, seconds: float) -> None:
        monkeypatch.setattr(round, "opened", opened)
        if seconds == loop.PAUSE:
            away.rename(root)

    monkeypatch.setattr(round, "opened", vanishing)
    monkeypatch.setattr(Session, "_wait", wait)
    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    with (tmp_path / "said").open("w") as file:
        console = Console(file=file, width=300)
        when = Watch(clips=5, every=0, settle=0, idle=0)
        done = learn(tmp_path / "home", [str(root)], config, Settings(share=0.0), watch=when, console=console)
    assert [(record["clips"], record["skipped"]) for record in done.rounds] == [(5, {})]
    said = (tmp_path / "said").read_text()
    assert said.count(f"waiting: {root} is gone") == 1
    assert said.startswith(f"watching {root}: a round begins with 5 new clips, or with fewer after 0 s\n")


def test_a_folder_that_is_not_there_or_empty_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose disk is not mounted. It is said once, also if pages are drawn meanwhile, and that it is back."""
    said: list[str] = []

    class Idle(Learner):
        def __init__(self) -> None:
            self.home, self.stop = Home(tmp_path / "home"), Stop()

        def say(self, line: str, style: str = "") -> None:
            said.append(line)

    monkeypatch.setattr(Home, "inputs", None)
    monkeypatch.setattr(loop.Session, "_wait", lambda self, seconds: None)
    session = Session(Idle(), [str(tmp_path / "mount")], 1)
    seen = session.home.seen()
    for _ in range(3):
        assert session._settled(seen, 0) == []
        session._told.clear()
    assert said == [f"waiting: {tmp_path / 'mount'} is not there; mount it, or start without it"]
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "film.mp4").write_text("film")
    assert session._settled(seen, 10) == [] and [i.path for i in session._settled(seen, 0)] == ["film.mp4"]
    (tmp_path / "mount" / "film.mp4").unlink()
    for _ in range(2):
        assert session._settled(seen, 0) == []
        session._told.clear()
    (tmp_path / "mount" / "film.mp4").write_text("film")
    assert len(session._settled(seen, 0)) == 1
    back, empty = f"{tmp_path / 'mount'} is back", "is empty; if it should not be, mount it"
    assert said[1:] == [back, f"waiting: {tmp_path / 'mount'} {empty}", back]

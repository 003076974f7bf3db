"""Disks that are full, or gone, while a learner watches: it waits for them."""

import errno
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.archives import pack
from helpers.learning import SHARE, config_for, copy, packed, quiet
from helpers.media_files import write_video
from helpers.small import quick
from rich.console import Console

from stella.errors import StellaError
from stella.learn import held, items, loop, page, round
from stella.learn.disks import GoneError
from stella.learn.home import Home, Settings
from stella.learn.items import Scanner, Seen, opened
from stella.learn.loop import KEPT_APART, PAUSE, Outcome, Session, Watch, learn
from stella.media.inputs import Inputs
from stella.runs.stop import Stopped

INPUTS = Inputs(0.64, 32, 36, 4, None, 64)
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def watched(home: Path, root: Path, said: Path, share: float = 0.0) -> Outcome:
    """What a learner does that watches videos until nothing is left; `said` gets what it says."""
    config = quick("er", "data.source=folder", f"data.path={root}", "data.duration=0.64", "data.pixels=32")
    with said.open("w") as file:
        when, console = Watch(clips=12, every=0, settle=0, scan=0.01, idle=0), Console(file=file, width=300)
        return learn(home, [str(root)], config, Settings(share=share), watch=when, console=console)


class Mount:
    """A folder that dies as a mount does whose server is gone: whatever looks below it fails. Then it may come back."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.dead = root, False
        for name in ("stat", "scandir"):
            patch.setattr(os, name, self._or_dead(getattr(os, name)))

    def _or_dead(self, call: Any) -> Any:
        def checked(path: Any, *given: Any, **named: Any) -> Any:
            if self.dead and not isinstance(path, int) and Path(path).is_relative_to(self.root):
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(path))
            return call(path, *given, **named)

        return checked


def test_a_mount_that_dies_while_nothing_is_learnt_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is dead when the learner is started again."""
    first, second = packed(tmp_path / "in", (12,)), packed(tmp_path / "other", (12,), first=1)
    root, mount, waits = tmp_path / "in", Mount(tmp_path / "in", monkeypatch), 0
    learn(tmp_path / "home", [str(root)], config_for(first[0]), SHARE, console=quiet())
    mount.dead = True

    def wait(self: Session, seconds: float) -> None:
        nonlocal waits
        waits += 1
        mount.dead = waits in (1, 3, 4)
        if waits == 5:
            Path(second[0]).rename(root / "1")
        if waits == 6:
            signal.raise_signal(signal.SIGTERM)
            raise Stopped

    monkeypatch.setattr(Session, "_wait", wait)
    console = Console(file=io.StringIO(), width=300)
    done = learn(tmp_path / "home", [str(root)], watch=Watch(12, 0, 0), console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert [record["round"] for record in done.rounds] == [2] and done.exit_code == 143
    assert said.count(f"waiting: {root} is not there") == said.count(f"{root} is back") == 2


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


def learnt(home: Path) -> list[str]:
    return [item.id for plan in Home(home).plans() for item in [*plan.train, *plan.held]]


@pytest.mark.parametrize("part", ["write_page", "draw"])
def test_a_full_disk_when_the_page_is_drawn_after_a_round_does_not_repeat_the_round(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does whatever else fails after a round is in use."""
    [source], tries = packed(tmp_path / "in", (12,)), list[object]()

    def full(given: object) -> None:
        tries.append(given)
        if len(tries) == 1:
            raise NO_SPACE

    monkeypatch.setattr(*((page, part) if part == "write_page" else (Session, part)), full)
    monkeypatch.setattr(loop, "DRAWN", 0.0)
    monkeypatch.setattr(loop, "PAUSE", 0.0)
    when = Watch(clips=6, every=0, settle=0, scan=0, idle=0)
    learn(tmp_path / "home", [source], config_for(source), SHARE, watch=when, console=quiet())
    assert len(tries) > 1 and len(learnt(tmp_path / "home")) == len(set(learnt(tmp_path / "home"))) == 12


def test_a_page_that_cannot_be_written_is_drawn_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said once. It is not tried at every scan, and a stop has its own exit status all the same."""
    [source], waits, tries = packed(tmp_path / "in", (12,)), list[float](), list[int]()

    def full(home: Home) -> None:
        tries.append(len(waits))
        if len(waits) < 5:
            raise NO_SPACE

    def wait(self: Session, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            monkeypatch.setattr(loop, "PAUSE", 0.0)
            self._later = 0.0
        if len(waits) == 7:
            signal.raise_signal(signal.SIGTERM)
            raise Stopped

    monkeypatch.setattr(page, "write_page", full)
    monkeypatch.setattr(Session, "_wait", wait)
    console = Console(file=io.StringIO(), width=400)
    done = learn(tmp_path / "home", [source], config_for(source), SHARE, watch=Watch(12, 0, 0), console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert tries == [0, 3, 4, 5] and done.exit_code == 143 and len(done.rounds) == 1
    assert said.count("page.html cannot be written (No space left on device)") == 1


@pytest.mark.parametrize(("guard", "status"), [(99.0, 0), (-1000.0, KEPT_APART)])
def test_a_page_that_cannot_be_written_changes_no_exit_status(
    guard: float, status: int, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(home: Home) -> None:
        raise NO_SPACE

    monkeypatch.setattr(page, "write_page", full)
    more, settings = packed(tmp_path / "more", (8,), first=3), Settings(share=0.2, guard=guard)
    assert learn(copy(three, tmp_path / "home"), more, None, settings, console=quiet()).exit_code == status


def test_a_mount_that_dies_in_a_scan_holds_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "is_file", dead)
    scanner = Scanner(INPUTS)
    assert scanner.scan(str(tmp_path), Seen()) == [] and "Stale file handle" in scanner.problems[0]


def test_clips_of_a_mount_that_dies_in_a_round_are_not_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever form they lie on it."""
    packed(tmp_path / "in" / "clips", (2,))
    pack(tmp_path / "in" / "day.tar", {"film.mp4": write_video(tmp_path / "film.mp4").read_bytes()})
    mount, found = Mount(tmp_path / "in", monkeypatch), Scanner(INPUTS).scan(str(tmp_path / "in"), Seen())
    source = opened([item for item, _ in found if not item.clip], INPUTS)

    def dies(*given: Any) -> None:
        mount.dead = True
        mount.root.stat()

    monkeypatch.setattr(items, "_container", dies)
    with pytest.raises(GoneError, match="in is gone"):
        opened([item for item, _ in found if item.clip], INPUTS)
    with pytest.raises(GoneError, match="in is gone"):
        source[0]


@pytest.mark.parametrize("watch", [True, False])
def test_a_round_whose_folder_is_gone_says_how_to_go_on(
    watch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --watch by itself, and the round is given up by another process once this one has ended."""
    root, home, waits = tmp_path / "in", tmp_path / "home", list[float]()
    config = config_for(packed(root, (12,))[0])

    def gone(*given: Any) -> Any:
        if not waits:
            raise GoneError(f"{root} is gone")
        return opened(*given)

    monkeypatch.setattr(round, "opened", gone)
    monkeypatch.setattr(Session, "_wait", lambda self, seconds: waits.append(seconds))
    console, when = Console(file=io.StringIO(), width=400), Watch(12, 0, 0, idle=0)
    if watch:
        assert len(learn(home, [str(root)], config, SHARE, watch=when, console=console).rounds) == 1
        told = f"waiting: {root} is gone, and round 1 needs it; to give the round up, stop this process and run stella"
        assert f"{told} learn {home} --drop\n" in console.file.getvalue()  # type: ignore[attr-defined]
    else:
        told = f"{root} is gone; bring it back and run the same command again, or go on without this round: stella"
        with pytest.raises(StellaError, match=f"{told} learn {home} --drop"):
            learn(home, [str(root)], config, SHARE, console=console)


def test_a_call_does_not_wait_for_an_empty_folder_and_says_so(three: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    assert learn(three, [str(tmp_path)], console=console).exit_code == 0
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{tmp_path} is empty: skipped; if it should not be, mount it\nnothing new" in said and "waiting" not in said

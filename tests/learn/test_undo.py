"""Going back: rounds that are dropped or rolled back, by a process that may be killed at any moment."""

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.learning import copy, damage, quiet, state
from helpers.media_files import write_video
from helpers.small import quick, same
from rich.console import Console

from stella.data.skipped import Skipped
from stella.errors import ClipError, StellaError
from stella.files import Appended, write_json
from stella.learn import loop, page, round, undo
from stella.learn.home import Home, Plan, Settings
from stella.learn.items import Item
from stella.learn.loop import drop, learn, rollback

OPERATIONS = ("rename", "replace", "unlink", "mkdir", "rmdir", "symlink", "fsync")  # of os


class KilledError(BaseException):
    pass


@contextmanager
def dying(operation: int) -> Iterator[list[str]]:
    """Before the given file operation, and all that would clean up after it, it is as if the process were gone."""
    done: list[str] = []

    def counted(name: str, plain: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if len(done) >= operation:
            raise KilledError
        done.append(name)
        return plain(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, partial(counted, name, getattr(os, name)))
        plain = Appended.append
        patch.setattr(Appended, "append", lambda self, data: counted("append", plain, self, data))
        yield done


def item(root: Path, name: str, device: int = 0) -> Item:
    return Item(str(root), f"{name}.mp4", "", name, name, device)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Rounds 1 and 2 are in use, 3 is kept apart, and 4 was begun, as if 3 had not been kept apart; no state is real.

    One clip each, and one more in round 3 that is bad.
    """
    root = tmp_path / "in"
    root.mkdir()
    (root / "film.mp4").touch()
    there = Home(tmp_path / "home")
    for number in range(1, 5):
        clips = [item(root, f"{number}"), *([item(root, "bad")] if number == 3 else [])]
        there.round(number).write_plan(Plan(1, "", len(clips), clips, []))
        there.round(number).checkpoints.save(number, {"round": number})
        there.round(number).weights.write_text(f"{number}")
    for number in range(1, 4):
        write_json(
            there.round(number).record, {"round": number, "kept_apart": number == 3, "rounds": {}, "memory": None}
        )
    Skipped(there.round(3).skipped).add(3, ClipError("bad", "damaged file", "look"))
    there.held.mkdir()
    there.link(2)
    write_json(there.file, {"version": 1})
    return there.root


def seen(home: Path) -> list[str]:
    """The clips that are not new."""
    known, root = Home(home).seen(), home.parent / "in"
    return [name for name in ("1", "2", "3", "4", "bad") if item(root, name) in known]


def found(home: Path) -> dict[str, Any]:
    """What is in use, where rounds and states are, which clips are known, which of dropped rounds are listed as bad."""
    bad = [id for path in home.glob("dropped/*/skipped.jsonl") for id in Skipped(path).records]
    names = sorted(str(path.relative_to(home)) for path in (*home.glob("[rdu]*/*"), *home.glob("*/*/checkpoints")))
    return {
        "current": Home(home).current,
        "places": [name.partition("-")[0] + ("/checkpoints" if "checkpoints" in name else "") for name in names],
        "seen": seen(home),
        "bad": bad,
    }


def test_all_rounds_after_a_dropped_one_are_new_again(three: Path, sources: list[str], tmp_path: Path) -> None:
    """As after a kill while round 3 begins and the state of round 2 is not in use. It ends as if 2 had never been."""
    home, other = copy(three, tmp_path / "home"), copy(three, tmp_path / "other")
    (home / "current").unlink()
    Home(home).link(1)
    Home(home).round(3).record.unlink()
    console = Console(file=io.StringIO(), width=300)
    drop(home, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "round 2 is dropped: its clips count as seen, those of later rounds as new; round 1 is in use" in said
    assert [record["clips"] for record in learn(home, sources, console=quiet()).rounds] == [Home(three).plan(3).clips]
    rollback(other, 1, quiet())
    learn(other, sources[2:], console=quiet())
    assert same(state(home), state(other))


@pytest.mark.parametrize(
    ("act", "known", "moved"),
    [
        (undo.drop, ["1", "2", "3", "bad"], ["dropped/000003", "undone/000004"]),
        (lambda home: undo.rollback(home, 1), ["1"], ["undone/000002", "undone/000003", "undone/000004"]),
    ],
)
def test_a_kill_at_any_file_operation_changes_all_or_nothing(
    act: Callable[[Home], Any], known: list[str], moved: list[str], home: Path, tmp_path: Path
) -> None:
    whole, operation = copy(home, tmp_path / "whole"), 0
    act(Home(whole))
    before, after = found(home), found(whole)
    assert after["seen"] == known and [place for place in after["places"] if place[0] != "r"] == moved
    assert item(home.parent / "in", "bad").id in after["bad"] or "3" not in known
    while True:
        there = copy(home, tmp_path / f"killed-{operation}")
        with dying(operation) as done, suppress(KilledError):
            act(Home(there))
            break
        with Home(there).locked():
            if found(there) != after:
                assert found(there) == before, done
                act(Home(there))
        assert found(there) == after, done
        assert not list(there.rglob("*.tmp")) and not (there / "undo").exists()
        operation += 1
    assert found(there) == after and operation > 8


def test_a_round_whose_folder_is_gone_is_given_up_and_its_other_clips_are_new(home: Path) -> None:
    """They were not learnt. Those of a round that ended were."""
    for number in (3, 4):
        Home(home).round(number).write_plan(
            Plan(1, "", 1, [item(home.parent / "in", f"{number}")], [item(Path("/never"), "lost")])
        )
    shutil.rmtree(Home(home).round(4).root)
    ended = copy(home, home.parent / "ended")
    drop(ended, quiet())
    assert seen(ended) == ["1", "2", "3"]
    Home(home).round(3).record.unlink()
    console = Console(file=io.StringIO(), width=300)
    drop(home, console)
    assert "round 3 is dropped: a folder of it is gone, so its clips count as new; round 2" in console.file.getvalue()  # type: ignore[attr-defined]
    assert seen(home) == ["1", "2"] and [path.name[:6] for path in (home / "undone").iterdir()] == ["000003"]


def test_rounds_that_an_earlier_version_left_behind_are_new(home: Path) -> None:
    """It dropped the round before them."""
    shutil.rmtree(Home(home).round(3).root)
    with Home(home).locked():
        assert seen(home) == ["1", "2"] and [path.name[:6] for path in (home / "undone").iterdir()] == ["000004"]


def test_what_is_no_round_is_left_alone(home: Path) -> None:
    (home / "rounds" / "notes").mkdir()
    (home / "rounds" / ".DS_Store").touch()
    (home / "rounds" / "000009").touch()
    assert seen(home) == ["1", "2", "3", "4", "bad"]
    rollback(home, 1, quiet())
    assert {path.name for path in (home / "rounds").iterdir()} == {"notes", ".DS_Store", "000009", "000001"}


def test_a_round_without_its_state_is_not_accepted(home: Path) -> None:
    """An earlier version that was killed while it dropped a round left one."""
    shutil.rmtree(Home(home).round(3).checkpoints.folder)
    with pytest.raises(StellaError, match=r"state of round 3 .* is missing or damaged; throw the round away with"):
        loop.accept(home, quiet())
    assert Home(home).current == 2


def test_a_rollback_to_a_damaged_state_is_refused(home: Path) -> None:
    damage(Home(home).round(1).checkpoints.folder)
    before = sorted(home.rglob("*"))
    with pytest.raises(StellaError, match=r"the state of round 1 in .*000001.checkpoints is damaged .kept: 1.;"):
        rollback(home, 1, quiet())
    assert [path for path in sorted(home.rglob("*")) if path.name != "lock"] == before and Home(home).current == 2


@pytest.mark.parametrize("name", ["plan.json", "round.json"])
def test_a_damaged_record_names_how_to_go_back_before_it(name: str, home: Path) -> None:
    """Going back to that round, or to a later one, does not help, and is refused."""
    Home(home).link(3)
    file = Home(home).round(2).root / name
    file.write_text("{")
    remedy = rf"{name} is missing or damaged; .* or go back with stella learn {home} --rollback 1$"
    read = (Home.history,) if name == "round.json" else (Home.plans, undo.drop)
    for act in (*read, lambda there: undo.rollback(there, 2)):
        with pytest.raises(StellaError, match=remedy):
            act(Home(home))
    assert Home(home).current == 3 and not (home / "undo").exists()
    rollback(home, 1, quiet())
    assert Home(home).current == 1 and len(Home(home).history()) == 1
    Home(home).round(1).root.joinpath(name).unlink()
    with pytest.raises(StellaError, match="or start a new learner in another folder: no earlier state is kept"):
        (Home.history if name == "round.json" else Home.plans)(Home(home))


def test_a_round_in_progress_whose_files_are_damaged_says_how_to_go_on(home: Path) -> None:
    there = Home(home).next
    record, there_was = there.record, there.record.read_text()
    record.write_text("{")
    with pytest.raises(StellaError, match=r"round.json is damaged .*; delete it: the round is measured again"):
        loop.accept(home, quiet())
    record.write_text(there_was)
    there.plan.write_text("{")
    with pytest.raises(StellaError, match=rf"plan.json is missing or damaged; .* or throw .*{home} --drop"):
        Home(home).seen()
    assert undo.drop(Home(home)) == "its list of clips is damaged, so its clips count as new"
    assert seen(home) == ["1", "2"]


def test_a_folder_that_is_gone_for_good_costs_no_clip_of_another(tmp_path: Path) -> None:
    """Both were in the round that was dropped. When it is back after all, its clips are learnt too."""
    here, gone, opened = tmp_path / "here", tmp_path / "gone", round.opened
    for seed, root in enumerate((here, here, gone)):
        write_video(root / f"{seed}.mp4", seed=seed)

    def vanished(*given: Any) -> Any:
        gone.rename(tmp_path / "away")
        return opened(*given)

    home, both = tmp_path / "home", [str(here), str(gone)]
    config = quick("er", "data.source=folder", f"data.path={here}", "data.duration=0.64", "data.pixels=32")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StellaError, match="gone is gone"):
        patch.setattr(round, "opened", vanished)
        learn(home, both, config, Settings(share=0.0), console=quiet())
    drop(home, quiet())
    assert [record["learnt"] for record in learn(home, both[:1], console=quiet()).rounds] == [2]
    (tmp_path / "away").rename(gone)
    assert [record["learnt"] for record in learn(home, both, console=quiet()).rounds] == [1]


def test_a_drop_that_cannot_be_finished_is_not_begun(home: Path) -> None:
    file = Home(home).next.skipped
    file.write_text('{"no": "clip"}\n')
    with pytest.raises(StellaError, match=r"line 1 of .* lists no clip"):
        undo.drop(Home(home))
    assert not (home / "undo").exists() and Home(home).round(4).plan.exists()


@pytest.mark.parametrize("act", [drop, lambda root, console: rollback(root, 1, console)], ids=["drop", "rollback"])
def test_a_page_that_cannot_be_drawn_fails_nothing(act: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(home: Home) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(page, "write_page", full)
    said = io.StringIO()
    act(home, Console(file=said, width=200))
    assert "page.html cannot be written (No space left on device)" in said.getvalue()
    assert not Home(home).round(3).plan.exists()


def test_nothing_is_removed_from_a_folder_of_others(tmp_path: Path) -> None:
    for name in ("report.txt", "part.0a1b2c3d.tmp"):
        (tmp_path / name).write_text("x")
    with Home(tmp_path).locked():
        pass
    assert (tmp_path / "part.0a1b2c3d.tmp").exists()
    (tmp_path / "report.txt").unlink()
    (tmp_path / "part.0a1b2c3d.tmp").rename(tmp_path / "home.json.0a1b2c3d.tmp")
    with Home(tmp_path).locked():
        assert not [*tmp_path.glob("*.tmp")]


def test_a_file_in_the_place_of_the_model_is_replaced_by_what_is_in_use(home: Path) -> None:
    """Earlier versions let `Model.save` write one there, which was then loaded for ever."""
    model = home / "model.safetensors"
    for number, change in ((2, lambda: Home(home).link(2)), (1, lambda: rollback(home, 1, quiet()))):
        model.unlink(missing_ok=True)
        model.write_text("saved")
        change()
        assert model.is_symlink() and model.read_text() == f"{number}"

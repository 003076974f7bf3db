"""Going back: drops a round, rolls rounds back, and finishes what a kill left half done.

What is to be done is written down first, in HOME/undo; whoever holds the folder next after a kill does it again. Each
step may be done twice, and states are deleted last. Rounds in dropped/ count as seen, those in undone/ as new.
"""

import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from stella.data.skipped import Skipped
from stella.errors import StellaError
from stella.files import read_json, sweep, sync_folder, write_json
from stella.learn.disks import gone

if TYPE_CHECKING:
    from stella.learn.home import Home, RoundFolder

FIRST = ("lock", "held", "model", "home", "takeover", "rounds", "current")  # names of what a learner is made with


def drop(home: "Home") -> str:
    """Discard the round that is in progress or was kept apart, and all after it; returns what becomes of their clips.

    Its clips count as seen, and those of later rounds as new. If a folder of it is gone and it has not ended, nothing
    of it was learnt, and all its clips are new.
    """
    why, later = _not_seen(home.next), len(home.after(home.current)) > 1
    Skipped(home.next.skipped)  # refused here if it is damaged, before anything is changed
    _begin(home, home.current, None if why else sum(plan.clips for plan in home.plans()))
    if why:
        return f"{why}, so its clips count as new"
    return "its clips count as seen" + (", those of later rounds as new" if later else "")


def rollback(home: "Home", number: int) -> None:
    """Go back to the state after an earlier round. Later rounds move to undone/; their clips count as new."""
    if not 1 <= number < home.current:
        if home.current < 2:
            raise StellaError(f"--rollback {number}: {home.in_use} and there is none before it")
        known = f"from 1 to {home.current - 1}"
        raise StellaError(f"--rollback {number} must be a round before the one in use, {home.current}: {known}")
    kept = f"(kept: {', '.join(map(str, home.kept)) or 'none'})"
    if number not in home.kept:
        raise StellaError(f"the state of round {number} is not kept {kept}; --keep N keeps more from now on")
    state = home.round(number).checkpoints
    if not state.newest_is_intact:
        raise StellaError(
            f"the state of round {number} in {state.folder} is damaged {kept}; nothing was changed: restore it from a "
            "backup, or go back to another round"
        )
    for earlier in range(1, number + 1):
        _ = home.plan(earlier), home.record(earlier)
    _begin(home, number)


def recover(home: "Home") -> None:
    """Finish what a killed learner left half done; its folder is held."""
    if home.exists:
        home.check()
    _sweep(home)
    if not home.exists:
        return
    if (home.root / "undo").exists():
        _finish(home)
    elif home.after(home.current + 1) and not home.next.plan.exists():  # an earlier version dropped the one before them
        _begin(home, home.current)


def _sweep(home: "Home") -> None:
    """Remove the temporary files and links of killed writers; of a folder that holds something else, none."""
    if not home.exists and any(path.name.partition(".")[0] not in FIRST for path in home.root.iterdir()):
        return
    for folder in [home.root, *([home.held, *home.after(0)] if home.exists else [])]:
        if folder.is_dir():
            sweep(folder)
    for name in ("current", "model.safetensors"):
        for left in home.root.glob(f"{name}.????????.tmp"):
            if left.is_symlink():
                left.unlink()


def _begin(home: "Home", number: int, dropped: int | None = None) -> None:
    """Let round `number` be in use. All rounds after it move to undone/; but the first of them to dropped/, if the
    number of its first clip is given."""
    write_json(home.root / "undo", {"round": number, "dropped": dropped})
    _finish(home)


def _finish(home: "Home") -> None:
    """Do what HOME/undo says."""
    what = read_json(home.root / "undo")
    number, dropped = what["round"], what.get("dropped")  # earlier versions rolled back alone
    if number:
        home.link(number)
    for path in reversed(home.after(number)):
        if dropped is not None and path == home.next.root:
            _list_skips(home.next, dropped)
            _move(path, home.root / "dropped")
        else:
            _move(path, home.root / "undone")
    for folder in ("dropped", "undone"):
        for states in (home.root / folder).glob("*/checkpoints"):
            shutil.rmtree(states, ignore_errors=True)
    (home.root / "undo").unlink()
    home.forget_plans()


def _move(path: Path, to: Path) -> None:
    to.mkdir(exist_ok=True)
    path.rename(to / f"{path.name}-{uuid.uuid4().hex[:6]}")
    sync_folder(to)


def _not_seen(folder: "RoundFolder") -> str:
    """Why the clips of a round do not count as seen when it is dropped; empty if they do."""
    try:
        plan = folder.read_plan()
    except StellaError:
        return "its list of clips is damaged"
    roots = {(item.root, item.device) for item in [*plan.train, *plan.held]}
    return "a folder of it is gone" if folder.ended is None and any(gone(*root) for root in roots) else ""


def _list_skips(folder: "RoundFolder", first: int) -> None:
    """List the skipped clips of a dropped round by id: their numbers, from `first` on, are those of later clips too."""
    plan, skipped = folder.read_plan(), Skipped(folder.skipped)
    for number, item in enumerate(plan.train, first):
        if number in skipped and item.id not in skipped:
            skipped.keep(skipped.records[number] | {"id": item.id})

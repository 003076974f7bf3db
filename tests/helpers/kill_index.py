"""Kills writers of an index with SIGKILL, goes on, and compares: python kill_index.py FOLDER MOMENTS SEED

Each round changes the source folder at random (files are added, changed, renamed, removed, broken) and starts an
update, a refresh to another model, or a compaction in a child, which is killed at a random call of one of the places
below, or after a random time; then the same command is run to its end. Prints a JSON line for each round.
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.dying import child
from helpers.fake_model import FakeModel
from helpers.indexes import content
from stella import files
from stella.search import maintain, update, vectors
from stella.search.catalogue import Catalogue
from stella.search.index import Index

PLACES: dict[str, tuple[Any, str]] = {
    "before a transaction": (Catalogue, "change"),
    "vectors half written": (files.Appended, "append"),
    "in a transaction": (update.os, "fsencode"),
    "vectors written, not on the disk": (files.Appended, "sync"),
    "before files are removed": (maintain, "remove_unknown"),
    "before the switch": (maintain, "drop_models"),
    "a new shard": (vectors, "sync_folder"),
}


def change(source: Path, pick: random.Random) -> None:
    """Something happens to the folder."""
    here = sorted(path for path in source.rglob("*.mp4"))
    for number in range(pick.randrange(3, 9)):
        kind = pick.choice(("add", "add", "change", "rename", "remove", "break"))
        if kind == "add" or not here:
            folder = source / pick.choice(("cats", "dogs"))
            folder.mkdir(exist_ok=True)
            (folder / f"{pick.randrange(10**9)}.mp4").write_bytes(pick.randbytes(40 + number))
            continue
        path = here.pop(pick.randrange(len(here)))
        if kind == "rename":
            path.rename(path.with_name(f"r{pick.randrange(10**9)}.mp4"))
        elif kind == "remove":
            path.unlink()
        else:
            path.write_bytes((b"bad" if kind == "break" else b"") + pick.randbytes(50 + number))


def command(index: Path, source: Path, kind: str, version: str) -> None:
    if kind == "compact":
        Index(index).compact()
    else:
        Index(index).update(source, model=FakeModel(version, pause=0.001), refresh=kind == "refresh")


def begun(work: Callable[[], None], place: str | None, call: int) -> int:
    """A process that does the work, and kills itself at the given call of a place, if there is one."""

    def half_a_row(file: files.Appended, rows: bytes) -> None:
        file._file.write(rows[:7])

    def often_committed() -> None:
        update.COMMIT_SECONDS = 0.005
        work()

    last = half_a_row if place == "vectors half written" else None
    return child(often_committed, PLACES[place] if place else None, call, last)


def main(folder: Path, moments: int, seed: int) -> None:
    vectors.ROWS = 16
    pick, source, index = random.Random(seed), folder / "source", folder / "index"
    source.mkdir()
    version, kept = "0", 0
    for moment in range(moments):
        change(source, pick)
        kind = "update" if moment == 0 else pick.choice(("update", "update", "refresh", "compact"))
        place = list(PLACES)[moment % len(PLACES)] if moment % 3 else None
        if place == "before the switch" and moment:
            kind = "refresh"
        if kind == "refresh":
            kept += 1
        goal = str(kept)
        before = content(index) if moment else []
        pid = begun(lambda k=kind, v=goal: command(index, source, k, v), place, pick.randrange(1, 3))  # type: ignore[misc]
        if place is None:
            time.sleep(pick.uniform(0.001, 0.06))
            os.kill(pid, signal.SIGKILL)
        killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
        between = whole(index, before, kind) if (index / "catalogue.sqlite").exists() and moment else True
        command(index, source, kind, goal)
        if kind == "compact":
            command(index, source, "update", goal)
        version = goal
        fresh = folder / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        Index(fresh).update(source, model=FakeModel(version))
        same = content(fresh) == content(index)
        print(json.dumps({"where": place or "a time", "kind": kind, "killed": killed, "same": same and between}))


def whole(index: Path, before: list[Any], kind: str) -> bool:
    """Right after a kill: every window's vector is there, none twice, and a compaction has changed nothing."""
    now = content(index)
    with sqlite3.connect(index / "catalogue.sqlite") as db:
        sound = db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    return sound and len({row[:5] for row in now}) == len(now) and (kind != "compact" or now == before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

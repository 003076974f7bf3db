"""Learners that take a second: packed clips of coloured noise, a model of a few patches."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from helpers.noise import Noise
from helpers.small import quick
from stella.clip import Source
from stella.data.pack import pack
from stella.data.packed import Packed
from stella.data.views import part
from stella.learn.home import Home, Settings
from stella.learn.loop import Outcome, Watch, learn
from stella.runs.config import RunConfig

SHARE = Settings(share=0.2)


def packed(folder: Path, lengths: Sequence[int] = (20, 21, 22), first: int = 0) -> list[str]:
    """Folders of packed noise of these many clips: folder/0, folder/1, …"""
    for number, clips in enumerate(lengths, first):
        pack(Noise(number, clips), folder / str(number), pixels=32, spec_frames=64, workers=0, progress=False)
    return [str(folder / str(number)) for number in range(first, first + len(lengths))]


def config_for(path: str, *more: str, method: str = "er") -> RunConfig:
    return quick(method, "data.source=packed", f"data.path={path}", *more)


def quiet() -> Console:
    return Console(file=Path("/dev/null").open("w"))


def state(home: Path | str) -> dict[str, Any]:
    """All that must not depend on how often a learner was interrupted."""
    there = Home(home)
    found = there.round(there.current).checkpoints.load() or {}
    return {
        "trainer": found["trainer"],
        "plans": [[p.train, p.held] for p in there.plans()],
        "figures": [{k: r[k] for k in ("clips", "old", "new", "F", "rounds", "memory")} for r in there.history()],
    }


def in_rounds(home: Path, root: str, config: RunConfig, watch: bool) -> Outcome:
    """Everything below `root` in rounds of 12 clips, at once or by watching it until nothing is left."""
    when = Watch(clips=12, every=0, settle=0, scan=0.01, idle=0) if watch else None
    first = not Home(home).exists
    new = (config, SHARE) if first else (None, None)
    return learn(home, [root], *new, clips=12, watch=when, console=quiet())


def copy(home: Path, to: Path) -> Path:
    subprocess.run(["cp", "-a", str(home), str(to)], check=True)
    return to


def damage(folder: Path) -> None:
    """Overwrite four bytes of each checkpoint in a folder."""
    for path in folder.glob("*.pt"):
        data = path.read_bytes()
        path.write_bytes(data[:200] + bytes(255 - byte for byte in data[200:204]) + data[204:])


def trained_on(home: Path, sources: list[str]) -> list[tuple[str, Source]]:
    """The clips of each round, as tasks of a run."""
    tasks: list[tuple[str, Source]] = []
    for number, (source, plan) in enumerate(zip(map(Packed, sources), Home(home).plans(), strict=True), 1):
        ids = [source.origin(i).id for i in range(len(source))]
        tasks.append((f"round {number}", part(source, [ids.index(item.clip) for item in plan.train])))
    return tasks

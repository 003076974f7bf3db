"""Runs of several processes, forks of this one, killed and resumed."""

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from helpers.dying import hook
from helpers.kill import PLACES
from helpers.small import noise_tasks, quick, use_tasks
from stella.files import read_lines
from stella.runs.loop import pretrain
from stella.train.checkpoint import Checkpoints


@dataclass(frozen=True)
class End:
    """At a call of a place of `helpers.kill.PLACES`, a signal or an error."""

    place: str = "in a step, before the memory"
    call: int = 2
    by: signal.Signals | Exception = signal.SIGKILL


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def run(
    folder: Path, count: int, method: str, tasks: int, ends: dict[int, End] | None = None, *settings: str
) -> list[int]:
    """Do or resume a run with so many processes, of which rank r meets `ends[r]`. Exit statuses."""
    port, pids = free_port(), []
    for rank in range(count):
        if pid := os.fork():
            pids.append(pid)
            continue
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(count)}
        status = 70
        try:
            status = child(folder, method, tasks, (ends or {}).get(rank), settings)
        finally:  # whatever happens, no fork goes on with the tests
            os._exit(status)
    return [os.waitpid(pid, 0)[1] for pid in pids]


def child(folder: Path, method: str, tasks: int, end: End | None, settings: tuple[str, ...]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        use_tasks(patch, noise_tasks(("one", "two", "three")[:tasks]))
        calls = 0

        def reached(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if end and calls == end.call:
                if isinstance(end.by, Exception):
                    raise end.by
                os.kill(os.getpid(), end.by)

        if end:
            hook(patch, PLACES[end.place], reached)
            patch.setattr(Checkpoints, "begin", begin_and_wait)
        config = quick(method, "train.checkpoint_minutes=0", "train.patience_minutes=1", *settings)
        try:
            with (folder.parent / "output").open("a") as output:
                return 0 if pretrain(config, folder, resume=True, console=Console(file=output)).finished else 3
        except BaseException as error:
            with (folder.parent / "output").open("a") as output:
                output.write(f"{os.environ['RANK']}: {error!r}\n")
            return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 2


def begin_and_wait(self: Checkpoints, step: int, state: dict[str, Any], begin: Any = Checkpoints.begin) -> None:
    """So that an end in the next step finds this checkpoint on the disk."""
    begin(self, step, state)
    assert self._writing
    self._writing.join()


def state(folder: Path) -> dict[str, Any]:
    found = Checkpoints(folder / "checkpoints").load()
    assert found is not None
    trainer: dict[str, Any] = found["trainer"]
    return trainer


def content(folder: Path) -> dict[str, Any]:
    """What must not depend on the number of processes at all."""
    one = state(folder)
    memory = {name: one["memory"][name] for name in ("seen", "generator", "plan")}
    given = ("id", "video", "audio", "patches_a", "patches_v", "positions_a", "positions_v")  # not computed
    kept = {name: rows for name, rows in one["memory"]["rows"].items() if name in given}
    exact = {name: one[name] for name in ("counters", "stream", "generators", "device")}
    return {**exact, "memory": memory, "kept": kept}


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "step"]

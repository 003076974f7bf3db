"""Ray itself, for slow tests."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import wait_for

MARK = "STELLA_TEST"  # in the environment of all processes of a test's Ray


@contextmanager
def ray_of(mark: Path) -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    tree = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": tree, MARK: str(mark)}.items():
            patch.setenv(name, value)
        try:
            yield ray
        finally:
            ray.shutdown()


def kill_one(task: str, mark: Path) -> None:
    """Kill a process of the test's Ray that does this task, once there is one."""
    found: list[int] = []

    def look() -> bool:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                name, environment = ((process / of).read_bytes() for of in ("cmdline", "environ"))
            except OSError:  # it has ended
                continue
            if name.startswith(f"ray::{task}".encode()) and f"{MARK}={mark}".encode() in environment.split(b"\0"):
                found.append(int(process.name))
        return bool(found)

    wait_for(look)
    os.kill(found[0], signal.SIGKILL)

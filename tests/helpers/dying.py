"""Programs that kill their children with SIGKILL and compare what is left: how tests run them, and what they share."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


def killed(program: ModuleType, folder: Path, moments: int, seed: int) -> list[dict[str, Any]]:
    """Run one of them with so many kills; the JSON lines that it prints."""
    done = subprocess.run(
        [sys.executable, str(program.__file__), str(folder), str(moments), str(seed)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


Place = tuple[Any, str]  # a function: its owner and its name


def child(
    work: Callable[[], None], place: Place | None = None, call: int = 0, last: Callable[..., None] | None = None
) -> int:
    """A process that does the work; at the given call of a place, if there is one, it does `last` and kills itself."""
    if pid := os.fork():
        return pid
    torch.set_num_threads(1)  # torch makes its pool again after a fork; two threads that ask at once may get none
    calls = iter(range(1, call))

    def reached(*args: Any) -> None:
        if next(calls, None) is None:
            if last:
                last(*args)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if place:
            hook(patch, place, reached)
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)


def hook(patch: pytest.MonkeyPatch, place: Place, reached: Callable[..., None]) -> None:
    """Call `reached` with its arguments before every call of this function."""
    owner, name = place
    plain = getattr(owner, name)

    def wrapped(*args: Any, **more: Any) -> Any:
        reached(*args)
        return plain(*args, **more)

    patch.setattr(owner, name, wrapped)

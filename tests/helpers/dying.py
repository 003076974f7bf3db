"""Programs that kill their children with SIGKILL and compare what is left: how tests run them, and what they share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


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


def hook(patch: pytest.MonkeyPatch, place: tuple[Any, str], reached: Callable[[], None]) -> None:
    """Call `reached` before every call of this function of an owner."""
    owner, name = place
    plain = getattr(owner, name)

    def wrapped(*args: Any, **more: Any) -> Any:
        reached()
        return plain(*args, **more)

    patch.setattr(owner, name, wrapped)

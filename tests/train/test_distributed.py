"""Several real processes train as one does: values, gradients, weights, memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import team

from stella.methods import METHODS

TEAM = Path(team.__file__)


def differences(count: int, steps: int, cases: list[str], *more: str) -> list[dict[str, float]]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(TEAM), str(count), str(steps), ",".join(cases), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each.pop("case") for each in found] == cases
    return found


ODD = [f"{name}:{clips}" for name in ("er", "stella", "mir", "lump", "gmed") for clips in (3, 5, 7)]


@pytest.mark.parametrize(
    ("count", "steps", "cases"),
    [
        (2, 6, ["stella", "gmed", "esmer"]),
        pytest.param(2, 20, [*METHODS, *ODD], marks=pytest.mark.slow),
        pytest.param(4, 20, [*METHODS, *ODD], marks=pytest.mark.slow),
    ],
)
def test_processes_train_as_one_does(count: int, steps: int, cases: list[str]) -> None:
    """In batches that divide, that do not, and that are smaller than the processes are many."""
    for found in differences(count, steps, cases):
        assert found["losses"] < 1e-12 and found["gradients"] < 1e-12 and found["weights"] < 1e-8, found
        assert found.get("memory", 0) < 1e-3 and found.get("ids", 0) == 0, found  # columns of half precision


@pytest.mark.slow
def test_several_batches_a_step_and_slow_weights() -> None:
    for found in differences(2, 20, ["gmed", "cls_er", "stella"], "accumulate=3", "ema=0.9"):
        assert found["losses"] < 1e-12 and found["weights"] < 1e-8 and found["slow"] < 1e-8, found


def test_the_comparison_sees_a_gather_without_gradient() -> None:
    """Negative control."""
    [found] = differences(2, 2, ["er"], "--cut")
    assert found["gradients"] > 1e-3 and found["weights"] > 1e-3, found

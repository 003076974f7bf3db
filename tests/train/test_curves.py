"""The loss of every method over 36 steps, or 12 without slow tests: a refactoring must not move these curves.

    PYTHONPATH=tests python tests/train/test_curves.py        records all of them again; say so in the commit

On a GPU the fast path (bfloat16, compiled, CUDA graphs) is compared with the reference path (float32, plain code) on
the same GPU, since random numbers differ between devices.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import Noise, quick

from stella.data.stream import Stream
from stella.methods import METHODS
from stella.runs.build import build_method
from stella.runs.config import settle
from stella.train.device import runtime
from stella.train.trainer import Trainer

FILE = Path(__file__).with_name("curves.json")
RECORDED = json.loads(FILE.read_text())
STEPS = 36  # a task, and an epoch of the next
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def curve(name: str, device: str = "cpu", steps: int = STEPS, **train: Any) -> list[float]:
    """The loss of each step, through tasks, short batches and a memory that fills up."""
    config = settle(quick(name, f"train.device={device}", "model.preset=tiny", "memory.clips=20", "train.lr=3e-4"))
    config = replace(
        config, stream=replace(config.stream, batch_size=6, epochs=5), train=replace(config.train, **train)
    )
    machine = runtime(device, config.train.precision, config.train.compile)
    stream = Stream([(str(i), Noise(i, 34)) for i in range(2)], config.stream, machine.device)
    trainer = Trainer(build_method(config, machine.device), stream, config.train, machine)
    losses = []
    while len(losses) < steps and trainer.advance():
        losses.append(trainer.meter.read()["loss"])
    return losses


@pytest.mark.parametrize("steps", [12, pytest.param(STEPS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RECORDED)
def test_the_curve_is_the_recorded_one(name: str, steps: int) -> None:
    closely = 0.01 if name == "mir" else 1e-4  # rounding decides MIR's near-ties
    torch.testing.assert_close(curve(name, steps=steps), RECORDED[name][:steps], rtol=closely, atol=0)


@cuda
@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_fast_path_follows_the_reference(name: str) -> None:
    reference = curve(name, "cuda", precision="float32", compile="off", graph=False)
    fast = curve(name, "cuda", precision="bfloat16", compile="on", graph=True)
    torch.testing.assert_close(fast, reference, rtol=0.03, atol=0)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: [round(x, 6) for x in curve(name)] for name in METHODS}, indent=1) + "\n")

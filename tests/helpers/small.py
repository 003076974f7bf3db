"""Runs that take a second: clips of coloured noise, a small model of a few patches."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.noise import Noise
from stella.config import resolve
from stella.model.cav import PRESETS
from stella.runs import loop as run_module
from stella.runs.config import RunConfig
from stella.runs.training import RunResult

PRESETS["toy"] = dataclasses.replace(
    PRESETS["tiny"], dim=16, depth=2, fusion_from=1, heads=2, dec_dim=16, dec_depth=1, dec_heads=2
)
SIZES = ("model.preset=toy", "model.image_size=32", "model.spec_frames=64")
QUICK = (
    *SIZES,
    "stream.batch_size=4",
    "memory.clips=7",
    "train.lr=1e-3",
    "train.log_every=2",
    "train.device=cpu",
    "evaluate.batch=8",
)


def noise_tasks(names: Sequence[str] = ("one", "two", "three"), clips: int = 10) -> list[tuple[str, Any]]:
    return [(name, Noise(number, clips + number, name)) for number, name in enumerate(names)]


def use_tasks(
    patch: pytest.MonkeyPatch,
    train: list[tuple[str, Any]] | None = None,
    evaluate: list[tuple[str, Any]] | None = None,
) -> None:
    """Let runs train on these tasks, and evaluate on these or on noise, whatever their configuration says."""
    train = train or noise_tasks()
    evaluate = evaluate or [(name, Noise(100 + number, 12)) for number, (name, _) in enumerate(train)]
    patch.setattr(run_module, "open_tasks", lambda *_: (train, evaluate))


def quick(method: str = "stella", *more: str) -> RunConfig:
    return resolve(RunConfig, None, [f"method={method}", *QUICK, *more])


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal to the last bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def outcome(run: Path) -> dict[str, Any]:
    """All that must not depend on how often a run was interrupted: weights, memory, metrics, optimiser, generators."""
    from stella.train.checkpoint import Checkpoints

    state = Checkpoints(run / "checkpoints").load() or {}
    return {
        "metrics": (run / "metrics.jsonl").read_bytes(),
        "weights": load_file(run / "model.safetensors"),
        "state": {key: value for key, value in state.items() if key != "config"},
    }


Whole = Callable[[str], RunResult]  # the fixture `whole` of tests/runs: an undisturbed run of a method


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of this kind that a run wrote."""
    text = (run / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]

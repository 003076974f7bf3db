"""Run folders as a run writes them, with made-up figures that look like an experiment."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stella.config import to_tree
from stella.data.scenes import ScenesConfig
from stella.runs.config import RunConfig, settle
from stella.transfer.config import transfer_config

TASKS = ("task1", "task2", "task3", "task4")
KEEPS = {"finetune": 0.45, "er": 0.75, "derpp": 0.8, "stella": 0.84, "stella_plus": 0.88}  # of what was learnt


def write_run(
    path: Path,
    method: str = "stella",
    seed: int = 0,
    *,
    finished: bool = True,
    tasks: tuple[str, ...] = TASKS,
    slow: bool = False,
    **args: Any,
) -> Path:
    """Write the folder; with `slow` its evaluations have slow weights, which forget half as much."""
    path.mkdir(parents=True)
    data = ScenesConfig(tasks=tasks, eval_clips=24)
    config = to_tree(settle(RunConfig(seed=seed, method=method, args=args, data=data)))
    facts = {"commit": "0123456789abcdef", "torch": "2.11", "gpu": None, "threads": 2}
    (path / "config.json").write_text(json.dumps(config))
    (path / "environment.json").write_text(json.dumps(facts))
    _write_lines(path / "metrics.jsonl", _metrics(method, seed, finished, tasks, slow))
    _write_examples(path, tasks, method.startswith("stella"))
    speed = [{"kind": "step", "step": s, "clips_per_second": 90.0 + s, "peak_bytes": 10**9 + s} for s in range(9)]
    _write_lines(path / "speed.jsonl", speed)
    return path


def _write_examples(path: Path, tasks: tuple[str, ...], heat: bool) -> None:
    """Two queries: one finds its video at the second place, one does not."""

    def shot(task: str, **more: Any) -> dict[str, Any]:
        return {"task": task, "name": "bell", "picture": "/9j/", **more}

    found = [[shot(tasks[0], right=place == right) for place in range(3)] for right in (1, 9)]
    queries = [
        shot(tasks[i], heat=[[0.0, 0.5], [1.0, 0.2]] if heat else None, rank=rank, of=96, found=found[i])
        for i, rank in ((0, 2), (1, 17))
    ]
    (path / "examples.json").write_text(json.dumps({"queries": queries}))


def write_downstream(path: Path, task: str, model: str, value: float | None, seed: int = 0) -> Path:
    """The folder of a downstream run; unfinished without a value."""
    path.mkdir(parents=True)
    given = [f"seed={seed}", f"weights.source={model}"]
    (path / "config.json").write_text(json.dumps(to_tree(transfer_config(task, None, given))))
    facts = {"commit": "0123456789abcdef", "changed_files": 0, "gpu": None, "cores": 2, "processor": "x"}
    (path / "environment.json").write_text(json.dumps(facts))
    lines: list[dict[str, Any]] = [{"kind": "step", "step": 1}]
    if value is not None:
        end = {"kind": "end", "figure": "accuracy", "test": {"accuracy": value}, "validation": value, "best_epoch": 1}
        lines.append(end | {"ceilings": {"chance": 4.2}, "parts": [180, 20, 60]})
    _write_lines(path / "metrics.jsonl", lines)
    return path


def edit_config(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the configuration of a run that was written."""
    config = json.loads((path / "config.json").read_text())
    edit(config)
    (path / "config.json").write_text(json.dumps(config))


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def _metrics(method: str, seed: int, finished: bool, tasks: tuple[str, ...], slow: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng([seed, len(method)])
    joint, count = method == "multitask", len(tasks)
    lines = [_evaluation(method, -1, 0, tasks, rng)]
    steps = 60
    for task in range(count if finished else count - 2):
        lines.extend(_step(method, task * steps + since, since, rng) for since in range(1, steps + 1))
        if not joint or task == count - 1:
            lines.append(_evaluation(method, task, (task + 1) * steps, tasks, rng))
    if slow:
        keep = (1 + KEEPS.get(method, 1.0)) / 2
        for line in (line for line in lines if line["kind"] == "evaluation"):
            line["slow"] = _retrieval(keep, line["task"], count, rng) | {"clips": line["clips"]}
    if finished:
        end: dict[str, Any] = {"kind": "end", "step": count * steps, "A": 0.0, "F": 0.0}
        lines.append(end | {"slow": {"A": 0.0, "F": 0.0}} if slow else end)
    return lines


def _step(method: str, step: int, since: int, rng: np.random.Generator) -> dict[str, Any]:
    noise = rng.normal(0, 0.015, 5)
    parts = {
        "recon_a": 0.55 + 0.2 * np.exp(-step / 80) + noise[0],
        "recon_v": 0.62 + 0.3 * np.exp(-step / 60) + noise[1],
        "contrast": 0.2 + 0.25 * np.exp(-since / 15) + noise[2],
    }
    if method not in ("finetune", "multitask", "er"):
        parts["penalty"] = abs(0.02 + noise[3])
    if method.startswith("stella"):
        parts["avm"] = 0.4 + 0.29 * np.exp(-step / 60) + noise[4]
    return {"kind": "step", "step": step, "clips": 32 * step, "loss": sum(parts.values()), "parts": parts}


def _evaluation(method: str, task: int, step: int, tasks: tuple[str, ...], rng: np.random.Generator) -> dict[str, Any]:
    count = len(tasks)
    seen = max(0, task + 1)
    replays, matches = method not in ("finetune", "multitask"), method.startswith("stella")
    return {
        "kind": "evaluation",
        "task": task,
        "step": step,
        "tasks": list(tasks),
        "clips": [24] * count,
        **_retrieval(KEEPS.get(method, 1.0), task, count, rng),
        "memory_by_task": [2000 // seen if i < seen else 0 for i in range(count)]
        if replays and seen
        else [0] * count
        if replays
        else None,
        "memory_distinct": (1500 if seen else 0) if replays else None,
        "avm_accuracy": 50 + 8.5 * seen - seen**2 + rng.normal() if matches else None,
        "importance_ratio": (1.0 + 4 * seen + rng.gamma(2, 0.5 + seen, count)).tolist() if matches else None,
    }


def _retrieval(keep: float, task: int, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """What is measured of weights that keep the share `keep` of a task while they learn another."""
    level = np.array([4.0 if i > task else 55 * keep ** (task - i) for i in range(count)])
    recall = {
        d: {
            k: np.clip(f * level + rng.normal(0, 1.2, count), 0, 100).tolist()
            for k, f in (("1", 0.4), ("5", 1.1), ("10", 1.5))
        }
        for d in ("a2v", "v2a")
    }
    return {"recall": recall, "modality_gap": (0.5 + 0.03 * task + rng.normal(0, 0.02, count)).tolist()}

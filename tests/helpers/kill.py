"""Kills runs with SIGKILL at random moments, resumes them, and compares: python kill.py FOLDER MOMENTS SEED

First a random call of each thing in turn that a run does, so that rare ones (a checkpoint half written, a line half
written) are met as well; then every other moment is a random time. Prints a JSON line for each moment.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.dying import child, hook
from helpers.small import noise_tasks, outcome, quick, same, use_tasks
from stella import files
from stella.memory import Memory
from stella.model import weights
from stella.model.cav import CAV
from stella.runs.loop import pretrain
from stella.train import checkpoint, trainer

PLACES: dict[str, tuple[Any, str]] = {
    "in a step, before the update": (trainer, "get_total_norm"),
    "in a step, before the memory": (Memory, "add"),
    "evaluation": (CAV, "represent_v"),
    "checkpoint writing": (checkpoint._Writer, "write"),
    "checkpoint written, older ones not removed": (checkpoint.Checkpoints, "_remove_older"),
    "a line half written": (files.Lines, "write"),
    "final weights": (weights, "packed"),
}


def go(run: Path, minutes: float) -> None:
    config = quick("stella", f"train.checkpoint_minutes={minutes}")
    with (run.parent / "output").open("a") as output:
        from rich.console import Console

        assert pretrain(config, run, resume=True, console=Console(file=output)).finished


def begun(run: Path, minutes: float, place: str | None = None, call: int = 0) -> int:
    """A process that does the run, and kills itself at the given call of a place, if there is one."""

    def work() -> None:
        with pytest.MonkeyPatch.context() as patch:
            use_tasks(patch, noise_tasks(("one", "two")))
            go(run, minutes)

    def half_a_line(*_: Any) -> None:
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b'{"kind": "step", "st')

    last = half_a_line if place == "a line half written" else None
    return child(work, PLACES[place] if place else None, call, last)


def undisturbed(run: Path) -> tuple[dict[str, int], float]:
    """Do the run; how often it passed each place, and how long it took."""
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        use_tasks(patch, noise_tasks(("one", "two")))
        for place in PLACES:
            hook(patch, PLACES[place], lambda *_, place=place: counts.update([place]))  # type: ignore[misc]
        began = time.monotonic()
        go(run, minutes=10)
        return dict(counts), time.monotonic() - began


def main(root: Path, moments: int, seed: int) -> None:
    torch.set_num_threads(1)
    counts, seconds = undisturbed(root / "whole")
    expected = outcome(root / "whole")
    draw = random.Random(seed)
    places = draw.sample(list(PLACES), len(PLACES))
    for moment in range(moments):
        run = root / f"killed-{moment}"
        minutes = draw.choice([0, 0, 10])
        if moment >= len(places) and moment % 2:
            where = f"after {(wait := draw.uniform(0, 0.6 * seconds)):.3f} s"
            pid = begun(run, minutes)
            time.sleep(wait)
            os.kill(pid, signal.SIGKILL)
        else:
            place = places[moment % len(places)]
            call = draw.randint(1, counts[place])
            where = f"{place}, call {call} of at least {counts[place]}"
            pid = begun(run, minutes, place, call)
        status = os.waitpid(pid, 0)[1]
        again = os.waitpid(begun(run, minutes), 0)[1]
        found = outcome(run) if again == 0 else {}
        print(json.dumps({"where": where, "killed": status == signal.SIGKILL, "same": same(found, expected)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

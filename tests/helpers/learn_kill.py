"""Kills learners with SIGKILL at random moments, starts them again, and compares: python learn_kill.py FOLDER N SEED

Every other learner watches its folder. Each is killed twice: at a random call of one of the things that a round does,
and after a random time. Prints a JSON line for each.
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
from helpers.learning import config_for, in_rounds, packed, state
from helpers.small import same
from stella import files
from stella.learn import home, page, round
from stella.learn.home import Home
from stella.memory import Memory
from stella.model import weights
from stella.model.cav import CAV
from stella.train import checkpoint, trainer

PLACES: dict[str, tuple[Any, str]] = {
    "any file, before it is renamed": (files, "publish"),
    "in a step, before the update": (trainer, "get_total_norm"),
    "in a step, before the memory": (Memory, "add"),
    "measuring": (CAV, "represent_v"),
    "checkpoint writing": (checkpoint._Writer, "write"),
    "weights": (weights, "packed_state"),
    "before the record": (round, "write_json"),
    "before the swap": (home, "_link"),
    "after the swap": (round, "stored"),
}


def go(root: Path, there: Path, watch: bool, minutes: float) -> None:
    config = config_for(str(root / "in" / "0"), f"train.checkpoint_minutes={minutes}")
    in_rounds(there, str(root / "in"), config, watch)


def begun(root: Path, there: Path, watch: bool, minutes: float, place: str | None = None, call: int = 0) -> int:
    """A process that learns, and kills itself at the given call of a place, if there is one."""
    return child(lambda: go(root, there, watch, minutes), PLACES[place] if place else None, call)


def undisturbed(root: Path) -> tuple[dict[str, int], float]:
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for place in PLACES:
            hook(patch, PLACES[place], lambda *_, place=place: counts.update([place]))  # type: ignore[misc]
        began = time.monotonic()
        go(root, root / "whole", False, 10)
        return dict(counts), time.monotonic() - began


def main(root: Path, learners: int, seed: int) -> None:
    torch.set_num_threads(1)
    page.write_page = lambda home: home.root  # drawing takes longer than a round
    packed(root / "in", (16, 16))
    counts, seconds = undisturbed(root)
    expected, draw = state(root / "whole"), random.Random(seed)
    expected["current"] = Home(root / "whole").current
    order = draw.sample(list(PLACES), len(PLACES))
    for number in range(learners):
        there, watch, minutes = root / f"killed-{number}", bool(number % 2), draw.choice([0, 0, 10])
        place = order[number % len(order)]
        call = draw.randint(1, counts[place])
        killed = [os.waitpid(begun(root, there, watch, minutes, place, call), 0)[1] == signal.SIGKILL]
        pid = begun(root, there, watch, minutes)
        time.sleep(wait := draw.uniform(0, 0.7 * seconds))
        os.kill(pid, signal.SIGKILL)
        killed.append(os.waitpid(pid, 0)[1] == signal.SIGKILL)
        again = os.waitpid(begun(root, there, watch, minutes), 0)[1]
        found = state(there) | {"current": Home(there).current} if again == 0 else {}
        where = f"{place}, call {call} of {counts[place]}, then after {wait:.2f} s"
        print(json.dumps({"where": where, "watch": watch, "killed": killed, "same": same(found, expected)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

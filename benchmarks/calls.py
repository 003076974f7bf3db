"""Six tasks given one call after the other, unknown beforehand, against one run that knows them all: A and F.

    OMP_NUM_THREADS=1 python benchmarks/calls.py work --seeds 5 --out results/learner/calls.csv

The clips, the model, the method and its settings are the same (base-tiny, 200 scenes a task less the twentieth that is
set aside, three epochs). The seeds differ, and so the batches: with the same batches both end bit-equal
(tests/learn/test_learn.py). Both are evaluated after each task on the same 80 evaluation clips of each.
"""

import argparse
import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import stella

# isort: split
import torch
from rich.console import Console

from stella.data.pack import pack
from stella.data.packed import Packed
from stella.data.scenes import TASKS, Scenes
from stella.data.views import part
from stella.evaluate.forgetting import summary
from stella.evaluate.retrieval import embed, task_recall
from stella.experiments.recipe import run_config
from stella.learn.home import Home, Settings
from stella.learn.loop import learn
from stella.model import weights
from stella.runs import loop

EPOCHS, EVAL = 3, 80
OTHER = 100  # added to the seeds of runs; nothing was chosen on them
FIELDS = ("own_seed", "method", "given", "A", "F", "steps")


def values(method: str, seed: int) -> list[str]:
    own = [f"method={method}", f"seed={seed}", "model.weights=base-tiny", "memory.clips=100", f"stream.epochs={EPOCHS}"]
    own += ["stream.batch_size=32", "stream.augment=false", "stream.drop_last=false"]
    return [*own, "train.lr=5e-4", "train.warmup_steps=20", "train.decay=0", "train.compile=off"]


def one_run(work: Path, method: str, seed: int, home: Home, folders: list[Path]) -> dict[str, float]:
    """Over the clips that the learner trained on, as tasks that are known beforehand."""
    tasks: list[tuple[str, Any]] = []
    for task, plan, source in zip(TASKS, home.plans(), map(Packed, folders), strict=True):
        ids = [source.origin(i).id for i in range(len(source))]
        tasks.append((task, part(source, [ids.index(item.clip) for item in plan.train])))
    evaluation = [(task, Scenes(task, "eval", EVAL)) for task in TASKS]
    data = ["data.source=packed", f"data.path={folders[0]}"]
    with patch.object(loop, "open_tasks", lambda *_: (tasks, evaluation)):
        end = loop.pretrain(run_config(None, [*values(method, seed), *data]), work / f"{method}-{seed}" / "run").end
    return {"A": end["A"], "F": end["F"], "steps": end["step"]}


def six_calls(home: Home, method: str, seed: int, folders: list[Path]) -> dict[str, float]:
    for folder in folders:
        data = ["data.source=packed", f"data.path={folder}"]
        new = (None, None) if home.exists else (run_config(None, [*values(method, seed), *data]), Settings(keep=6))
        learn(home.root, [str(folder)], *new, epochs=EPOCHS, console=Console(file=sys.stderr))
    stream = replace(home.config.stream, batch_size=60, workers=0)
    found = []
    for number in range(1, len(folders) + 1):
        model = weights.load(home.round(number).weights).model.eval()
        embedded = [embed(model, Scenes(task, "eval", EVAL), stream) for task in TASKS]
        found.append({"task": number - 1, "clips": [EVAL] * len(TASKS), "recall": task_recall(embedded)})
    ends = summary(found)
    return {"A": ends["A"], "F": ends["F"], "steps": home.history()[-1]["steps"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--methods", nargs="+", default=["stella", "er"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--clips", type=int, default=200, help="of a task")
    parser.add_argument("--out", type=Path, default=Path("results/learner/calls.csv"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    folders = [given.work / "clips" / task for task in TASKS]
    inputs = weights.read_inputs("base-tiny")
    for task, folder in zip(TASKS, folders, strict=True):
        sizes = {"pixels": 96, "size": 96, "spec_frames": 256}
        pack(Scenes(task, "train", given.clips), folder, **sizes, workers=0, progress=False, inputs=inputs)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="") as file:
        table = csv.DictWriter(file, (*FIELDS, "commit", "version"))
        table.writeheader()
        for method in given.methods:
            for seed in range(given.first, given.first + given.seeds):
                home = Home(given.work / f"{method}-{seed}" / "home")
                ends = {("six calls", seed): six_calls(home, method, seed, folders)}
                ends["one run", OTHER + seed] = one_run(given.work, method, OTHER + seed, home, folders)
                for (how, own), end in ends.items():
                    figures = {"A": f"{end['A']:.2f}", "F": f"{end['F']:.2f}", "steps": end["steps"]}
                    row = {"own_seed": own, "method": method, "given": how, **figures}
                    table.writerow(row | {"commit": commit, "version": stella.__version__})
                    file.flush()


if __name__ == "__main__":
    main()

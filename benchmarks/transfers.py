"""Downstream tests and matching modules of many runs, on one GPU, as the runs finish.

    python benchmarks/transfers.py RUNS --number 0 --seconds 500       (several processes, each with another number)

RUNS/downstream is the folder of `room.py --runs` for the recipe `downstream`. A process claims one test at a time, of a
run that is finished, and stays with one task as long as it can, since it renders the clips of a task once.
`stella reproduce downstream --out RUNS` then finds the tests finished; RUNS/fading, a link to RUNS/downstream, has the
matching modules that `stella reproduce fading --out RUNS` needs.
RUNS/references has the same tests of weights that no method has trained. --only esmer,mir: the tests of these variants
alone.
"""

import argparse
import os
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from stella.data.scenes import TASKS
from stella.experiments.downstream import tests
from stella.experiments.fading import matching_test
from stella.experiments.recipe import load, runs
from stella.runs.folder import RunFolder
from stella.transfer.config import TransferConfig, transfer_config
from stella.transfer.run import transfer

REFERENCES = ("base-wide", "random:tiny")
Test = tuple[TransferConfig, Path, RunFolder | None]  # the last is the run whose weights are tested


def all_tests(folder: Path, seeds: range, only: list[str]) -> list[Test]:
    recipe, configs, here = load("downstream"), runs("downstream"), folder / "downstream"
    some = {f"original/{of}": configs[f"original/{of}"] for of in only} or configs
    found: list[Test] = [(c, to, RunFolder(to.parent)) for _, c, to in tests(recipe, some, seeds, here)]
    if only:
        return found
    for seed in seeds:
        run = here / "original" / "derpp" / f"seed-{seed}"
        own = replace(configs["original/derpp"], seed=seed)
        found += [(*matching_test(run, after, own), RunFolder(run)) for after in range(1, len(TASKS) + 1)]
        for model in REFERENCES:
            for task in recipe.transfer:
                values = [f"weights.source={model}", f"seed={seed}"]
                values += [f"data.seed={seed}"] if task == "localise" else []  # which trains nothing
                to = folder / "references" / model.replace(":", "-") / f"seed-{seed}" / task
                found.append((transfer_config(task, None, values), to, None))
    return found


def claimed(claims: Path, test: Test) -> bool:
    name = "-".join(test[1].parts[-4:])
    try:
        os.close(os.open(claims / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def work(folder: Path, seeds: range, only: list[str], number: int, seconds: float) -> None:
    began, claims = time.monotonic(), folder / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    waiting = all_tests(folder, seeds, only)
    kinds = list(dict.fromkeys(config.task for config, *_ in waiting))
    kind = kinds[number % len(kinds)]
    while waiting and time.monotonic() - began < seconds:
        ready = [test for test in waiting if test[2] is None or test[2].end is not None]
        test = next((test for test in ready if test[0].task == kind), next(iter(ready), None))
        if test is None:
            time.sleep(0.5)
            continue
        waiting.remove(test)
        if not claimed(claims, test):
            continue
        config, to, _ = test
        kind, start = config.task, time.monotonic()
        try:
            end = transfer(config, to, resume=True, console=Console(quiet=True)).end
            print(f"{to}: {end['test'][end['figure']]:.2f}, {time.monotonic() - start:.1f} s", flush=True)
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--only", default="", help="variants, with commas between them; all, and the references")
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    work(given.runs, range(given.seeds), list(filter(None, given.only.split(","))), given.number, given.seconds)

"""Many short runs on one GPU: clips are rendered once for all of them.

    python benchmarks/room.py PLAN.json OUT.jsonl --processes 12 --seconds 500 --done results/table1/results.csv
    python benchmarks/room.py --check              does it give the A and F of `pretrain`? In miniature, on a CPU

PLAN.json is a list of runs: {"label", "recipe", "set": ["method=er", "seed=100", …]}. With "shares": [0.5] the end is
also evaluated on that share of each clip's patches, at random; with "chosen": true on the patches that each of STELLA's
rules selects; with "slow": "end" slow weights are evaluated after the last task alone. With --runs FOLDER every run
leaves FOLDER/RECIPE/LABEL/seed-N as `pretrain` does, with weights if its recipe keeps them: `stella reproduce RECIPE
--out FOLDER` finds it finished. `room_plan.py` makes a plan of a recipe, `room_rows.py` adds results to a table; --done
leaves out the runs that a table has.

Processes share the clips' memory and claim runs by files in OUT.jsonl.claims; several calls may share a plan.
`room_gpu.sh` starts MPS and sets what it needs. A process can train several runs at a time, each on a CUDA stream of
its own. A run that finds no memory is tried again later. Training is the package's own `Trainer`; only the stream (the
same clips in the same order, from spectrograms made once) and the evaluation (several galleries from one embedding) are
here. An H200 takes 265 steps of `tiny` a second in twelve processes; compiled 445, after 100 s of compiling.
"""

import argparse
import csv
import gc
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import room_variants
import torch
from room_job import Clips, Gallery, Job, Run, render

from stella.experiments.recipe import run_config
from stella.runs.config import machine, settle
from stella.runs.loop import pretrain

Key = tuple[int, int, int, str]  # of a data set: clips, evaluation clips, seed, size
Shared = dict[Key, tuple[Clips, Clips]]  # to train on, to evaluate on
LEAST_EVAL = 960  # clips of galleries of other sizes
TRIES = 5  # of a run that finds no memory
PAUSE = 15.0  # seconds before it is tried again


def config_of(run: Run) -> Any:
    return settle(run_config(run["recipe"], run["set"]))


def missing(plan: list[Run], tables: list[Path]) -> list[Run]:
    """The runs of a plan that no table has."""
    rows = [row for table in tables if table.exists() for row in csv.DictReader(table.open(encoding="utf-8"))]
    done = {(row["name"], f"seed={row['seed']}") for row in rows}
    return [run for run in plan if not done & {(run["label"], value) for value in run["set"]}]


def key_of(config: Any) -> Key:
    data = config.data
    return data.clips, max(LEAST_EVAL, data.eval_clips), data.seed, data.label


def rendered(keys: set[Key], device: str) -> Shared:
    return {
        (clips, eval_clips, seed, size): (
            render("train", clips, seed, device, size),
            render("eval", eval_clips, seed, device, size),
        )
        for clips, eval_clips, seed, size in sorted(keys)
    }


def kind_of(run: Run) -> frozenset[str]:
    """What is compiled for a run. Runs of one kind differ in what comes in, and in how much memory holds."""
    other = ("seed=", "data.tasks=", "memory.bytes=", "memory.clips=")
    return frozenset(value for value in run["set"] if not value.startswith(other))


class Worker:
    """Runs of the plan until none is left or the time is over; a failed one is reported and left out."""

    def __init__(
        self,
        plan: list[Run],
        shared: Shared,
        out: Path,
        seconds: float,
        runs: Path | None,
        alike: bool = False,
        part: float = 1.0,
    ) -> None:
        self.shared, self.out, self.runs, self.end = shared, out, runs, time.monotonic() + seconds
        self.alike, self.part = alike, part
        self.waiting, self.jobs = list(enumerate(plan)), list[tuple[int, Job]]()
        self.took: dict[str, float] = {}  # seconds of the last run of each method
        self.tries: Counter[int] = Counter()
        self.made: set[frozenset[str]] = set()  # kinds of runs
        self.claims = Path(f"{out}.claims")
        self.claims.mkdir(parents=True, exist_ok=True)

    def work(self, at_a_time: int) -> None:
        while time.monotonic() < self.end:
            while len(self.jobs) < at_a_time and self.waiting:
                self._begin(*self.waiting.pop(self._next()))
            if not self.jobs and not self.waiting:
                return
            if not self._tick():
                time.sleep(0.0005)
        for _, job in self.jobs:  # out of time: another call may make them
            self._claim(job.run).unlink()

    def _next(self) -> int:
        """The first; if `alike`, one of a kind that this process has made, so that little is compiled."""
        made = self.made if self.alike else set()
        return next((at for at, (_, run) in enumerate(self.waiting) if kind_of(run) in made), 0)

    def _begin(self, number: int, run: Run) -> None:
        """Claim a run, unless another process has or too little time is left.

        Towards the end processes stop one after the other, and the rest become faster: the first needs least time.
        """
        needed = 0.9 * self.part * self.took.get(run["set"][0], min(self.took.values(), default=0.0))
        if self.end - time.monotonic() < needed:
            return
        try:
            os.close(os.open(self._claim(run), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.made.add(kind_of(run))
        try:
            config = config_of(run)
            train, evaluation = self.shared[key_of(config)]
            self.jobs.append((number, Job(run, config, train, Gallery(evaluation, config.data.eval_clips), self.runs)))
        except Exception as error:
            self._failed(number, run, error)

    def _claim(self, run: Run) -> Path:
        return self.claims / hashlib.sha256(json.dumps(run).encode()).hexdigest()

    def _tick(self) -> bool:
        """A step of every run; False if the device has enough to do."""
        results = [(number, job.run, _ticked(job)) for number, job in self.jobs]
        going = [isinstance(got, bool) for _, _, got in results]
        self.jobs = list(compress(self.jobs, going))
        for number, run, got in results:
            if isinstance(got, Exception):
                self._failed(number, run, got)
            elif isinstance(got, dict):
                with self.out.open("a") as file:
                    file.write(json.dumps(got) + "\n")
                self.took[run["set"][0]] = got["seconds"]
        return any(got for _, _, got in results)

    def _failed(self, number: int, run: Run, error: Exception) -> None:
        """Report a run, or try it again later if it found no memory."""
        self.tries[number] += 1
        if not isinstance(error, torch.OutOfMemoryError):
            traceback.print_exception(error)
            return
        if self.tries[number] == TRIES:
            traceback.print_exception(error)
            self._claim(run).unlink()
            return
        error.__traceback__ = None  # it holds the run
        gc.collect()
        torch.cuda.empty_cache()
        self._claim(run).unlink()
        self.waiting.append((number, run))
        time.sleep(PAUSE)


def _ticked(job: Job) -> Run | bool | Exception:
    try:
        return job.tick()
    except Exception as error:
        return error


def work(
    part: float,
    plan: list[Run],
    shared: Shared,
    out: Path,
    at_a_time: int,
    seconds: float,
    runs: Path | None,
    alike: bool,
) -> None:
    """In a process of its own."""
    room_variants.register()
    Worker(plan, shared, out, seconds, runs, alike, part).work(at_a_time)


def work_in_processes(
    plan: list[Run], out: Path, processes: int, at_a_time: int, seconds: float, runs: Path | None, alike: bool
) -> None:
    began = time.monotonic()
    configs = [config_of(run) for run in plan]
    shared = rendered({key_of(config) for config in configs}, str(machine(configs[0].train).device))
    print(f"{time.monotonic() - began:.0f} s until all clips were rendered", flush=True)
    context = torch.multiprocessing.get_context("spawn")
    left = seconds - (time.monotonic() - began)
    given = (plan, shared, out, at_a_time, left, runs, alike)
    workers = [context.Process(target=work, args=(n / processes, *given)) for n in range(1, processes + 1)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:  # Ctrl-C or SIGTERM: no worker outlives this process
        for worker in filter(BaseProcess.is_alive, workers):
            worker.kill()


SHUFFLED = 'data.tasks=["task4","task1","task6","task3","task2","task5"]'
CHECKED = (["derpp"], ["multitask"], ["stella_plus"], ["er", SHUFFLED], ["multitask", SHUFFLED])


def check(cases: Sequence[Sequence[str]] = CHECKED) -> None:
    """Fails if a run in miniature has not the A and F that `pretrain` gives it, with working and with slow weights."""
    small = ["train.device=cpu", "data.clips=16", "data.eval_clips=12", "stream.epochs=2", "stream.batch_size=8"]
    for method, *order in cases:
        values = [f"method={method}", "seed=100", "memory.bytes=7000000", *small, *order]
        run = {"label": method, "recipe": "room", "set": values}
        job = Job(run, config_of(run), render("train", 16, 1, "cpu"), Gallery(render("eval", 12, 1, "cpu"), 12))
        while not isinstance(got := job.tick(), dict):
            pass
        with tempfile.TemporaryDirectory() as folder:
            end = pretrain(config_of(run), Path(folder) / "run").end
        theirs = (end["A"], end["F"], end["slow"]["A"], end["slow"]["F"])
        ours = (got["A"], got["F"], got["slow_A"], got["slow_F"])
        assert ours == theirs, (method, ours, theirs)
        print(method, ours, "as pretrain has")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", nargs="?", type=Path)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--at-a-time", type=int, default=1, help="runs of a process")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="tables whose runs are left out")
    parser.add_argument("--alike", action="store_true", help="a process prefers runs of a kind that it has compiled")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    room_variants.register()
    if given.check:
        check()
    else:
        plan = missing(json.loads(given.plan.read_text()), given.done)
        print(f"{len(plan)} runs to make", flush=True)
        if plan:
            work_in_processes(plan, given.out, given.processes, given.at_a_time, given.seconds, given.runs, given.alike)

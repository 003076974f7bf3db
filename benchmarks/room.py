"""Many short runs on one GPU: each on a CUDA stream of its own, in one process; clips are rendered once for all.

    python benchmarks/room.py PLAN.json OUT.jsonl --at-a-time 4 --seconds 500      (several processes may share a plan)
    python benchmarks/room.py --check              does it give the A and F of `pretrain`? In miniature, on a CPU

PLAN.json is a list of runs: {"label", "recipe", "set": ["method=er", "seed=100", …]}. With "shares": [0.5] the end is
also evaluated on that share of each clip's patches, at random; with "slow": "end" slow weights are evaluated after the
last task alone. With --runs FOLDER every run leaves FOLDER/RECIPE/LABEL/seed-N as `pretrain` does, with weights if its
recipe keeps them: `stella reproduce RECIPE --out FOLDER` finds it finished. Processes that share a plan claim
runs by files in OUT.jsonl.claims; start the MPS daemon for them. Training is the package's own `Trainer`; only the
stream (the same clips in the same order, from spectrograms made once) and the evaluation (several galleries from one
embedding) are here. results/room was made with it: 12 runs of `tiny` with 1,800 steps take 80 s on an H200.
"""

import argparse
import json
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import room_variants
import torch
import torch.nn.functional as F
from room_record import Record
from torch import Tensor

from stella import selection
from stella.clip import Batch
from stella.data.scenes import TASKS, Scenes
from stella.evaluate.forgetting import summary
from stella.evaluate.retrieval import Embeddings, modality_gap, task_recall
from stella.experiments.recipe import run_config
from stella.files import lock
from stella.media.fbank import fbank
from stella.rng import generator
from stella.runs.build import build_method
from stella.runs.config import machine, settle
from stella.runs.loop import pretrain
from stella.train.trainer import Trainer

Run = dict[str, Any]
Clips = tuple[Tensor, Tensor]  # frames uint8 and log-mel float32 of all tasks
AHEAD = 6  # steps of a run that may wait on the device


def render(split: str, clips: int, seed: int, device: str, chunk: int = 512) -> Clips:
    """All tasks, one after the other as they are numbered."""
    videos, audios = [], []
    for task in TASKS:
        scenes = Scenes(task, split, clips, seed=seed)
        for start in range(0, clips, chunk):
            video, sound = scenes.tensors(range(start, min(start + chunk, clips)), device)
            videos.append(video)
            audios.append(fbank(sound, None, frames=256, mels=128))
    return torch.cat(videos), torch.cat(audios)


class Rendered:
    """A stream of rendered clips: `Stream`'s batches in `Stream`'s order. `tasks` are numbers of tasks in sequence."""

    def __init__(self, clips: Clips, tasks: list[int], joint: bool, config: Any) -> None:
        (self.video, self.audio), self.config, self.finished_task = clips, config, None
        total = len(self.video)
        self.rows = torch.arange(total, device=self.video.device).view(len(TASKS), -1)[tasks].flatten()  # by id
        each = total if joint else total // len(TASKS)
        self.sources = [range(first, first + each) for first in range(0, total, each)]
        self._batches = self._run()

    def _run(self) -> Iterator[tuple[Tensor, int | None]]:
        c = self.config
        for task, ids in enumerate(self.sources):
            for epoch in range(c.epochs):
                order = torch.randperm(len(ids), generator=generator(c.seed, "order", task, epoch))
                at = (order + ids.start).to(self.video.device)
                for first in range(0, len(ids), c.batch_size):
                    last = epoch == c.epochs - 1 and first + c.batch_size >= len(ids)
                    yield at[first : first + c.batch_size], task if last else None

    def __next__(self) -> Batch:
        ids, self.finished_task = next(self._batches)
        at = self.rows[ids]
        return Batch(self.video[at], self.audio[at], ids)


class Gallery:
    """Evaluation clips; `recall` with the first `main` of each task."""

    def __init__(self, clips: Clips, main: int) -> None:
        (self.video, self.audio), self.main = clips, main
        self.clips = len(self.video) // len(TASKS)

    @torch.no_grad()
    def measure(
        self, model: Any, autocast: Any, tasks: list[int], last: bool
    ) -> tuple[dict[str, Any], dict[int, list[float]], Embeddings]:
        """Recall and modality gap by task, in the order of `tasks`; after the last task also A of galleries of other
        sizes; the embeddings of the first task."""
        clips = self.clips if last else self.main
        embedded = self._embed(lambda at: self._whole(model, at), autocast, tasks, clips)

        def part(start: int, stop: int) -> list[Embeddings]:
            return [Embeddings(a[start:stop], v[start:stop], a[start:stop, 0]) for a, v in embedded]

        sizes = [size for size in (240, 480, 960) if last and size <= clips]
        other = {n: [mean(task_recall(part(i, i + n))) for i in range(0, clips - n + 1, n)] for n in sizes}
        main = part(0, self.main)
        gaps = [modality_gap(each.a, each.v) for each in main]
        found = {"clips": [self.main] * len(main), "recall": task_recall(main), "modality_gap": gaps}
        return found, other, main[0]

    @torch.no_grad()
    def of_share(self, model: Any, autocast: Any, share: float) -> float:
        """A if a random share of each clip's patches is all that the encoders see."""
        draw = generator(0, "share", device=self.video.device)
        every = list(range(len(TASKS)))
        embedded = self._embed(lambda at: self._some(model, at, share, draw), autocast, every, self.main)
        return mean(task_recall([Embeddings(a, v, a[:, 0]) for a, v in embedded]))

    def _embed(self, represent: Any, autocast: Any, tasks: list[int], clips: int) -> list[list[Tensor]]:
        embedded = []
        for first in (task * self.clips for task in tasks):
            parts = []
            for at in torch.arange(first, first + clips, device=self.video.device).split(240):
                with autocast():
                    z = represent(at)
                parts.append([F.normalize(each.float(), dim=1) for each in z])
            embedded.append([torch.cat(column) for column in zip(*parts, strict=True)])
        return embedded

    def _whole(self, model: Any, at: Tensor) -> tuple[Tensor, Tensor]:
        return model.represent_a(self.audio[at]), model.represent_v(self.video[at])

    def _some(self, model: Any, at: Tensor, share: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        kept = []
        for patches in (model.patches_a(self.audio[at]), model.patches_v(self.video[at])):
            order = selection.random_order(selection.uniform(*patches.positions.shape, generator=draw))
            kept.append(patches.take(order[:, : selection.kappa(order.shape[1], share)]))
        return model.pooled_a(kept[0]), model.pooled_v(kept[1])


def mean(recall: dict[str, Any]) -> float:
    return float(np.mean([recall[way][k] for way in recall for k in recall[way]]))


class Job:
    """One run. `tick` takes a step unless enough of them wait on the device; at the end it returns the result."""

    def __init__(self, run: Run, config: Any, clips: Clips, gallery: Gallery, runs: Path | None = None) -> None:
        self.run, self.config, self.gallery, self.began = run, config, gallery, time.monotonic()
        self.tasks = [list(TASKS).index(task) for task in config.data.tasks or TASKS]
        self.machine = machine(self.config.train)
        self.record: Record | None = None
        if runs:
            root = runs / run["recipe"] / run["label"] / f"seed-{config.seed}"
            self.record = Record(root, config, self.machine)
        self.on_gpu = self.machine.device.type == "cuda"
        self.own = torch.cuda.Stream() if self.on_gpu else None
        with self.here():
            self.method = build_method(self.config, self.machine.device)
            self.stream = Rendered(clips, self.tasks, self.method.joint, self.config.stream)
            self.trainer = Trainer(self.method, self.stream, self.config.train, self.machine)  # type: ignore[arg-type]
        self.found: dict[str, list[Run]] = {"": [], "slow_": []}
        self.galleries: Run = {}
        self.pairs: dict[str, Embeddings] = {}

    def here(self) -> Any:
        return torch.cuda.stream(self.own) if self.on_gpu else nullcontext()

    def tick(self) -> Run | bool:
        """False if the device has enough to do, True after a step, the result at the end."""
        with self.here():
            if self.on_gpu and len(self.trainer._unsettled) >= AHEAD:
                self.trainer.settle(wait=False)
                if len(self.trainer._unsettled) >= AHEAD:
                    return False
            if not self.trainer.advance():
                return self._result()
            if self.stream.finished_task is not None:
                self._evaluate(self.stream.finished_task)
            return True

    def _evaluate(self, done: int) -> None:
        self.trainer.settle()
        task = len(TASKS) - 1 if self.method.joint else done
        models, last = {"": self.method.eval_model}, task == len(TASKS) - 1
        if self.trainer.slow and (last or self.run.get("slow") != "end"):
            models["slow_"] = self.trainer.slow.model
        autocast, line = self.machine.autocast, {}
        for name, model in models.items():
            found, other, self.pairs[name] = self.gallery.measure(model, autocast, self.tasks, last)
            self.found[name].append({"task": task, **found})
            self.galleries[f"{name}galleries"] = other
            line |= {"slow": found} if name else found
            if last and (shares := self.run.get("shares")):
                self.galleries[f"{name}shares"] = [self.gallery.of_share(model, autocast, each) for each in shares]
        if self.record:
            self.record.evaluated(task, line, self.method, self.trainer.counters.step)

    def _result(self) -> Run:
        counters, memory = self.trainer.counters, self.method.memory
        row = {**self.run, "steps": counters.step, "skipped": counters.skipped}
        row |= {"capacity": memory.capacity if memory else 0, "seconds": round(time.monotonic() - self.began, 1)}
        for name, found in self.found.items():
            if found:
                row |= {f"{name}{of}": value for of, value in summary(found).items() if of in "AF"}
                row[f"{name}gaps"] = [line["modality_gap"] for line in found]
        if self.record:
            self.record.ended(self.method, counters, self.pairs[""])
        return row | self.galleries


@lru_cache(maxsize=1)
def rendered(clips: int, eval_clips: int, seed: int, device: str) -> tuple[Clips, Gallery]:
    """The clips of the last data set asked for."""
    file = Path(tempfile.gettempdir()) / f"room-{clips}-{eval_clips}-{seed}.pt"
    with lock(file.with_suffix(".lock"), wait=True):  # the first process renders for all
        if not file.exists():
            made = [render("train", clips, seed, device), render("eval", max(960, eval_clips), seed, device)]
            torch.save(made, file.with_suffix(".new"))
            file.with_suffix(".new").rename(file)
            del made
            torch.cuda.empty_cache()
    train, evaluation = torch.load(file, device, mmap=True)
    return train, Gallery(evaluation, eval_clips)


def job_of(run: Run, runs: Path | None) -> Job:
    config = config_of(run)
    data, device = config.data, str(machine(config.train).device)
    return Job(run, config, *rendered(data.clips, data.eval_clips, data.seed, device), runs)


def config_of(run: Run) -> Any:
    return settle(run_config(run["recipe"], run["set"]))


def work(plan: list[Run], out: Path, at_a_time: int, seconds: float, runs: Path | None = None) -> None:
    """Runs of the plan until none is left or the time is over; a failed one is reported and left out."""
    began, waiting, jobs = time.monotonic(), list(enumerate(plan)), []
    took: dict[str, float] = {}  # seconds of the last run of each method
    claims = Path(f"{out}.claims")
    claims.mkdir(parents=True, exist_ok=True)
    while True:
        while len(jobs) < at_a_time and waiting:
            number, run = waiting.pop(0)
            needed = 0.9 * took.get(run["set"][0], min(took.values(), default=0.0))
            if seconds - (time.monotonic() - began) < needed:
                continue
            try:
                os.close(os.open(claims / str(number), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            try:
                jobs.append(job_of(run, runs))
            except Exception:
                if not jobs and not took:  # a worker that cannot start leaves the runs to others
                    (claims / str(number)).unlink()
                    raise
                traceback.print_exc()
        if not jobs or time.monotonic() - began > seconds:
            return
        idle = True
        for job in list(jobs):
            try:
                got = job.tick()
            except Exception:
                traceback.print_exc()
                jobs.remove(job)
                continue
            idle = idle and got is False
            if isinstance(got, dict):
                with out.open("a") as file:
                    file.write(json.dumps(got) + "\n")
                took[job.run["set"][0]] = got["seconds"]
                jobs.remove(job)
        if idle:
            time.sleep(0.0005)


def check() -> None:
    """Interleaved runs against `pretrain`, one by one, in miniature."""
    small = ["train.device=cpu", "data.clips=16", "data.eval_clips=12", "stream.epochs=2", "stream.batch_size=8"]
    shuffled = 'data.tasks=["task4","task1","task6","task3","task2","task5"]'
    for method, *order in (("derpp",), ("multitask",), ("stella_plus",), ("er", shuffled), ("multitask", shuffled)):
        values = [f"method={method}", "seed=100", "memory.bytes=7000000", *small, *order]
        run = {"label": method, "recipe": "room", "set": values}
        job = Job(run, config_of(run), render("train", 16, 1, "cpu"), Gallery(render("eval", 12, 1, "cpu"), 12))
        while not isinstance(got := job.tick(), dict):
            pass
        with tempfile.TemporaryDirectory() as folder:
            end = pretrain(config_of(run), Path(folder) / "run").end
        theirs = (end["A"], end["F"], end["slow"]["A"], end["slow"]["F"])
        ours = (got["A"], got["F"], got["slow_A"], got["slow_F"])
        print(method, ours, "equal" if ours == theirs else f"but pretrain has {theirs}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", nargs="?", type=Path)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    room_variants.register()
    if given.check:
        check()
    else:
        work(json.loads(given.plan.read_text()), given.out, given.at_a_time, given.seconds, given.runs)

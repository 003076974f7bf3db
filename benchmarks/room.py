"""Many short runs on one GPU: each on a CUDA stream of its own, in one process; clips are rendered once for all.

    python benchmarks/room.py PLAN.json OUT.jsonl --at-a-time 4 --seconds 500      (several processes may share a plan)
    python benchmarks/room.py --check              does it give the A and F of `pretrain`? In miniature, on a CPU

PLAN.json is a list of runs: {"label", "recipe", "set": ["method=er", "seed=100", …]}. Processes that share a plan claim
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
from pathlib import Path
from typing import Any

import numpy as np
import room_variants
import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import Batch
from stella.data.scenes import TASKS, Scenes
from stella.evaluate.forgetting import summary
from stella.evaluate.retrieval import Embeddings, task_recall
from stella.experiments.recipe import run_config
from stella.media.fbank import fbank
from stella.rng import generator
from stella.runs.build import build_method
from stella.runs.config import machine, settle
from stella.runs.loop import pretrain
from stella.train.trainer import Trainer

Run = dict[str, Any]
AHEAD = 6  # steps of a run that may wait on the device


def render(split: str, clips: int, seed: int, device: str, chunk: int = 512) -> tuple[Tensor, Tensor]:
    """Frames uint8 and log-mel float32 of all tasks, task after task."""
    videos, audios = [], []
    for task in TASKS:
        scenes = Scenes(task, split, clips, seed=seed)
        for start in range(0, clips, chunk):
            video, sound = scenes.tensors(range(start, min(start + chunk, clips)), device)
            videos.append(video)
            audios.append(fbank(sound, None, frames=256, mels=128))
    return torch.cat(videos), torch.cat(audios)


class Rendered:
    """A stream of rendered clips: `Stream`'s batches in `Stream`'s order."""

    def __init__(self, clips: tuple[Tensor, Tensor], joint: bool, config: Any) -> None:
        (self.video, self.audio), self.config, self.finished_task = clips, config, None
        each = len(self.video) if joint else len(self.video) // len(TASKS)
        self.sources = [range(first, first + each) for first in range(0, len(self.video), each)]
        self._batches = self._run()

    def _run(self) -> Iterator[tuple[Tensor, int | None]]:
        c = self.config
        for task, rows in enumerate(self.sources):
            for epoch in range(c.epochs):
                order = torch.randperm(len(rows), generator=generator(c.seed, "order", task, epoch))
                at = (order + rows.start).to(self.video.device)
                for first in range(0, len(rows), c.batch_size):
                    last = epoch == c.epochs - 1 and first + c.batch_size >= len(rows)
                    yield at[first : first + c.batch_size], task if last else None

    def __next__(self) -> Batch:
        at, self.finished_task = next(self._batches)
        return Batch(self.video[at], self.audio[at], at)


class Gallery:
    """Evaluation clips; `recall` with the first `main` of each task, and A of other sizes at the end."""

    def __init__(self, clips: int, main: int, seed: int, device: str) -> None:
        self.clips, self.main = clips, main
        self.video, self.audio = render("eval", clips, seed, device)

    @torch.no_grad()
    def recall(self, model: Any, autocast: Any, last: bool) -> tuple[dict[str, Any], dict[int, list[float]]]:
        clips, embedded = self.clips if last else self.main, []
        for first in range(0, len(self.video), self.clips):
            parts = []
            for at in torch.arange(first, first + clips, device=self.video.device).split(240):
                with autocast():
                    z = model.represent_a(self.audio[at]), model.represent_v(self.video[at])
                parts.append([F.normalize(each.float(), dim=1) for each in z])
            embedded.append([torch.cat(column) for column in zip(*parts, strict=True)])

        def of(start: int, stop: int) -> dict[str, Any]:
            return task_recall([Embeddings(a[start:stop], v[start:stop], a[start:stop, 0]) for a, v in embedded])

        sizes = [size for size in (240, 480, 960) if last and size <= clips]
        other = {n: [mean(of(i, i + n)) for i in range(0, clips - n + 1, n)] for n in sizes}
        return of(0, self.main), other


def mean(recall: dict[str, Any]) -> float:
    return float(np.mean([recall[way][k] for way in recall for k in recall[way]]))


class Job:
    """One run. `tick` takes a step unless enough of them wait on the device; at the end it returns the result."""

    def __init__(self, run: Run, clips: tuple[Tensor, Tensor], gallery: Gallery) -> None:
        self.run, self.gallery, self.began = run, gallery, time.monotonic()
        self.config = config_of(run)
        self.machine = machine(self.config.train)
        self.on_gpu = self.machine.device.type == "cuda"
        self.own = torch.cuda.Stream() if self.on_gpu else None
        with self.here():
            self.method = build_method(self.config, self.machine.device)
            self.stream = Rendered(clips, self.method.joint, self.config.stream)
            self.trainer = Trainer(self.method, self.stream, self.config.train, self.machine)  # type: ignore[arg-type]
        self.found: dict[str, list[Run]] = {"": [], "slow_": []}
        self.galleries: Run = {}

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
        models = {"": self.method.eval_model} | ({"slow_": self.trainer.slow.model} if self.trainer.slow else {})
        for name, model in models.items():
            recall, other = self.gallery.recall(model, self.machine.autocast, task == len(TASKS) - 1)
            self.found[name].append({"task": task, "recall": recall})
            self.galleries[f"{name}galleries"] = other

    def _result(self) -> Run:
        counters, memory = self.trainer.counters, self.method.memory
        row = {**self.run, "steps": counters.step, "skipped": counters.skipped}
        row |= {"capacity": memory.capacity if memory else 0, "seconds": round(time.monotonic() - self.began, 1)}
        for name, found in self.found.items():
            if found:
                row |= {f"{name}{of}": value for of, value in summary(found).items() if of in "AF"}
        return row | self.galleries


def config_of(run: Run) -> Any:
    return settle(run_config(run["recipe"], run["set"]))


def work(plan: list[Run], out: Path, at_a_time: int, seconds: float) -> None:
    """Runs of the plan until none is left or the time is over; a failed one is reported and left out."""
    began, waiting, jobs = time.monotonic(), list(enumerate(plan)), []
    took: dict[str, float] = {}  # seconds of the last run of each method
    first = config_of(plan[0])
    device = str(machine(first.train).device)
    clips = render("train", first.data.clips, first.data.seed, device)
    gallery = Gallery(max(960, first.data.eval_clips), first.data.eval_clips, first.data.seed, device)
    torch.cuda.empty_cache()  # several processes share the GPU
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
            jobs.append(Job(run, clips, gallery))
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
    for method in ("derpp", "multitask", "stella_plus"):
        values = [f"method={method}", "seed=100", "memory.bytes=7000000", *small]
        run = {"label": method, "recipe": "room", "set": values}
        job = Job(run, render("train", 16, 1, "cpu"), Gallery(12, 12, 1, "cpu"))
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
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    room_variants.register()
    if given.check:
        check()
    else:
        work(json.loads(given.plan.read_text()), given.out, given.at_a_time, given.seconds)

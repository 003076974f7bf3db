"""One run of `room.py`: the package's own `Trainer` on clips that were rendered before."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from room_record import Record
from room_variants import RULES, rules
from torch import Tensor

from stella import selection
from stella.clip import Batch
from stella.data.scenes import TASKS, Scenes
from stella.evaluate.forgetting import summary
from stella.evaluate.retrieval import Embeddings, modality_gap, task_recall
from stella.media.fbank import fbank
from stella.model.avm import score
from stella.rng import generator
from stella.runs.build import build_method
from stella.runs.config import machine
from stella.train.trainer import Trainer

Run = dict[str, Any]
Clips = tuple[Tensor, Tensor]  # frames uint8 and log-mel float32 of all tasks
AHEAD = 6  # steps of a run that may wait on the device


def render(split: str, clips: int, seed: int, device: str, size: str = "scenes", chunk: int = 512) -> Clips:
    """All tasks, one after the other as they are numbered."""
    made: Clips | None = None
    for number, task in enumerate(TASKS):
        scenes = Scenes(task, split, clips, size=size, seed=seed)
        for start in range(0, clips, chunk):
            video, sound = scenes.tensors(range(start, min(start + chunk, clips)), device)
            audio = fbank(sound, None, frames=scenes.size.spec_frames, mels=128)
            if made is None:
                video_all, audio_all = (x.new_empty(len(TASKS) * clips, *x.shape[1:]) for x in (video, audio))
                made = video_all, audio_all
            at = slice(number * clips + start, number * clips + start + len(video))
            made[0][at], made[1][at] = video, audio
    assert made is not None
    return made


class Rendered:
    """A stream of rendered clips: `Stream`'s batches in `Stream`'s order. `tasks` are numbers of tasks in sequence."""

    def __init__(self, clips: Clips, tasks: list[int], joint: bool, config: Any) -> None:
        (self.video, self.audio), self.config, self.finished_task = clips, config, None
        every = torch.arange(len(self.video), device=self.video.device).view(len(TASKS), -1)
        self.rows = every[tasks].flatten()  # by id
        total = len(self.rows)
        each = total if joint else total // len(tasks)
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

    @torch.no_grad()
    def of_chosen(self, method: Any, model: Any, autocast: Any) -> dict[str, float]:
        """A if the encoders see the patches that are selected, as in training, by each of STELLA's rules."""
        found = {}
        for rule in RULES:
            chosen = partial(self._chosen, method, model, rule)
            embedded = self._embed(chosen, autocast, list(range(len(TASKS))), self.main)
            found[rule] = mean(task_recall([Embeddings(a, v, a[:, 0]) for a, v in embedded]))
        return found

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

    def _chosen(self, method: Any, model: Any, rule: str, at: Tensor) -> tuple[Tensor, Tensor]:
        a, v = model.patches_a(self.audio[at]), model.patches_v(self.video[at])
        drawn = method.draw(Batch(self.video[at], self.audio[at], at))
        a, v = method.select(a, v, rules(method.scores(score(model, method.avm, a, v), drawn))[rule])
        return model.pooled_a(a), model.pooled_v(v)


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
            if last and not name and self.run.get("chosen"):
                self.galleries["A_by"] = self.gallery.of_chosen(self.method, model, autocast)
            if last and (shares := self.run.get("shares")):
                of_share = partial(self.gallery.of_share, model, autocast)
                self.galleries[f"{name}A_of"] = {str(share): of_share(share) for share in shares}
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

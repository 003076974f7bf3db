"""Which patches STELLA's pruning takes: the share that each rule keeps of the sounding object's, and of the events'.

    OMP_NUM_THREADS=2 python benchmarks/pruned.py --seeds 100 101 102 --out results/room/pruned.csv

STELLA is trained in the setting of `room` on fewer clips; after each task the clips of the next one are scored against
its memory, as in the first step of that task. κ = half of the patches are kept. "object" are the video patches of the
sounding object while it sounds; of audio, the patches of the tenths with an event.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from room import config_of
from room_job import Gallery, Job, render
from room_variants import rules

from stella import selection
from stella.clip import Batch
from stella.data.downstream import sounds
from stella.data.scenes import TASKS, Scenes
from stella.evaluate.matching import regions
from stella.model.avm import score

CLIPS = 64  # scored after each task
DRAWS = 20
MODALITY = {"a": "audio", "v": "video"}
FIGURES = ("object", "rest", "mostly_gone", "never")


@torch.no_grad()
def kept(job: Job, batch: Batch, inside: dict[str, torch.Tensor]) -> dict[tuple[str, str], list[float]]:
    """For each modality and rule: the shares of the object's patches and of the others that it keeps (of "pruned":
    takes), how often it keeps less than a quarter of the object, and the share of its patches that it never keeps."""
    method = job.method
    a, v = method.model.patches_a(batch.audio), method.model.patches_v(batch.video)
    scored = score(method.model, method.avm, a, v)
    chosen = defaultdict(list)
    for _ in range(DRAWS):
        scores = method.scores(scored, method.draw(batch))
        for rule, each in rules(scores).items():
            for m, patches in zip(inside, method.select(a, v, each), strict=True):
                chosen[m, rule].append(torch.zeros_like(inside[m]).scatter(1, patches.positions, True))
        for m in inside:
            correlation = getattr(scores, f"correlation_{m}")
            noise = selection.uniform(*correlation.shape, generator=method.generators["select"])
            chosen[m, "pruned"].append(selection.prune(correlation, noise))
    return {(m, rule): shares(torch.stack(draws).float(), inside[m]) for (m, rule), draws in chosen.items()}


def shares(draws: torch.Tensor, inside: torch.Tensor) -> list[float]:
    """From [draws, B, L] and [B, L]."""
    seen = inside.any(1)
    by_clip = (draws * inside).sum(2)[:, seen] / inside.sum(1)[seen]  # [draws, clips with an object]
    often = draws.mean(0)
    found = (
        often[inside].mean(),
        often[~inside].mean(),
        (by_clip < 0.25).float().mean(),
        (often[inside] == 0).float().mean(),
    )
    return [round(each.item(), 4) for each in found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[100])
    parser.add_argument("--clips", type=int, default=640)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    small = ["train.device=cpu", f"data.clips={given.clips}", "data.eval_clips=12", f"stream.epochs={given.epochs}"]
    clips, gallery = render("train", given.clips, 1, "cpu"), Gallery(render("eval", 12, 1, "cpu"), 12)
    rows: list[dict[str, Any]] = []
    for seed in given.seeds:
        values = ["method=stella", "args.alpha=0.1", "memory.bytes=36000000", f"seed={seed}", *small]
        run = {"label": "stella", "recipe": "room", "set": values}
        job = Job(run, config_of(run), clips, gallery)
        for done in tasks_learnt(job):
            rows += [{"seed": seed, "after": done, **row} for row in measured(job, list(TASKS)[done], clips)]
            print(*rows[-10:], sep="\n", flush=True)
    with given.out.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def tasks_learnt(job: Job) -> Iterator[int]:
    """Train up to the last task; after each task, how many have been learnt."""
    while job.stream.finished_task != len(TASKS) - 2:
        job.tick()
        if job.stream.finished_task is not None:
            yield job.stream.finished_task + 1


def measured(job: Job, task: str, clips: tuple[torch.Tensor, torch.Tensor]) -> list[dict[str, Any]]:
    """The first clips of a task that is not learnt yet."""
    each, number = len(clips[0]) // len(TASKS), list(TASKS).index(task)
    at = slice(number * each, number * each + CLIPS)
    scenes, config = Scenes(task, "train", each, seed=1), job.method.model.config
    labels = [scenes.labels(i) for i in range(CLIPS)]
    steps, bands = config.grid_a
    inside = {
        "a": torch.stack([sounds(each, steps).repeat_interleave(bands) for each in labels]),  # [B, La]
        "v": torch.stack([regions(each, config)[0] for each in labels]),  # [B, Lv]
    }
    found = kept(job, Batch(clips[0][at], clips[1][at], torch.arange(CLIPS)), inside)
    return [
        {"task": task, "patches": MODALITY[m], "rule": rule, **dict(zip(FIGURES, each, strict=True))}
        for (m, rule), each in found.items()
    ]


if __name__ == "__main__":
    main()

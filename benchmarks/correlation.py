"""How much STELLA's scores tell: the spread of C among the patches that may be pruned; of each quarter of a clip's
patches, most important first, its share of importance, and the share of it that is kept.

    OMP_NUM_THREADS=2 python benchmarks/correlation.py --out results/room/correlation.csv

Development clips in the setting of `room`. First with initial weights, the clips of each task against a memory of those
of the task before it: `tiny`, `small`, and `small` at the paper's shapes. Then `tiny` after each of five tasks, trained
on fewer clips, with the memory that it then has.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pruned import MODALITY, tasks_learnt
from room import config_of
from room_job import Clips, Gallery, Job, render

from stella.clip import Batch
from stella.data.scenes import TASKS
from stella.methods.stella import STELLA
from stella.model.avm import score
from stella.runs.build import build_method

CLIPS = 64  # of a task that are scored
DRAWS = 8  # from memory
SMALL = ("model.preset=small", "model.weights=base-wide-small")
SETTINGS = {
    "tiny": (),
    "small": SMALL,
    "small, the paper's shapes": (*SMALL, "data.size=scenes-full", "model.grow=true"),
}


def config(seed: int, *values: str) -> Any:
    stella = ("method=stella", "args.alpha=0.1", f"seed={seed}", "train.device=cpu")
    return config_of({"recipe": "room", "set": [*stella, *values]})


def batch(clips: Clips, task: int) -> Batch:
    """The first clips of a task."""
    at = slice(first := task * len(clips[0]) // len(TASKS), first + CLIPS)
    return Batch(clips[0][at], clips[1][at], torch.arange(at.start, at.stop))


@torch.no_grad()
def measured(method: STELLA, now: Batch) -> Iterator[dict[str, Any]]:
    a, v = method.model.patches_a(now.audio), method.model.patches_v(now.video)
    scored = score(method.model, method.avm, a, v)
    drawn = [method.scores(scored, method.draw(now)) for _ in range(DRAWS)]
    chosen = [dict(zip("av", method.select(a, v, scores), strict=True)) for scores in drawn]
    for m, kappa in (("a", method.kappa_a), ("v", method.kappa_v)):
        ranked = getattr(drawn[0], f"importance_{m}").sort(dim=1, descending=True)
        top = ranked.indices[:, :kappa]
        c = torch.stack([getattr(scores, f"correlation_{m}").gather(1, top) for scores in drawn])  # [draws, clips, κ]
        low, high = c.flatten().quantile(torch.tensor([0.05, 0.95])).tolist()
        found = {"mean": c.mean(), "within_clip": c.std(2).mean(), "between_clips": c.mean(2).std(), "low": low}
        often = sum(torch.zeros_like(ranked.values).scatter(1, each[m].positions, 1 / DRAWS) for each in chosen)
        assert isinstance(often, torch.Tensor)
        kept = often.gather(1, ranked.indices).tensor_split(4, dim=1)
        quarters = ranked.values.tensor_split(4, dim=1)
        found |= {"high": high} | {f"importance_{n}": each.sum(1).mean() for n, each in enumerate(quarters, 1)}
        found |= {f"kept_{n}": each.mean() for n, each in enumerate(kept, 1)}
        yield {"patches": MODALITY[m], **{name: round(float(value), 4) for name, value in found.items()}}


def before_any(setting: str, values: tuple[str, ...], seed: int) -> Iterator[dict[str, Any]]:
    given = config(seed, *values)
    clips = render("train", CLIPS, given.data.seed, "cpu", given.data.label)
    for task in range(1, len(TASKS)):
        method = build_method(given, torch.device("cpu"))
        assert isinstance(method, STELLA)
        with torch.no_grad():
            past = batch(clips, task - 1)
            method.after_batch(past, method.loss(past))
        for row in measured(method, batch(clips, task)):
            yield {"model": setting, "seed": seed, "after": 0, "task": list(TASKS)[task], **row}


def after_each(clips: Clips, gallery: Gallery, seed: int, *values: str) -> Iterator[dict[str, Any]]:
    run = {"label": "stella", "recipe": "room", "set": []}
    job = Job(run, config(seed, *values), clips, gallery)
    assert isinstance(job.method, STELLA)
    for done in tasks_learnt(job):
        for row in measured(job.method, batch(clips, done)):
            yield {"model": "tiny", "seed": seed, "after": done, "task": list(TASKS)[done], **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--clips", type=int, default=640)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = []
    for setting, values in SETTINGS.items():
        rows += before_any(setting, values, given.seeds[0])
        print(*rows[-2:], sep="\n", flush=True)
    few = (f"data.clips={given.clips}", "data.eval_clips=12", "stream.epochs=2", "memory.bytes=36000000")
    clips, gallery = render("train", given.clips, 1, "cpu"), Gallery(render("eval", 12, 1, "cpu"), 12)
    for seed in given.seeds:
        rows += after_each(clips, gallery, seed, *few)
        print(*rows[-2:], sep="\n", flush=True)
    with given.out.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()

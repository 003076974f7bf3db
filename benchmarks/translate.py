"""What a translation saves: retrieval when queries are of a newer state than the vectors of an index.

    python benchmarks/translate.py work --seeds 5 --out results/learner/translate.csv

A learner (STELLA, base-tiny) takes six tasks of scenes as rounds. An index is made after the first round, of evaluation
clips of all tasks or of the first alone. After one and after five more rounds its clips are asked for by their sounds
and by their pictures, with queries of the newest state; the figure is R@10, the mean of both directions, with vectors

    stale       of the state after round 1, queries as they are
    translated  the same, queries carried into the old space (orthogonal Procrustes); fitted on the clips that the
                rehearsal memory keeps (memory), or on the clips that the learner sets aside to measure with (held out)
    old         the same, queries by the old state: what the index gave before
    fresh       of the newest state
"""

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import stella

# isort: split
import torch
from rich.console import Console
from torch import Tensor

from stella.data.pack import pack
from stella.data.packed import Packed
from stella.data.scenes import TASKS, Scenes
from stella.data.views import View, part
from stella.embed.translate import procrustes
from stella.evaluate.retrieval import Embeddings, embed, ranks, recall
from stella.experiments.recipe import run_config
from stella.learn.held import HeldOut, kept
from stella.learn.home import Home, Settings
from stella.learn.loop import learn
from stella.model import weights
from stella.model.cav import CAV

EVAL, MEMORY = 80, 100  # clips of a task, clips in the memory
PRIORS = (0.0, 0.01, 0.1, 1.0)
FIELDS = ("seed", "more_tasks", "gallery", "vectors", "fitted_on", "clips", "prior", "r10")


def packed(work: Path, split: str, clips: int) -> list[str]:
    folders = [work / split / task for task in TASKS]
    for task, folder in zip(TASKS, folders, strict=True):
        inputs = weights.read_inputs("base-tiny")
        sizes = {"pixels": 96, "size": 96, "spec_frames": 256}
        pack(Scenes(task, split, clips), folder, **sizes, workers=0, progress=False, inputs=inputs)
    return [str(folder) for folder in folders]


def learner(work: Path, seed: int, folders: list[str], epochs: int, more: list[str]) -> Home:
    """Six rounds, one call each."""
    home = Home(work / f"home-{seed}")
    for number, folder in enumerate(folders, 1):
        if home.current < number:
            values = ["method=stella", "model.weights=base-tiny", f"memory.clips={MEMORY}", "stream.batch_size=32"]
            values += ["stream.augment=false", "train.lr=5e-4", "train.warmup_steps=20", f"seed={seed}"]
            values += ["data.source=packed", f"data.path={folders[0]}", "train.compile=off", *more]
            config = None if home.exists else run_config(None, values)
            settings = None if home.exists else Settings(share=0.1, keep=len(folders))
            learn(home.root, [folder], config, settings, epochs=epochs, console=Console(file=sys.stderr))
    return home


class Both:
    """A state and what it makes of the clips."""

    def __init__(self, home: Home, number: int) -> None:
        self.model: CAV = weights.load(home.round(number).weights).model.eval()
        self.stream = replace(home.config.stream, batch_size=60, workers=0, augment=False)

    def __call__(self, source: object) -> Embeddings:
        return embed(self.model, source, self.stream)  # type: ignore[arg-type]


def in_memory(home: Home, number: int, folders: list[str]) -> list[View]:
    """The training clips that the memory keeps after a round."""
    state = home.round(number).checkpoints.load()
    assert state is not None
    ids = sorted(set(state["trainer"]["memory"]["rows"]["id"].tolist()))
    sources, first = [Packed(folder) for folder in folders], 0
    chosen: list[View] = []
    for source, plan in zip(sources, home.plans(), strict=False):
        names = {source.origin(i).id: i for i in range(len(source))}
        own = [names[plan.train[id - first].clip] for id in ids if first <= id < first + plan.clips]
        chosen += [part(source, own)] if own else []
        first += plan.clips
    return chosen


def r10(query: Embeddings, gallery: Embeddings, turn: Tensor | None = None) -> float:
    a, v = (query.a, query.v) if turn is None else (query.a @ turn, query.v @ turn)
    return (recall(ranks(a, gallery.v))[10] + recall(ranks(v, gallery.a))[10]) / 2


def stacked(parts: list[Embeddings]) -> Tensor:
    return torch.cat([torch.cat([p.a for p in parts]), torch.cat([p.v for p in parts])])


def rows(home: Home, seed: int, folders: list[str], galleries: dict[str, list[Packed]]) -> Iterator[dict[str, object]]:
    old = Both(home, 1)
    made = {name: [old(s) for s in scenes] for name, scenes in galleries.items()}
    for more in (1, 5):
        new = Both(home, 1 + more)
        memory = in_memory(home, 1 + more, folders)
        held = HeldOut(home.held, kept(home.plans()[: 1 + more], home.settings.held))
        fits: dict[str, list[Any]] = {"memory": memory, "held out": [held]}
        pairs = {name: tuple(stacked([s(each) for each in which]) for s in (new, old)) for name, which in fits.items()}
        for name, scenes in galleries.items():
            fresh, stale = _joined([new(s) for s in scenes]), _joined(made[name])
            same = {"seed": seed, "more_tasks": more, "gallery": name, "fitted_on": "", "clips": "", "prior": ""}
            yield same | {"vectors": "stale", "r10": r10(fresh, stale)}
            yield same | {"vectors": "old", "r10": r10(stale, stale)}
            yield same | {"vectors": "fresh", "r10": r10(fresh, fresh)}
            for on, (x, y) in pairs.items():
                for prior in PRIORS:
                    found = r10(fresh, stale, procrustes(x, y, prior))
                    about = {"fitted_on": on, "clips": len(x) // 2, "prior": prior}
                    yield same | {"vectors": "translated", "r10": found} | about


def _joined(parts: list[Embeddings]) -> Embeddings:
    a, v = torch.cat([p.a for p in parts]), torch.cat([p.v for p in parts])
    return Embeddings(a, v, torch.arange(len(a)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("values", nargs="*", help="KEY=VALUE over the learner's")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clips", type=int, default=200, help="of a task")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/learner/translate.csv"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    folders = packed(given.work, "train", given.clips)
    each = [Packed(folder) for folder in packed(given.work, "eval", EVAL)]
    galleries = {"first task": each[:1], "all tasks": each}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="") as file:
        table = csv.DictWriter(file, (*FIELDS, "commit", "version"))
        table.writeheader()
        for seed in range(given.seeds):
            home = learner(given.work, seed, folders, given.epochs, given.values)
            for row in rows(home, seed, folders, galleries):
                row["r10"] = f"{row['r10']:.2f}"
                table.writerow(row | {"commit": commit, "version": stella.__version__})
                file.flush()


if __name__ == "__main__":
    main()

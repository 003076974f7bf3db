"""Where the time of a learner's rounds goes: rounds of 500 packed clips, from the first scan to the page.

    OMP_NUM_THREADS=1 python benchmarks/rounds.py work --out results/learner/rounds.csv
    python benchmarks/rounds.py work stream.batch_size=48 --model base --epochs 10 --out results/learner/rounds_gpu.csv

`--model` is a weight file's name, then the clips are scenes, or a preset at the paper's sizes, then they are noise.
Training includes reading packed clips. *Decoding* is of the clips to measure with. Everything else counts as lost:
scanning, setting clips aside (they are encoded), loading, measuring before and after, copying the state, waiting until
the one before is written, the page.
The first round of a process also builds the model and, where it is compiled, compiles it.
"""

import argparse
import csv
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import stella

# isort: split
import torch
from rich.console import Console

from stella.clip import Clip
from stella.data.pack import pack
from stella.data.scenes import TASKS, Scenes
from stella.experiments.recipe import run_config
from stella.files import Line
from stella.learn import round as learning
from stella.learn.home import Home
from stella.learn.loop import Session, learn
from stella.media.inputs import Inputs
from stella.model import weights
from stella.model.cav import PRESETS

WORKERS = min(8, (os.cpu_count() or 1) - 1)  # that pack
FIELDS = (
    "round",
    "epochs",
    "clips",
    "seconds",
    "training",
    "setting aside",
    "decoding",
    "loading",
    "measuring",
    "saving",
    "rest",
    "lost",
    "lost or decoding",
)


class Noise:
    """Clips of the paper's size."""

    def __init__(self, clips: int, seed: int) -> None:
        self.clips, self.seed = clips, seed

    def __len__(self) -> int:
        return self.clips

    def __getitem__(self, index: int) -> Clip:
        noise = torch.Generator().manual_seed(self.seed * self.clips + index)
        video = torch.randint(256, (4, 3, 256, 256), generator=noise, dtype=torch.uint8)
        return Clip(f"{self.seed}-{index}", video, torch.rand(163_840, generator=noise) - 0.5)


def packed(work: Path, rounds: int, clips: int, model: str) -> list[str]:
    """One folder for each round: scenes of one task after the other, or noise."""
    inputs = Inputs() if model in PRESETS else weights.read_inputs(model)
    assert inputs is not None
    folders = []
    for number in range(rounds):
        task = TASKS[number % len(TASKS)]
        source = Noise(clips, number) if model in PRESETS else Scenes(task, "train", clips, seed=number // len(TASKS))
        folders.append(work / "clips" / f"{number:02d}-{task}")
        sizes = {"pixels": inputs.pixels, "spec_frames": inputs.spec_frames}
        sizes |= {"size": inputs.size if model in PRESETS else inputs.pixels}
        pack(source, folders[-1], **sizes, workers=WORKERS, progress=False, inputs=inputs)
    return [str(folder) for folder in folders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("values", nargs="*", help="KEY=VALUE over STELLA with this model")
    parser.add_argument("--model", default="base-tiny")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clips", type=int, default=500)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds of this process, on a machine that is shared")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folders = packed(given.work, given.rounds, given.clips, given.model)
    clock = time.process_time if given.cpu else time.monotonic
    ends = [clock()]
    done = Session._done

    def timed(self: Session, record: Line | None) -> None:
        done(self, record)
        ends.extend([clock()] if record else [])

    model = (
        [f"model.preset={given.model}", "model.weights=none"]
        if given.model in PRESETS
        else [f"model.weights={given.model}"]
    )
    values = ["method=stella", "stream.augment=false", "data.source=packed"]
    config = run_config(None, [*model, *values, f"data.path={folders[0]}", *given.values])
    home = given.work / "home"
    with patch.object(Session, "_done", timed), patch.object(learning, "time", SimpleNamespace(monotonic=clock)):
        learn(home, folders, config, epochs=given.epochs, clips=given.clips, console=Console(file=sys.stderr))
    print(f"{clock() - ends[-1]:.2f} s after the last round, for its state and the page", file=sys.stderr)
    report(Home(home), ends, "CPU time" if given.cpu else "wall", given.out)


def report(home: Home, ends: list[float], measured: str, out: Path | None) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} thread(s)"
    rows = []
    for record, wall in zip(home.history(), (b - a for a, b in pairwise(ends)), strict=True):
        parts = {name: record["seconds"].get(name, 0.0) for name in FIELDS[4:10]}
        other = 1 - parts["training"] / wall
        rest = wall - sum(parts.values())
        figures = {"seconds": wall, **parts, "rest": rest}
        about = {
            "round": record["round"],
            "epochs": record["epochs"],
            "clips": record["clips"],
            "lost": f"{100 * (other - parts['decoding'] / wall):.1f}%",
            "lost or decoding": f"{100 * other:.1f}%",
        }
        rows.append(about | {name: f"{value:.2f}" for name, value in figures.items()})
        print(rows[-1], file=sys.stderr)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", newline="") as file:
            table = csv.DictWriter(file, (*FIELDS, "clock", "device", "commit", "version"))
            table.writeheader()
            for row in rows:
                table.writerow(
                    row | {"clock": measured, "device": device, "commit": commit, "version": stella.__version__}
                )


if __name__ == "__main__":
    main()

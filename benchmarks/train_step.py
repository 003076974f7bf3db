"""A training step of several methods at the paper's sizes, on one GPU, from synthetic batches and from packed clips.

    python benchmarks/train_step.py stella:48 derpp:48 stella:9 derpp:9 stella:48:packed stella:48:score_every=2

Each argument is METHOD:BATCH with `packed`, the method's own settings or a run's (`train.activations=all`) behind it,
each a process of its own. They start together, since compiling is the processor's work, and take their times one after
the other; `--processes` limits how many are on the card at once. Rows go to results/speed/train_step.csv; what they say
is in results/speed/README.md.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from stella.bench.measure import measure
from stella.bench.rows import Row, rows_table, write_rows
from stella.bench.turns import Turn, one_after_the_other
from stella.clip import Clip
from stella.config import resolve
from stella.data.pack import pack
from stella.train.config import RunConfig
from stella.train.runtime import environment, runtime

PACKED_CLIPS = 960


class Noise:
    """Clips of the paper's size, as decoded: 4 frames of 256² and 10.24 s of sound."""

    def __len__(self) -> int:
        return PACKED_CLIPS

    def __getitem__(self, index: int) -> Clip:
        noise = torch.Generator().manual_seed(index)
        video = torch.randint(256, (4, 3, 256, 256), generator=noise, dtype=torch.uint8)
        return Clip(str(index), video, torch.rand(163_840, generator=noise) - 0.5)


def row(spec: str, preset: str, steps: int, clips: Path, alone: Turn) -> Row:
    method, batch, *more = spec.split(":")
    settings = [each if "." in each else f"args.{each}" for each in more if each != "packed"]
    base = [f"model.preset={preset}", f"method={method}", f"stream.batch_size={batch}"]
    config = resolve(RunConfig, None, [*base, *settings])
    found = measure(config, steps, clips if "packed" in more else None, alone)
    return replace(found, name=" ".join([method, *settings]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--preset", default="base")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, help="so many at a time; all fit on a large card alone")
    parser.add_argument("--out", type=Path, default=Path("results/speed/train_step.csv"))
    options = parser.parse_args()
    done = []
    with tempfile.TemporaryDirectory() as folder:
        clips = Path(folder) / "packed"
        if any("packed" in spec for spec in options.rows):
            pack(Noise(), clips, progress=False)
        jobs = {spec: (spec, options.preset, options.steps, clips) for spec in options.rows}
        for spec, found in one_after_the_other(row, jobs, options.processes or len(jobs)):
            if isinstance(found, Exception):
                print(f"{spec} failed: {found!r}", flush=True)
                continue
            print(found, flush=True)
            write_rows(options.out, [found], " ".join(["python", *sys.argv]), environment(runtime()))
            done.append(found)
    Console(width=130).print(rows_table(done))
    sys.exit(len(done) < len(options.rows))


if __name__ == "__main__":
    main()

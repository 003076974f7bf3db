"""A training step of several methods at the paper's sizes, on one GPU, from synthetic batches and from packed clips.

    python benchmarks/train_step.py stella:48 derpp:48 stella:9 derpp:9 stella:48:packed stella:48:score_every=2

Each argument is METHOD:BATCH, followed by `packed`, by the method's own settings or by those of a run
(`train.activations=all`). Each is measured in a process of its own. `--processes` of them start together, because
compiling is work for the CPU, and are timed one at a time. Rows are appended to results/speed/train_step.csv;
results/speed/README.md discusses them.
"""

import argparse
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from stella.bench.measure import measure
from stella.bench.rows import Row, check_columns, rows_table, write_rows
from stella.bench.turns import one_after_the_other
from stella.clip import Clip
from stella.config import resolve
from stella.data.pack import pack
from stella.runs.config import RunConfig, machine
from stella.runs.environment import environment

PACKED_CLIPS = 960


class Noise:
    """Decoded clips of the paper's size: 4 frames of 256² and 10.24 s of sound."""

    def __len__(self) -> int:
        return PACKED_CLIPS

    def __getitem__(self, index: int) -> Clip:
        noise = torch.Generator().manual_seed(index)
        video = torch.randint(256, (4, 3, 256, 256), generator=noise, dtype=torch.uint8)
        return Clip(str(index), video, torch.rand(163_840, generator=noise) - 0.5)


def settings(spec: str) -> list[str]:
    """The settings after METHOD:BATCH, as overrides."""
    return [each if "." in each.split("=")[0] else f"args.{each}" for each in spec.split(":")[2:] if each != "packed"]


def configured(spec: str, preset: str) -> RunConfig:
    method, batch = spec.split(":")[:2]
    base = [f"model.preset={preset}", f"method={method}", f"stream.batch_size={batch}"]
    return resolve(RunConfig, None, [*base, *settings(spec)])


def row(spec: str, config: RunConfig, steps: int, clips: Path, alone: AbstractContextManager[None]) -> Row:
    found = measure(config, steps, clips if "packed" in spec.split(":") else None, alone)
    return replace(found, name=" ".join([config.method, *settings(spec)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--preset", default="base")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--processes", type=int, default=5, help="how many start together; five of batch 48 fit in 140 GB (default: 5)"
    )
    parser.add_argument("--out", type=Path, default=Path("results/speed/train_step.csv"))
    options = parser.parse_args()
    check_columns(options.out)
    configs = {spec: configured(spec, options.preset) for spec in options.rows}
    done = []
    with tempfile.TemporaryDirectory() as folder:
        clips = Path(folder) / "packed"
        if any("packed" in spec for spec in configs):
            pack(Noise(), clips, progress=False)
        jobs = {spec: (spec, config, options.steps, clips) for spec, config in configs.items()}
        for spec, found in one_after_the_other(row, jobs, options.processes):
            if isinstance(found, Exception):
                print(f"{spec} failed: {found!r}", flush=True)
                continue
            print(found, flush=True)
            facts = environment(machine(configs[spec].train))
            write_rows(options.out, [found], " ".join(["python", *sys.argv]), facts)
            done.append(found)
    Console(width=130).print(rows_table(done, f"model {options.preset}"))
    sys.exit(len(done) < len(jobs))


if __name__ == "__main__":
    main()

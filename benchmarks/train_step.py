"""A training step of several methods at the paper's sizes, on one GPU, from synthetic batches and from packed clips.

    python benchmarks/train_step.py stella:48 derpp:48 stella:9 derpp:9 stella:48:packed stella:48:score_every=2

Each argument is METHOD:BATCH with `packed` or the method's own settings behind it, each a process of its own. They
start together, since compiling is the processor's work, and take their times one after the other. `stella bench` does
the same one by one. Rows go to results/speed/train_step.csv; what they say is in results/speed/README.md.
"""

import argparse
import fcntl
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console

from stella.bench import Row, measure, rows_table, write_rows
from stella.clip import Clip
from stella.config import resolve
from stella.data.pack import pack
from stella.data.packed import Packed
from stella.data.stream import Stream, StreamConfig
from stella.train.config import RunConfig, model_config
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


@contextmanager
def turn(folder: Path, spec: str, processes: int) -> Iterator[None]:
    """One process after the other, once all are ready (or have been waited for long enough)."""
    torch.cuda.empty_cache()
    (folder / f"ready {spec}").touch()
    began = time.monotonic()
    while len(list(folder.glob("ready *"))) < processes and time.monotonic() - began < 300:
        time.sleep(0.2)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def row(spec: str, preset: str, steps: int, folder: Path, processes: int) -> Row:
    method, batch, *more = spec.split(":")
    settings = [f"args.{each}" for each in more if each != "packed"]
    base = [f"model.preset={preset}", f"method={method}", f"stream.batch_size={batch}"]
    config = resolve(RunConfig, None, [*base, *settings])
    stream = None
    if "packed" in more:
        c = model_config(config)
        shape = StreamConfig(int(batch), epochs=1000, size=c.image_size, spec_frames=c.spec_frames, drop_last=True)
        stream = Stream([("packed", Packed(folder / "packed"))], shape, runtime().device)
    return replace(measure(config, steps, stream, turn(folder, spec, processes)), name=" ".join([method, *settings]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--preset", default="base")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("results/speed/train_step.csv"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if any("packed" in spec for spec in options.rows):
            pack(Noise(), Path(folder) / "packed", progress=False)
        with ProcessPoolExecutor(len(options.rows), get_context("spawn")) as processes:
            going = [
                processes.submit(row, spec, options.preset, options.steps, Path(folder), len(options.rows))
                for spec in options.rows
            ]
            done = []
            for spec, each in zip(options.rows, going, strict=True):
                try:
                    done.append(each.result())
                    print(done[-1], flush=True)
                    write_rows(options.out, done[-1:], " ".join(["python", *sys.argv]), environment(runtime()))
                except Exception as error:  # the other rows are worth having
                    print(f"{spec} failed: {error!r}", flush=True)
    Console(width=130).print(rows_table(done))


if __name__ == "__main__":
    main()

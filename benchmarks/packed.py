"""Clips per second from packed arrays, at the paper's size (4 frames of 256 px, 10.24 s of sound), and bare copies.

    python benchmarks/packed.py                  reading on this machine, one minute
    python benchmarks/packed.py --gpu            also to a GPU, and feeding steps that keep it busy for 80 ms

All rows read the same folder in the same order, in interleaved rounds of which the best counts. Bare copies are rows of
a numpy memmap copied one by one into one buffer. The first round fills the page cache, so this measures memory, not the
disk. Steps are matrix products: fed with one batch on the GPU they show its full rate, fed by the augmenting stream the
share of it that remains (goal 0.95). PyTorch raises an error if the stream synchronises the host anywhere.
"""

import argparse
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from stella.clip import Batch
from stella.data.packed import FRAMES, HEADER, LENGTHS, VERSION, WAVEFORMS, Header, Packed
from stella.data.stream import Stream, StreamConfig
from stella.media.fbank import LENGTH, SHIFT

BATCH, GOAL = 32, 400  # clips, clips a second
SAMPLES = LENGTH + SHIFT * 1023


def write(root: Path, clips: int) -> None:
    """Noise, as `stella pack` would store it."""
    rng = np.random.default_rng(0)
    names = [str(index) for index in range(clips)]
    header = Header(VERSION, 224, 1024, [4, 3, 256, 256], SAMPLES, 1, names, [None] * clips, [None] * clips)
    tail = np.array(SAMPLES, "<i8").tobytes()
    with (root / FRAMES).open("wb") as frames, (root / WAVEFORMS).open("wb") as sound:
        for _ in range(clips):
            picture = rng.integers(0, 256, header.frames, dtype=np.uint8).tobytes()
            wave = rng.integers(-(2**15), 2**15, SAMPLES, dtype=np.int16).tobytes()
            frames.write(picture)
            sound.write(wave)
            header.frames_crc32.append(zlib.crc32(picture))
            header.sound_crc32.append(zlib.crc32(wave + tail))
    (root / HEADER).write_text(json.dumps(asdict(header)))
    (root / LENGTHS).write_bytes(np.full(clips, SAMPLES, "<i8").tobytes())


def bare(source: Packed, order: list[list[int]]) -> None:
    both = (source._frames, source._waveforms)
    arrays = [np.memmap(rows.path, rows.dtype, "r", shape=(len(source), *rows.shape)) for rows in both]
    into = [np.empty((BATCH, *array.shape[1:]), array.dtype) for array in arrays]
    for rows in order:
        for array, buffer in zip(arrays, into, strict=True):
            for position, row in enumerate(rows):
                buffer[position] = array[row]


def read(source: Packed, order: list[list[int]], device: str) -> None:
    source.expect(order[0], device)
    for rows, following in zip(order, [*order[1:], order[0]], strict=True):
        source.expect(following, device)
        source.tensors(rows, device)
    if device != "cpu":
        torch.cuda.synchronize()


def drain(stream: Stream, batches: int) -> None:
    for _ in range(batches):
        next(stream)
    torch.cuda.synchronize()


class Steps:
    """Matrix products that take as long as a batch at 400 clips/s."""

    def __init__(self) -> None:
        self.weights = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.products = 8
        took = min(self._timed() for _ in range(5))
        self.products = round(8 * BATCH / GOAL / took)

    def _timed(self) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def step(self) -> None:
        for _ in range(self.products):
            self.weights @ self.weights

    def fed(self, batches: Iterator[Batch], count: int) -> None:
        for number in range(count):
            if number == 2:  # constants and pinned memory are allocated
                torch.cuda.set_sync_debug_mode("error")
            (next(batches).video[..., 0] + 1).sum()
            self.step()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def augmented(source: Packed, device: str) -> Stream:
    return Stream({"packed": source}, StreamConfig(BATCH, epochs=100, drop_last=True), device)


def same_everywhere(source: Packed) -> None:
    """Assert that batches on GPU and CPU agree up to the rounding of crops and filterbanks."""
    ours, theirs = next(augmented(source, "cuda")).to("cpu"), next(augmented(source, "cpu"))
    torch.cuda.synchronize()
    assert (ours.video.int() - theirs.video.int()).abs().max() <= 1
    assert (ours.audio - theirs.audio).abs().max() < 1e-2 and torch.equal(ours.ids, theirs.ids)


def best(rows: dict[str, Callable[[], None]], clips: int, rounds: int) -> dict[str, float]:
    rates = dict.fromkeys(rows, 0.0)
    for _ in range(rounds):
        for name, row in rows.items():
            began = time.perf_counter()
            row()
            rates[name] = max(rates[name], clips / (time.perf_counter() - began))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        write(Path(root), arguments.clips)
        source = Packed(root)
        mixed = np.random.default_rng(1).permutation(arguments.clips)
        once = [rows.tolist() for rows in np.split(mixed, range(BATCH, len(mixed), BATCH)) if len(rows) == BATCH]
        order = 5 * once  # long enough for the start not to matter
        rows: dict[str, Callable[[], None]] = {
            "bare memmap copies": lambda: bare(source, order),
            "packed, to the CPU": lambda: read(source, order, "cpu"),
        }
        if arguments.gpu:
            same_everywhere(source)
            steps, still = Steps(), next(augmented(source, "cuda"))
            rows |= {
                "packed, to the GPU": lambda: read(source, order, "cuda"),
                "augmented stream on the GPU": lambda: drain(augmented(source, "cuda"), len(order)),
                "steps, one batch on the GPU": lambda: steps.fed(repeat(still), len(order)),
                "steps, fed by the stream": lambda: steps.fed(augmented(source, "cuda"), len(order)),
            }
        rates = best(rows, len(order) * BATCH, arguments.rounds)
    table = Table("row", "clips/s", "of bare copies", title=f"Packed clips, batches of {BATCH} (goal {GOAL} clips/s)")
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.0f}", f"{rate / rates['bare memmap copies']:.2f}")
    Console().print(table)
    if arguments.gpu:
        share = rates["steps, fed by the stream"] / rates["steps, one batch on the GPU"]
        Console().print(f"fed by the stream, steps run at {share:.3f} of their rate on one batch (goal 0.95)")


if __name__ == "__main__":
    main()

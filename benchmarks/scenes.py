"""Clips per second of rendered scenes, on one core and on a GPU if there is one.

    python benchmarks/scenes.py

The goal is 60 clips/s on one core at 96 px. The CPU row measures CPU time, so that other processes do not matter; the
GPU row measures wall-clock time.
"""

import time

import torch
from rich.console import Console
from rich.table import Table

from stella.data.scenes import SIZES, Scenes


def main() -> None:
    torch.set_num_threads(1)
    table = Table("size", "device", "clips/s", title="Rendering scenes")
    for size in SIZES:
        count = 256 if SIZES[size].pixels < 100 else 24
        scenes = Scenes("task1", "train", count, size=size)
        scenes.tensors(range(8))
        began = time.process_time()
        scenes.tensors(range(count))
        table.add_row(size, "one core", f"{count / (time.process_time() - began):.0f}")
        if torch.cuda.is_available():
            scenes = Scenes("task1", "train", 2048, size=size)
            scenes.tensors(range(512), "cuda")
            torch.cuda.synchronize()
            began = time.perf_counter()
            scenes.tensors(range(2048), "cuda")
            torch.cuda.synchronize()
            table.add_row(size, torch.cuda.get_device_name(), f"{2048 / (time.perf_counter() - began):.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()

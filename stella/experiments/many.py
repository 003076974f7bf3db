"""Many runs, one after the other or side by side in processes of their own."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path

import torch
from rich.console import Console

from stella.runs.config import RunConfig
from stella.runs.folder import RunFolder
from stella.runs.loop import RunResult, pretrain


def train_all(
    configs: Mapping[str, RunConfig], seeds: Sequence[int], folder: Path, console: Console, processes: int = 1
) -> int:
    """Each configuration with each seed in `folder/NAME/seed-N`, seed by seed; what is finished is not done again.

    Returns the exit code: 128 + signal where one stopped it.
    """
    runs = {
        f"{name}, seed {seed}": (replace(config, seed=seed), folder / name / f"seed-{seed}")
        for seed in seeds
        for name, config in configs.items()
    }
    if processes > 1:
        return _side_by_side(runs, processes, console)
    for name, (config, run) in runs.items():
        console.print(name, style="dim", highlight=False)
        result = _one(config, run, console)
        if result.exit_code:
            return result.exit_code
    return 0


def _side_by_side(runs: Mapping[str, tuple[RunConfig, Path]], processes: int, console: Console) -> int:
    threads = max(1, (os.cpu_count() or 1) // processes)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool, _sigterm_passed_on():
        going = {pool.submit(_quietly, config, run, threads): name for name, (config, run) in runs.items()}
        try:
            for number, done in enumerate(as_completed(going), 1):
                result = done.result()
                if result.exit_code:
                    return result.exit_code
                figures = ", ".join(f"{key} {result.end[key]:.1f}" for key in "AF" if result.end[key] is not None)
                console.print(f"{number} of {len(going)}: {going[done]}: {figures}", highlight=False)
        finally:
            pool.shutdown(cancel_futures=True)  # an error or a stop in one ends those that have not begun
    return 0


@contextmanager
def _sigterm_passed_on() -> Iterator[None]:
    """A SIGTERM for this process reaches its children, which save and stop. (A terminal's Ctrl-C does anyway.)"""
    if threading.current_thread() is not threading.main_thread():  # others may not set handlers
        yield
        return

    def pass_on(*_: object) -> None:
        for child in active_children():
            child.terminate()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quietly(config: RunConfig, run: Path, threads: int) -> RunResult:
    torch.set_num_threads(threads)
    return _one(config, run, Console(quiet=True))


def _one(config: RunConfig, run: Path, console: Console) -> RunResult:
    result = pretrain(config, run, resume=True, console=console)
    if result.finished:
        shutil.rmtree(RunFolder(run).checkpoints, ignore_errors=True)
    return result

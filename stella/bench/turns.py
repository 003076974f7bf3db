"""Processes that start together, because compiling is work for the CPU, and measure one at a time."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from stella.bench.steps import let_go
from stella.files import lock

T = TypeVar("T")


def one_after_the_other(
    function: Callable[..., T], jobs: Mapping[str, tuple[Any, ...]], processes: int
) -> Iterator[tuple[str, T | Exception]]:
    """`function(*job, alone=turn)` of each job in a fresh process; yields its result or its error.

    `processes` of them start together; each measures inside its `turn`.
    """
    names = list(jobs)
    for start in range(0, len(names), processes):
        group = names[start : start + processes]
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(len(group), get_context("spawn")) as pool:
            ready = [Path(folder) / f"ready {number}" for number in range(len(group))]
            running = {name: pool.submit(_job, function, jobs[name], ready, i) for i, name in enumerate(group)}
            for name, each in running.items():
                try:
                    yield name, each.result()
                except Exception as error:  # the other rows are still worth having
                    yield name, error


def _job(function: Callable[..., T], job: tuple[Any, ...], ready: Sequence[Path], own: int) -> T:
    @contextmanager
    def turn() -> Iterator[None]:
        """Inside, this process is alone; it gets there when all of its group are ready or have failed."""
        let_go()
        ready[own].touch()
        while not all(path.exists() for path in ready):
            time.sleep(0.1)
        with lock(ready[0].with_name("lock"), wait=True):
            yield

    try:
        return function(*job, alone=turn())
    finally:
        ready[own].touch()  # a failed process keeps no other waiting

"""Processes that start together, because compiling is work for the CPU, and measure one at a time."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from stella.bench.steps import let_go
from stella.files import lock

T = TypeVar("T")


class Turn:
    """Inside `with turn:` a process is alone; it gets there when all of its group are ready or have failed."""

    def __init__(self, folder: Path, name: str, processes: int) -> None:
        self.folder, self.name, self.processes = folder, name, processes

    def ready(self) -> None:
        (self.folder / f"ready {self.name}").touch()

    def __enter__(self) -> None:
        let_go()
        self.ready()
        while len(list(self.folder.glob("ready *"))) < self.processes:
            time.sleep(0.1)
        self._lock = lock(self.folder / "lock", wait=True)
        self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__(None, None, None)


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
            turns = {name: Turn(Path(folder), str(number), len(group)) for number, name in enumerate(group)}
            running = {name: pool.submit(_job, function, jobs[name], turns[name]) for name in group}
            for name, each in running.items():
                try:
                    yield name, each.result()
                except Exception as error:  # the other rows are still worth having
                    yield name, error


def _job(function: Callable[..., T], job: tuple[Any, ...], turn: Turn) -> T:
    try:
        return function(*job, alone=turn)
    finally:
        turn.ready()  # a failed process keeps no other waiting

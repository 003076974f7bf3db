"""Processes that start together, because compiling is work for the CPU, and measure one at a time."""

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from stella.bench.steps import let_go
from stella.data.workers import die_with_parent
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
        with (
            _answered(signal.SIGTERM, _end),
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(len(group), get_context("spawn")) as pool,
        ):
            ready = [Path(folder) / f"ready {number}" for number in range(len(group))]
            others = set(active_children())
            with _answered(signal.SIGINT, signal.SIG_IGN):  # this process ends them
                running = {name: pool.submit(_job, function, jobs[name], ready, i) for i, name in enumerate(group)}
            try:
                for name, each in running.items():
                    try:
                        found: T | Exception = each.result()
                    except Exception as error:  # the other rows are still worth having
                        found = error
                    yield name, found
            except BaseException:  # a stop does not wait for what is being measured
                for process in set(active_children()) - others:
                    process.kill()
                raise


def _end(number: int, _: FrameType | None) -> NoReturn:
    """End as by Ctrl-C: with the processes that were begun, and without leaving their semaphores."""
    raise SystemExit(128 + number)


@contextmanager
def _answered(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Inside, this handler answers the signal. Processes that begin there ignore it if their parent does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


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

    threading.Thread(target=die_with_parent, daemon=True).start()
    try:
        return function(*job, alone=turn())
    finally:
        ready[own].touch()  # a failed process keeps no other waiting

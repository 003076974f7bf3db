"""Runs in processes of their own, several at a time."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Job], Result], jobs: Sequence[Job], processes: int
) -> Generator[tuple[Job, Result], None, None]:
    """Each job with what `work` makes of it, as they end. When the caller stops, no other job is started.

    SIGTERM goes on to the processes, which save a checkpoint and stop. (Ctrl-C reaches them by itself.)
    """
    threads = max(1, (os.cpu_count() or 1) // processes)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool, _sigterm_forwarded():
        running = [pool.submit(_with_threads, threads, work, job) for job in jobs]
        try:
            for done in as_completed(running):
                yield jobs[running.index(done)], done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _with_threads(threads: int, work: Callable[[Job], Result], job: Job) -> Result:
    torch.set_num_threads(threads)
    return work(job)


@contextmanager
def _sigterm_forwarded() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # other threads may not set handlers
        yield
        return

    def forward(*_: object) -> None:
        for child in active_children():
            child.terminate()

    before = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

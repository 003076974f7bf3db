"""Worker processes that may hang or die without taking the run with them; `prepare` and `stream` share them.

A `task(job, tick)` is run in each worker. It calls `tick(item)` when it begins an item that might hang, and `tick(-1)`
when it is past such items. A worker that spends longer than the time limit on one item is killed; one that dies is
replaced. Either way the job it was busy with comes back as `Lost`, for the caller to decide on, and the jobs queued
behind it are sent again.
"""

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

import torch
import torch.multiprocessing  # registers the pickling of tensors through shared memory

from stella.errors import StellaError

Tick = Callable[[int], None]
Task = Callable[[Any, Tick], Any]

# A fork server imports torch once, so that a replacement for a killed worker starts in milliseconds; a plain fork would
# copy the parent's threads and GPU state.
START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@dataclass(frozen=True)
class Done:
    key: int
    result: Any


@dataclass(frozen=True)
class Lost:
    """A job whose worker was killed for hanging on `item`, or died at it (-1: at none)."""

    key: int
    item: int
    hung: bool
    exitcode: int | None


class Pool:
    """`workers` processes, each with a queue of at most `depth` jobs."""

    def __init__(self, task: Task, workers: int, depth: int, time_limit: float) -> None:
        context = multiprocessing.get_context(START_METHOD)
        if START_METHOD == "forkserver":
            context.set_forkserver_preload(["stella.data.workers"])
        self.depth, self.time_limit = depth, time_limit
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(_Worker(context, task))

    @property
    def free(self) -> int:
        """How many jobs can be submitted now."""
        return sum(self.depth - len(worker.jobs) for worker in self._workers)

    @property
    def busy(self) -> bool:
        return any(worker.jobs for worker in self._workers)

    def submit(self, key: int, job: object) -> None:
        """Queue a job with the least busy worker. Its key comes back with its result."""
        min(self._workers, key=lambda worker: len(worker.jobs)).submit(key, job)

    def wait(self) -> Done | Lost:
        """The next job to end, in whatever order. A failure inside a task is raised here."""
        while True:
            handles = [handle for worker in self._workers for handle in (worker.pipe, worker.process.sentinel)]
            ready = connection.wait(handles, timeout=min(0.5, self.time_limit / 4))
            for position, worker in enumerate(self._workers):
                if event := self._poll(position, worker, worker.pipe in ready, worker.process.sentinel in ready):
                    return event

    def _poll(self, position: int, worker: "_Worker", speaks: bool, ended: bool) -> Done | Lost | None:
        if speaks:  # even if it ended since: its last words count
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):  # also when it died before handing over its shared memory
                return self._replace(position, worker, hung=False)
            return worker.take(message)
        if ended:
            return self._replace(position, worker, hung=False)
        status = worker.status()
        if status.item >= 0 and time.monotonic() - status.since > self.time_limit:
            return self._replace(position, worker, hung=True, seen=status)
        return None

    def _replace(self, position: int, worker: "_Worker", hung: bool, seen: "_Status | None" = None) -> Lost | None:
        """`seen` is what a hung worker was found at: it may have moved on before it was killed."""
        worker.stop()
        exitcode = worker.process.exitcode
        if not worker.started:
            raise StellaError(
                f"a worker process could not start (exit status {exitcode}, see its message above); "
                'guard the main script with `if __name__ == "__main__":`, or use workers=0'
            )
        fresh = self._workers[position] = _Worker(worker.context, worker.task)
        status, jobs = seen or worker.status(), worker.jobs
        blamed = status.key if status.key in jobs else next(iter(jobs), None)  # results may be lost with their maker
        for key, job in jobs.items():
            if key != blamed:
                fresh.submit(key, job)
        return None if blamed is None else Lost(blamed, status.item, hung, exitcode)

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []


class _Worker:
    """One process as its parent sees it."""

    def __init__(self, context: BaseContext, task: Task) -> None:
        self.context, self.task = context, task
        self.jobs: dict[int, object] = {}  # queued, the one in work first
        self.started = False
        self._status = context.RawArray("d", [-1, -1, 0])  # as in _Status
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(task, child, self._status), daemon=True)  # type: ignore[attr-defined]
        try:
            self.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise StellaError(
                f"the sources cannot be sent to worker processes ({error}); "
                "define their classes at the top of a module, without open handles, or use workers=0"
            ) from error
        child.close()

    def status(self) -> "_Status":
        key, item, since = self._status
        return _Status(int(key), int(item), since)

    def submit(self, key: int, job: object) -> None:
        self.jobs[key] = job
        with contextlib.suppress(OSError):  # it just died: `wait` will notice, and send the job again
            self.pipe.send((key, job))

    def take(self, message: Any) -> Done | None:
        if message is None:
            self.started = True
            return None
        key, result = message
        del self.jobs[key]
        if isinstance(result, _Failure):
            result.throw()
        return Done(key, result)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass(frozen=True)
class _Status:
    """What a worker is busy with: which job, which item of it (-1: none), and since when."""

    key: int
    item: int
    since: float


@dataclass(frozen=True)
class _Failure:
    """An exception that a task raised, on its way to the parent."""

    error: StellaError | None
    trace: str

    def throw(self) -> NoReturn:
        raise self.error or RuntimeError(f"in a worker process:\n{self.trace}")


def _serve(task: Task, pipe: "connection.Connection[Any, Any]", status: Any) -> None:
    """The life of a worker: jobs come in through the pipe and results go out, until the parent closes it or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops its workers
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)

    def tick(item: int) -> None:
        status[2] = time.monotonic()  # first, so that a new item is never read with an old time
        status[1] = item

    give_back = _give_back()
    with contextlib.suppress(EOFError, OSError):  # the parent went away
        pipe.send(None)
        for count in itertools.count(1):
            key, job = pipe.recv()
            status[0] = key
            try:
                result = task(job, tick)
            except Exception as error:
                result = _Failure(error if isinstance(error, StellaError) else None, traceback.format_exc())
            tick(-1)
            pipe.send((key, result))
            del result
            if count % 10 == 0:  # each time costs as much as a clip
                give_back()


def _give_back() -> Callable[[], object]:
    """What returns freed memory to the system. glibc keeps it in a heap that frames of many sizes tear to pieces: over
    hundreds of clips a worker would grow to twice its size."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return lambda: None
    return lambda: trim(0)


def _die_with_parent() -> None:
    """A worker that hangs would not notice its closed pipe. A fork server ends with the process that it serves."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)

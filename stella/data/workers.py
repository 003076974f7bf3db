"""A pool of worker processes that survives hanging and dead workers; `prepare`, `pack` and `stream` use it.

Each worker runs `task(job, tick)`. The task calls `tick(item)` when it begins an item that might hang, and `tick(-1)`
after the last one. A worker that spends longer than the time limit on one item is killed and its job comes back as
`Lost`. A worker that dies is replaced and its job run once more, since the system may have been short of memory. If a
worker dies again at the same item, the job comes back as `Lost` too. Jobs queued behind it are submitted again. A
worker that shows no sign of life between items counts as dead.

A worker may take `memory` bytes more than it has at its start; what needs more fails in it as `MemoryError`. If the
system itself runs short, it ends workers before their parent.
"""

import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import pickle
import re
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # registers the pickling of tensors through shared memory

from stella.errors import StellaError

Tick = Callable[[int], None]
Task = Callable[[Any, Tick], Any]

# A fork server imports torch once, so that a new worker starts in milliseconds. A plain fork would copy the parent's
# threads and GPU state.
START_METHOD = "forkserver"
SILENCE = 20.0  # seconds without a sign of life, between items, after which a worker is replaced
STARTING = 120.0  # the same for a worker that starts
AWAY = 5.0  # seconds without a look at the workers, after which their time limits begin anew
NETWORK = 900.0  # seconds that a download may take
MOST_WORKERS = 1000
WORKER_GB = 4.0  # memory that one worker may take; 8K video needs about 2


@dataclass(frozen=True)
class Done:
    key: int
    job: Any
    result: Any


@dataclass(frozen=True)
class Lost:
    """A job whose worker hung, or died twice, at `item`."""

    key: int
    job: Any
    item: int
    hung: bool
    exitcode: int | None


class Pool:
    """`workers` processes, each with a queue of at most `depth` jobs and `gigabytes` of memory."""

    def __init__(
        self,
        task: Task,
        workers: int,
        depth: int,
        time_limit: float,
        gigabytes: float = WORKER_GB,
        preload: str = "stella.data.workers",
    ) -> None:
        """`preload` is the module that the fork server imports for all workers; the first pool of a process decides."""
        context = multiprocessing.get_context(START_METHOD)
        context.set_forkserver_preload([preload])
        self.capacity, self.time_limit = workers * depth, time_limit
        self._deaths: dict[int, int] = {}  # by job: the item at which its worker died
        self._polled = self._here = time.monotonic()  # when this process last looked, and since when it does
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(_Worker(context, task, int(1e9 * gigabytes)))
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> int:
        """The number of jobs that have been submitted and have not ended."""
        return sum(len(worker.jobs) for worker in self._workers)

    def submit(self, key: int, job: object) -> None:
        """Queue a job at the least busy worker. Its result comes back with `key`."""
        min(self._workers, key=lambda worker: len(worker.jobs)).submit(key, job)

    def wait(self) -> Done | Lost:
        """The next job to end, in any order. An exception of the task is raised here."""
        while (event := self.poll()) is None:
            pass
        return event

    def poll(self) -> Done | Lost | None:
        """As `wait`, for half a second at most; None if no job ended."""
        handles = [handle for worker in self._workers for handle in (worker.pipe, worker.process.sentinel)]
        ready = connection.wait(handles, timeout=min(0.5, self.time_limit / 4))
        now, last, self._polled = time.monotonic(), self._polled, time.monotonic()
        if now - last > AWAY:  # this process was busy, or stopped, and then its workers may have been too
            self._here = now
        for position, worker in enumerate(self._workers):
            if event := self._poll(position, worker, worker.pipe in ready, worker.process.sentinel in ready):
                self._deaths.pop(event.key, None)
                return event
        return None

    def _poll(self, position: int, worker: "_Worker", speaks: bool, ended: bool) -> Done | Lost | None:
        if speaks:  # read it even if the worker has ended since
            try:
                message = worker.receive()
            except (EOFError, OSError):  # also if it died before it passed its shared memory on
                return self._replace(position, worker, hung=False)
            return worker.take(message)
        if ended:
            return self._replace(position, worker, hung=False)
        status = worker.status()
        since = max(status.since, self._here)
        if status.item >= 0 and time.monotonic() - since > self.time_limit:
            return self._replace(position, worker, hung=True, seen=status)
        if worker.silent(status.item, since):  # stopped from outside, for example
            return self._replace(position, worker, hung=False, seen=status)
        return None

    def _replace(self, position: int, worker: "_Worker", hung: bool, seen: "_Status | None" = None) -> Lost | None:
        """A new worker in the place of this one, with its jobs, unless one of them is lost.

        `seen` is the status in which a worker was found hanging or silent: it may have changed before the kill.
        """
        worker.stop()
        exitcode = worker.process.exitcode
        why = "no sign of life" if seen else f"exit status {exitcode}"
        if not worker.started:
            raise StellaError(
                f"a worker process could not start ({why}, see its messages above); "
                'guard the main script with `if __name__ == "__main__":`, or use workers=0'
            )
        status, jobs = seen or worker.status(), worker.jobs
        blamed = status.key if status.key in jobs else next(iter(jobs), None)  # a result may be lost with its worker
        lost = None
        if blamed is not None and (hung or self._died_before(blamed, status.item, why)):
            lost = Lost(blamed, jobs.pop(blamed), status.item, hung, exitcode)
        fresh = self._workers[position] = _Worker(worker.context, worker.task, worker.memory)
        for key, job in jobs.items():
            fresh.submit(key, job)
        return lost

    def _died_before(self, key: int, item: int, why: str) -> bool:
        """Whether a worker died at this item before; if one died elsewhere in the job, the items are not the cause."""
        before = self._deaths.pop(key, None)
        if before is None:
            self._deaths[key] = item
        elif before != item or item < 0:
            raise StellaError(
                f"workers keep dying ({why}), most likely for lack of memory or of shared memory "
                "(/dev/shm); use fewer workers, a smaller batch_size or a smaller prefetch"
            )
        return before is not None

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.stop()
        self._workers = []


class _Status(NamedTuple):
    """A worker's current job, the item of it (-1: none), and when it began that."""

    key: int
    item: int
    since: float


class _Worker:
    """One process as its parent sees it."""

    def __init__(self, context: BaseContext, task: Task, memory: int) -> None:
        self.context, self.task, self.memory = context, task, memory
        self.jobs: dict[int, object] = {}  # queued, the current one first
        self.started = False
        self._asked = time.monotonic()  # when it was last given something to do
        self._status = context.RawArray("d", [-1, -1, 0])  # as in _Status
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(task, child, self._status, memory), daemon=True)  # type: ignore[attr-defined]
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

    def silent(self, item: int, since: float) -> bool:
        """Whether it has something to do, no item in progress, and has shown no sign of life for long."""
        last = max(self._asked, since)
        idle = bool(self.jobs) and item < 0
        return idle and time.monotonic() - last > (SILENCE if self.started else STARTING)

    def receive(self) -> Any:
        """Its next message. A worker that stops in the middle of it is killed, which ends the wait."""
        watchdog = threading.Timer(SILENCE, self.process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            return self.pipe.recv()
        finally:
            watchdog.cancel()

    def submit(self, key: int, job: object) -> None:
        self._asked = time.monotonic()
        self.jobs[key] = job
        with contextlib.suppress(OSError):  # it just died: `wait` notices and submits the job again
            self.pipe.send((key, job))

    def take(self, message: Any) -> Done | None:
        if message is None:
            self.started, self._asked = True, time.monotonic()
            return None
        key, result, error = message
        job = self.jobs.pop(key)
        if error:
            raise error
        return Done(key, job, result)

    def stop(self) -> None:
        """End the process. The pipe closes itself: where the garbage collector ends a stream, it already has."""
        self.process.kill()
        self.process.join(5)  # a process that waits for a dead disk ends only with that wait


def _serve(task: Task, pipe: "connection.Connection[Any, Any]", status: Any, memory: int) -> None:
    """A worker's main loop: jobs in, results out, until the parent closes the pipe or dies."""
    with contextlib.suppress(AttributeError, OSError):  # Linux: it ends with its parent even when it is stopped
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops its workers
    gc.freeze()  # what the parent had is never collected here: a fork cannot free what has threads, such as a decoder
    _limit_memory(memory)
    threading.Thread(target=die_with_parent, daemon=True).start()
    torch.set_num_threads(1)

    global _own_status
    _own_status = status

    def tick(item: int) -> None:
        status[2] = time.monotonic()  # first: a new item must never be read with an old time
        status[1] = item

    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        pipe.send(None)
        for count in itertools.count(1):
            key, job = pipe.recv()
            status[0] = key
            result: Any = None
            failure: Exception | None = None
            try:
                result = task(job, tick)
            except StellaError as error:
                failure = error
            except Exception:
                failure = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
            tick(-1)
            pipe.send((key, result, failure))
            del result
            if count % 10 == 0:  # it costs as much as a clip
                trim()


_own_status: Any = None  # of this process, if it is a worker


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """The time that the block takes, up to `NETWORK` seconds, does not count for the current item."""
    if _own_status is None:
        yield
        return
    _own_status[2] = time.monotonic() + NETWORK
    try:
        yield
    finally:
        _own_status[2] = time.monotonic()


def _limit_memory(more: int) -> None:
    """Allow this process so many bytes more than it has, and let the system end it before its parent."""
    with contextlib.suppress(OSError, ValueError):  # not Linux, or a lower limit is set
        Path("/proc/self/oom_score_adj").write_text("1000")
        [pages] = re.findall(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(pages) * 1024 + more, hard))


def trim() -> None:
    """Return freed memory to the system. Frames of many sizes fragment glibc's heap: without this a worker grows to
    twice its size over hundreds of clips, and a learner runs for months."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def die_with_parent() -> None:
    """End with the parent even while a task hangs. (A fork server ends with the process that started it.)"""
    parent, maker = os.getppid(), multiprocessing.parent_process()
    while os.getppid() == parent and (maker is None or maker.is_alive()):  # it may have died before this line
        time.sleep(0.2)
    os._exit(1)

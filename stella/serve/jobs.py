"""A bounded queue in front of worker processes, which are killed when a job takes too long."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from stella.data.workers import Done, Lost, Pool, Task
from stella.errors import StellaError
from stella.serve.answers import STOPPING, HttpError
from stella.serve.work import Refusal, work

Log = Callable[[str], None]


class Jobs:
    """Each thread has a worker process of its own and takes one job after the other."""

    def __init__(self, workers: int, waiting: int, seconds: float, log: Log = print, task: Task = work) -> None:
        self.seconds, self.log, self.task = seconds, log, task
        self._queue: queue.Queue[tuple[Any, Future[Any]]] = queue.Queue(waiting)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    async def run(self, job: Any) -> Any:
        """The job's result, or a `HttpError`."""
        future: Future[Any] = Future()
        try:
            self._queue.put_nowait((job, future))
        except queue.Full:
            raise HttpError(503, "the server is busy; try again in a few seconds", retry=5) from None
        return await asyncio.wrap_future(future)

    def warm(self, job: Any) -> None:
        """Give each worker this job to begin with, whose result nobody waits for."""
        for _ in self._threads:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait((job, Future()))

    def close(self) -> None:
        """Kill the workers. What is waiting is answered with a `HttpError`."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(5)
        while not self._queue.empty():
            _fail(self._queue.get_nowait()[1], STOPPING)

    def _run(self) -> None:
        pool: Pool | None = None
        while not self._stopping.is_set():
            try:
                job, future = self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
            if not future.set_running_or_notify_cancel():  # whoever asked is gone
                continue
            try:
                pool = pool or Pool(self.task, 1, 1, self.seconds, preload=self.task.__module__)
                future.set_result(self._result(pool, job))
            except HttpError as problem:
                _fail(future, problem)
            except Exception as error:
                self.log(f"a worker failed: {error}")
                _fail(future, HttpError(500, "the server cannot do this; its log says why"))
                _close(pool)
                pool = None
        _close(pool)

    def _result(self, pool: Pool, job: Any) -> Any:
        pool.submit(0, job)
        event: Done | Lost | None = None
        while event is None:
            if self._stopping.is_set():
                raise STOPPING
            event = pool.poll()
        if isinstance(event, Lost):
            long = f"it takes longer than {self.seconds:g} s to decode"
            raise HttpError(
                422, long if event.hung else "the decoder crashed on it; re-encode it, or give another file"
            )
        if isinstance(event.result, Refusal):
            if event.result.log:
                self.log(event.result.log)
            raise HttpError(event.result.status, event.result.sentence, event.result.retry)
        return event.result


def _close(pool: Pool | None) -> None:
    if pool is not None:
        pool.close()


def _fail(future: "Future[Any]", error: StellaError) -> None:
    if not future.cancelled():
        future.set_exception(error)

"""A round's state is written behind the learner's back: while it is measured, and while the next round trains.

One thread writes one thing after the other, so that the files of a round come in their order and the swap comes last.
The learner waits before it hands over the next state: never more than one is in memory.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Behind:
    """Work for a thread of its own. Where one piece fails, those after it are not done."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "behind")
        self._last: Future[None] | None = None

    def do(self, work: Callable[[], object]) -> None:
        before = self._last

        def after() -> None:
            if before is not None:
                before.result()
            work()

        self._last = self._thread.submit(after)

    def wait(self) -> None:
        """Wait until all is done; raises the error of what failed."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


def give_back() -> None:
    """Return freed memory to the system. glibc keeps it in pieces otherwise, and a learner runs for months."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

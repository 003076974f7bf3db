"""A round's state is written behind the learner's back, while the next round trains.

One thread writes one thing after the other, so that the files of a round come in their order and the swap comes last.
The learner waits before it hands over the next state: never more than one is in memory. Writing gigabytes makes all
else in a process several times slower, but not a GPU's training; so it pauses while clips are measured.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

PAUSE = 20.0  # seconds that a piece of work waits at most


class Behind:
    """Work for a thread of its own. Where one piece fails, those after it are not done."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "behind")
        self._last: Future[None] | None = None
        self._going = threading.Event()
        self._going.set()

    def do(self, work: Callable[[], object]) -> None:
        before = self._last

        def after() -> None:
            if before is not None:
                before.result()
            self._going.wait(PAUSE)
            work()

        self._last = self._thread.submit(after)

    def pause(self) -> None:
        """Begin no further piece until `go` or `wait`, or for `PAUSE` seconds each."""
        self._going.clear()

    def go(self) -> None:
        self._going.set()

    def wait(self) -> None:
        """Wait until all is done; raises the error of what failed. A signal may interrupt it: then wait again."""
        self.go()
        if self._last is not None:
            wait([self._last])
            last, self._last = self._last, None
            last.result()

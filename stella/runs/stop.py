"""SIGTERM and Ctrl-C stop a run at the next safe moment, and within ten seconds in any case."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

PATIENCE = 8.0  # seconds in which a run may come to a safe moment; then it is interrupted where it is


class Stopped(BaseException):  # not an Exception: no handler on the way may catch it
    """Raised where there is nothing to save, or where a safe moment did not come in time."""


class Stop:
    """A context in which a signal is recorded in `signal` for the run to check. A second signal changes nothing."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._deadline = float("inf")
        self._at_once = self._writing = self._raised = False
        self._ended = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # only this thread may set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context in which a signal raises `Stopped`, because all work in it is repeated on resume.

        An error after a signal becomes `Stopped` too: workers end by the same signal.
        """
        outer, self._at_once = self._at_once, True
        try:
            if self.signal is not None:
                self._raise()
            yield
        except Exception as error:
            if self.signal is None:
                raise
            raise Stopped from error
        finally:
            self._at_once = outer

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context that is never interrupted: what it writes is what the stop must leave behind."""
        self._writing = True
        try:
            yield
        finally:
            self._writing = False

    def end(self) -> NoReturn:
        """Raise `Stopped`, when what the stop must leave behind is written; what cleans up is not interrupted again."""
        self._raised = True
        raise Stopped

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._deadline = signal.Signals(number), time.monotonic() + PATIENCE
            if self._before:  # else the signal would end the process
                threading.Thread(target=self._remind, args=(self.signal,), daemon=True).start()
        if self._at_once or (time.monotonic() >= self._deadline and not self._writing):
            self._raise()

    def _raise(self) -> None:
        if not self._raised and not self._ended.is_set():  # once: what cleans up is not interrupted again
            self._raised = True
            raise Stopped

    def _remind(self, number: signal.Signals) -> None:
        """Send the signal again when patience ends: the main thread may wait for something that never comes."""
        self._ended.wait(PATIENCE)
        while not self._ended.is_set() and not self._raised:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)
            self._ended.wait(0.5)

"""SIGTERM and Ctrl-C stop a run at the next safe moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(BaseException):  # not an Exception: no handler on the way may catch it
    """Raised immediately where there is nothing to save."""


class Stop:
    """A context in which a signal is recorded in `signal` for the run to check. A second signal changes nothing."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # only this thread may set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context in which a signal raises `Stopped`, because all work in it is repeated on resume."""
        self._at_once = True
        try:
            if self.signal is not None:
                raise Stopped
            yield
        finally:
            self._at_once = False

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if self._at_once:
            raise Stopped

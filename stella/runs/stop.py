"""SIGTERM and Ctrl-C end a run at a moment that suits it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(BaseException):  # not an error, and nothing on the way may catch it as one
    """Raised at once where there is nothing to save."""


class Stop:
    """While it is entered, a signal is kept in `signal` until the run asks for it. A second one changes nothing."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this a signal raises `Stopped`: all that is done here would be done again."""
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

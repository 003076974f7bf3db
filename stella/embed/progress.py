"""A progress bar over the seconds of some files."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from stella.errors import StellaError, plain
from stella.media.decode import read_duration
from stella.media.windows import Window


class Shown:
    """A bar that advances by the seconds of what is read; nothing unless it is `wanted`."""

    def __init__(self, items: Sequence[Any], wanted: bool) -> None:
        self.bar: Any = None
        if wanted:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            name = TextColumn("{task.description}", markup=False)
            columns = (name, BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            self.bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn())
            self.lengths = [_seconds(item) for item in items]
            self.names = [plain(Path(item).name) if isinstance(item, str | Path) else "array" for item in items]

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("", total=sum(self.lengths) or None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def at(self, number: int, second: float) -> None:
        """Item `number` is read up to this second."""
        if self.bar is not None:
            before = sum(self.lengths[:number])
            done = before + min(second, self.lengths[number] or second)
            self.bar.update(self.task, completed=done, description=self.names[number])

    def watched(self, found: Iterable[Window]) -> Iterator[Window]:
        """The windows of the only item."""
        for window in found:
            self.at(0, window.end)
            yield window


def _seconds(item: Any) -> float:
    """The length of a file in seconds; 0 if unknown. May read the whole file."""
    try:
        return (read_duration(item) or 0.0) if isinstance(item, str | Path) else 0.0
    except StellaError:
        return 0.0

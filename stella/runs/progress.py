"""Progress of a run: a bar on a terminal, a line per minute elsewhere, and TensorBoard if asked for."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from stella.errors import number_of, plain, require

WIDE = 140  # terminal columns needed to show all parts of the loss
SILENCE = 60.0  # seconds between lines when the output is a file or pipe


def say(console: Console, line: str, style: str = "") -> None:
    """Print a line as it is: brackets and escapes in names mean nothing, and long lines are not wrapped."""
    console.print(plain(line), style=style or None, markup=False, highlight=False, soft_wrap=True)


class Display(Progress):
    """The progress bar of a run, as a context. `total` is the expected number of steps; with none, `clips` has bars."""

    def __init__(self, console: Console, total: int = 0, done: int = 0) -> None:
        steps, left = (Column(no_wrap=True, min_width=width) for width in (1 + 2 * len(str(total)), len("0:00:00")))
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if console.width >= WIDE else 10),
            MofNCompleteColumn(table_column=steps),
            TimeRemainingColumn(table_column=left),  # a narrow terminal cuts what follows instead
            TextColumn("{task.fields[status]}", style="dim", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._steps = self.add_task("", total=total, completed=done, status="", visible=total > 0)
        self._said = time.monotonic()

    def at(self, step: int, what: str) -> None:
        self.update(self._steps, completed=step, description=plain(what))

    def losses(self, means: Mapping[str, float], clips_per_second: float, peak_bytes: int) -> None:
        """Show the loss, and its parts if the terminal is wide enough."""
        shown = means if self.console.width >= WIDE else {"loss": means["loss"]}
        parts = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
        status = f"{parts}  {clips_per_second:.0f} clips/s  {peak_bytes / 1e9:.2f} GB"
        self.update(self._steps, status=status)
        if self._silent_for_long():
            task = self.tasks[self._steps]
            self.say(f"{task.description}, step {task.completed:.0f} of {task.total:.0f}  {status}")

    @contextmanager
    def clips(self, total: int, when: str = "") -> Iterator[Callable[[str, int], None]]:
        """A bar over so many clips while the block lasts; gives a function to say what is done with how many more.
        `when` is of a run: after task1."""
        bar, began, sofar = self.add_task(plain(when), total=total, status=""), time.monotonic(), 0

        def done(what: str, count: int) -> None:
            nonlocal sofar
            sofar += count
            what = f"{what} {when}".strip()
            self.update(bar, completed=sofar, description=plain(what))
            if sofar < total and self._silent_for_long():
                left = (time.monotonic() - began) * (total / max(1, sofar) - 1)
                minutes = number_of(max(1, round(left / 60)), "minute")
                self.say(f"{what}: {sofar:,} of {total:,}, about {minutes} left")

        try:
            yield done
        finally:
            self.remove_task(bar)

    def _silent_for_long(self) -> bool:
        return self.disable and time.monotonic() - self._said > SILENCE

    def say(self, line: str) -> None:
        self._said = time.monotonic()
        say(self.console, line)


class Board:
    """TensorBoard curves in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = require("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    def scalars(self, values: Mapping[str, float | None], step: int) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()

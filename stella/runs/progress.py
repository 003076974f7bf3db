"""Progress of a run: a bar on a terminal, a line per minute elsewhere, and TensorBoard if asked for."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stella.errors import plain, require

WIDE = 140  # terminal columns needed to show all parts of the loss
SILENCE = 60.0  # seconds between lines when the output is a file or pipe


def say(console: Console, line: str, style: str = "") -> None:
    """Print a line as it is: brackets and escapes in names mean nothing, and long lines are not wrapped."""
    console.print(plain(line), style=style or None, markup=False, highlight=False, soft_wrap=True)


class Display(Progress):
    """The progress bar of a run, as a context. `total` is the expected number of steps."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if console.width >= WIDE else 10),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", style="dim", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._steps = self.add_task("", total=total, completed=done, status="")
        self._said = time.monotonic()

    def at(self, step: int, what: str) -> None:
        self.update(self._steps, completed=step, description=plain(what))

    def losses(self, means: Mapping[str, float], clips_per_second: float, peak_bytes: int) -> None:
        """Show the loss, and its parts if the terminal is wide enough."""
        shown = means if self.console.width >= WIDE else {"loss": means["loss"]}
        parts = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
        status = f"{parts}  {clips_per_second:.0f} clips/s  {peak_bytes / 1e9:.2f} GB"
        self.update(self._steps, status=status)
        if self.disable and time.monotonic() - self._said > SILENCE:
            task = self.tasks[self._steps]
            self.say(f"{task.description}, step {task.completed:.0f} of {task.total:.0f}  {status}")

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

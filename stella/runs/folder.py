"""The folder of a run: its files, and a lock that admits one process."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stella.errors import StellaError
from stella.files import Line, lock, read_json, read_lines, sweep


def runs_below(folder: Path, downstream: bool = False) -> "list[RunFolder]":
    """All pre-training runs anywhere below a folder, or all `downstream` runs, sorted by path."""
    found = [RunFolder(config.parent) for config in sorted(folder.rglob("config.json"))]
    return [run for run in found if run.environment.exists() and is_downstream(run) == downstream]


def is_downstream(run: "RunFolder") -> bool:
    """Whether it is a downstream run: a task, no method. False for a damaged one; reading that reports the damage."""
    try:
        config = run.read_config()
        return "task" in config and "method" not in config
    except StellaError:
        return False


class RunFolder:
    """`config.json`, `environment.json`, `metrics.jsonl`, `speed.jsonl`, `skipped.jsonl`, `checkpoints/`, `lock`.

    metrics.jsonl is reproducible: another run of the same configuration writes the same lines. speed.jsonl has times.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.config = self.root / "config.json"
        self.environment = self.root / "environment.json"
        self.metrics = self.root / "metrics.jsonl"
        self.speed = self.root / "speed.jsonl"
        self.skipped = self.root / "skipped.jsonl"
        self.method = self.root / "method.py"  # its file, if the method is not one of the package's
        self.clips = self.root / "clips.csv"  # of runs on files
        self.examples = self.root / "examples.json"  # pictures for the page
        self.pairs = self.root / "pairs.json"  # audio and video embeddings of one task in two dimensions
        self.fading = self.root / "fading.png"  # where a sound is found after each task, of `stella reproduce fading`
        self.notes = self.root / "notes.json"  # of the import of weights, of what is odd about the data, of speed
        self.checkpoints = self.root / "checkpoints"
        self.weights = self.root / "model.safetensors"
        self.slow_weights = self.root / "slow.safetensors"  # of runs with train.ema

    def task_weights(self, task: int) -> Path:
        """Weights after a task, counted from 0; of runs with train.keep_task_weights."""
        return self.root / "weights" / f"after-{task + 1}.safetensors"

    @property
    def started(self) -> bool:
        return self.config.exists()

    @property
    def end(self) -> Line | None:
        """The last line of a finished run, else None."""
        lines = read_lines(self.metrics)
        return lines[-1] if lines and lines[-1]["kind"] == "end" else None

    def drop_checkpoints(self) -> None:
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def read_config(self) -> dict[str, Any]:
        return read_json(self.config, f"is {self.root} the folder of a run?")

    @contextmanager
    def locked(self, wait: bool = False) -> Iterator[None]:
        """Hold the folder: a second process is refused, or has to wait."""
        self.root.mkdir(parents=True, exist_ok=True)
        with lock(self.root / "lock", wait=wait):
            sweep(self.root)
            try:
                yield
            finally:
                if not self.started:  # the configuration was refused: leave nothing behind
                    (self.root / "lock").unlink(missing_ok=True)  # which `lock` has found to be ours
                    with suppress(OSError):  # the folder held something before
                        self.root.rmdir()

    def cut(self, length: int) -> None:
        """Truncate metrics.jsonl to the length it had at a checkpoint."""
        have = self.metrics.stat().st_size if self.metrics.exists() else 0
        if have < length:
            raise StellaError(
                f"{self.metrics} has {have} bytes and had {length} at the checkpoint; restore it or start a new run"
            )
        with self.metrics.open("ab") as file:
            file.truncate(length)

"""The folder of a run: one process at a time, lines that are there once they are written."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stella.errors import StellaError
from stella.files import Line, read_json, read_lines


class RunFolder:
    """`config.json`, `environment.json`, `metrics.jsonl`, `speed.jsonl`, `skipped.jsonl`, `checkpoints/`, `lock`.

    metrics.jsonl holds what a run computed and nothing that another run of the same configuration would not compute;
    times are in speed.jsonl.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.config = self.root / "config.json"
        self.environment = self.root / "environment.json"
        self.metrics = self.root / "metrics.jsonl"
        self.speed = self.root / "speed.jsonl"
        self.skipped = self.root / "skipped.jsonl"
        self.checkpoints = self.root / "checkpoints"
        self.weights = self.root / "model.safetensors"
        self.slow_weights = self.root / "slow.safetensors"  # of runs with train.ema

    @property
    def begun(self) -> bool:
        return self.config.exists()

    @property
    def end(self) -> Line | None:
        """The last line of a run that went through to its end."""
        lines = read_lines(self.metrics)
        return lines[-1] if lines and lines[-1]["kind"] == "end" else None

    def read_config(self) -> dict[str, Any]:
        return read_json(self.config)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse to share the folder. The lock goes with its process, however that ends."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by loader workers, as flock is
            except OSError as error:
                file.seek(0)
                raise StellaError(
                    f"{self.root} is in use by another process (id {file.read().strip() or 'unknown'}); "
                    "wait for it, stop it, or choose another folder"
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)
                if not self.begun:  # refused: leave nothing behind
                    (self.root / "lock").unlink(missing_ok=True)
                    with suppress(OSError):  # it was there before, with something in it
                        self.root.rmdir()

    def cut(self, length: int) -> None:
        """Take metrics.jsonl back to the length it had at a checkpoint."""
        have = self.metrics.stat().st_size if self.metrics.exists() else 0
        if have < length:
            raise StellaError(
                f"{self.metrics} has {have} bytes and had {length} at the checkpoint; restore it or start a new run"
            )
        with self.metrics.open("ab") as file:
            file.truncate(length)

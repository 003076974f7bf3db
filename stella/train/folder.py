"""The folder of a run: one process at a time, lines that are there once they are written."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stella.errors import StellaError

Line = dict[str, Any]


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


class Lines:
    """A JSON-lines file to append to. Each line is handed to the system at once, whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._cut(path.read_bytes().rfind(b"\n") + 1)  # a kill can tear the last line

    def write(self, line: Mapping[str, Any]) -> None:
        rest = memoryview(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        before = self._file.tell()
        try:
            while rest:  # a disk that is nearly full takes a part, and refuses what is left
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._cut(before)
            raise

    def sync(self) -> int:
        """Force it to the disk; its length."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    def _cut(self, length: int) -> None:
        self._file.truncate(length)
        self._file.seek(length)


def read_lines(path: Path) -> list[Line]:
    """The whole lines of a file; a kill can tear the last."""
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    return [_parse(line, path, number) for number, line in enumerate(whole, 1)]


def _parse(line: bytes, path: Path, number: int) -> Line:
    try:
        parsed: Line = json.loads(line)
    except ValueError as error:
        raise StellaError(f"line {number} of {path} is damaged ({error}); restore it, or take that line out") from error
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StellaError(f"{path} cannot be read ({error.strerror}); is {path.parent} the folder of a run?") from error
    except ValueError as error:
        raise StellaError(f"{path} is damaged ({error}); restore it or start a new run") from error
    return tree


def write_json(path: Path, tree: Any) -> None:
    write_text(path, json.dumps(tree, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """A file that is whole under its name, whenever the process ends."""
    fresh = path.with_name(path.name + ".tmp")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    fresh.replace(path)


@contextmanager
def full_disk_told(root: Path) -> Iterator[None]:
    """A full disk is something a user can mend."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StellaError(
            f"{root} cannot be written ({error.strerror}); nothing up to the last checkpoint is lost: "
            "free some space and continue with --resume"
        ) from error

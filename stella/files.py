"""Files for everybody: whole-file writes, JSON, JSON lines and locks that survive a kill or a full disk."""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stella.errors import StellaError

Line = dict[str, Any]


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

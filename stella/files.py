"""Files that survive a kill or a full disk: whole-file writes, JSON, JSON lines, locks.

A file is written under a temporary name in its own folder, forced to the disk, then renamed. Readers therefore see the
old file or the new one, never a part of either.
"""

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from stella.errors import StellaError, require

Line = dict[str, Any]


def is_address(place: Path | str) -> bool:
    """Whether it is an address such as s3://BUCKET/FOLDER, not a path."""
    return "://" in str(place)


def absolute(place: str) -> str:
    """What means the same in another directory; an address does."""
    return place if is_address(place) else str(Path(place).absolute())


def text_of(path: Path) -> str:
    """The content of a text file that a user gave, without a byte-order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise StellaError(f"{path} cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise StellaError(f"{path} is not text in UTF-8 ({error}); save it as such, or fetch it again") from error


def table_of(path: Path) -> list[list[str]]:
    """The rows of a CSV file that a user gave; lines without a cell are empty ones."""
    try:
        return list(csv.reader(io.StringIO(text_of(path)), skipinitialspace=True))
    except csv.Error as error:
        raise StellaError(f"{path} is not a CSV file ({error}); save it as one, or fetch it again") from error


def located(place: Path | str) -> Path:
    """A path, or what behaves like one for an address (fsspec), to read from."""
    if not is_address(place):
        return Path(place)
    try:
        found: Path = require("upath", "fsspec").UPath(str(place))
        found.exists()
    except (ImportError, ValueError) as error:  # of one kind of address
        raise StellaError(f"{place} cannot be opened ({error}); install what it names") from error
    except OSError as error:
        raise StellaError(f"{place} cannot be reached ({error}); check the address and your access to it") from error
    return found


def is_remote(path: Path) -> bool:
    return not isinstance(path, Path)


def write_bytes(path: Path, data: bytes) -> None:
    with whole(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, encoded(text))


def encoded(text: str) -> bytes:
    """UTF-8. Bytes of names that are not UTF-8 become `\\udcXX`, which JSON reads back as the same name."""
    return text.encode("utf-8", "backslashreplace")


def write_json(path: Path, tree: Any) -> None:
    write_text(path, json.dumps(tree, indent=2, ensure_ascii=False) + "\n")


def read_json(
    path: Path, remedy: str = "check the path", restore: str = "restore it, or delete it and start again"
) -> dict[str, Any]:
    """The object in a JSON file. `remedy` ends the message about one that cannot be opened, `restore` about another."""
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("it holds no object")
    except OSError as error:
        raise StellaError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise StellaError(f"{path} is damaged ({error}); {restore}") from error
    return tree


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It becomes `path` when the block ends, and is removed when the block fails."""
    with temporary(path) as fresh:
        yield fresh
        publish(fresh, path)


@contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """A new name beside `path`, `PATH.XXXXXXXX.tmp`; a file of that name is removed at the end."""
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield fresh
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Force a file to the disk, then rename it to `path`, which may exist."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Force a file's content to the disk, also what came by a memory map."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk: a new or renamed file must survive a power failure too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_hash(path: Path) -> str:
    """16 digits that tell whether a file is damaged or another."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def sweep(folder: Path) -> None:
    """Remove the temporary files of killed writers. Only the holder of the folder's lock may call this."""
    for left in folder.iterdir():
        if re.fullmatch(r".+\.[0-9a-f]{8}\.tmp", left.name, re.S) and left.is_file() and not left.is_symlink():
            left.unlink()


class Appended:
    """A file that grows by whole pieces. A piece that the disk has no room for leaves nothing behind."""

    def __init__(self, path: Path, end: int) -> None:
        """Continue after the first `end` bytes; the rest is cut off."""
        self._file, self.end = path.open("ab", buffering=0), end
        self._file.truncate(end)

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:  # a nearly full disk accepts a part and refuses the rest
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self.end)
            raise
        self.end += len(data)

    def sync(self) -> int:
        """Force everything to the disk; returns the file's length in bytes."""
        os.fsync(self._file.fileno())
        return self.end

    def close(self) -> None:
        self._file.close()


class Lines(Appended):
    """A JSON-lines file to append to. A last line torn by a kill is removed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0)

    def write(self, line: Mapping[str, Any]) -> None:
        self.append(encoded(json.dumps(line, ensure_ascii=False)) + b"\n")


class Unwritten:
    """Takes lines as `Lines` does, in a process that writes none."""

    def __init__(self, path: Path) -> None: ...

    def write(self, line: Mapping[str, Any]) -> None: ...

    def sync(self) -> int:
        return 0

    def close(self) -> None: ...


def read_lines(path: Path) -> list[Line]:
    """The whole lines of a JSON-lines file; empty if there is no file. A torn last line is ignored."""
    if not path.exists():
        return []
    lines: list[Line] = []
    try:
        *complete, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StellaError(f"{path} cannot be read ({error.strerror}); restore or remove it") from error
    for number, line in enumerate(complete, 1):
        try:
            lines.append(json.loads(line))
            if not isinstance(lines[-1], dict):
                raise ValueError("it holds no object")
        except (ValueError, RecursionError) as error:
            raise StellaError(f"line {number} of {path} is damaged ({error}); restore or remove it") from error
    return lines


_locks: WeakSet[IO[str]] = WeakSet()  # all open ones, for forked children to close
LEFT = 1.0  # seconds to wait for a lock whose holder was killed: a child that it was just starting may still have it


@contextmanager
def lock(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path`; if another holds it, wait, or raise an error that names its process.

    The lock belongs to an open file: two threads of one process exclude each other, and it ends with the process,
    however that ends. A forked child does not inherit it. The file itself stays, unless the holder removes it.
    """
    file = _locked(path, wait)
    try:
        file.seek(0)
        if not re.fullmatch(r"\d*\n?", file.read(100)):  # a killed holder leaves its number there
            file.close()
            raise StellaError(f"{path} is not a lock of ours; choose another folder, or move that file away")
        file.truncate(0)
        with suppress(OSError):  # a full disk: the lock holds without the number, which only informs
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield
    finally:
        if not file.closed:  # a forked child closed its copy
            file.truncate(0)
            file.close()


def in_use(path: Path) -> bool:
    """Whether a process of this machine holds the lock file `path`. Only looks, and so may be wrong a moment later."""
    try:
        os.kill(int(path.read_text()), 0)
    except PermissionError:  # of another user
        return True
    except (OSError, ValueError):  # released, or its holder was killed
        return False
    return True


def _locked(path: Path, wait: bool) -> IO[str]:
    end = time.monotonic() + LEFT
    while True:
        file = path.open("a+", encoding="utf-8", errors="replace")
        _locks.add(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not in_use(path) and time.monotonic() < end:
                file.close()
                time.sleep(0.01)
                continue
            with file:
                file.seek(0)
                holder = file.read().strip() or "unknown"
            raise StellaError(
                f"{path.parent} is in use by process {holder}; wait for it, stop it, or choose another folder"
            ) from error
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        file.close()  # its holder removed the file while we waited: lock the new one


def _close_locks() -> None:
    """In a forked child: a lock is held as long as any process has the open file."""
    for file in _locks:
        file.close()


os.register_at_fork(after_in_child=_close_locks)


def full_disk(error: BaseException | None) -> OSError | None:
    """The system's error about a full disk, if that is what an error is, or what caused it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def explain_full_disk(root: Path, again: str = "free some space and run again") -> Iterator[None]:
    """Turn the system's error about a full disk into a sentence for the user."""
    try:
        yield
    except OSError as error:
        if full_disk(error) is not error:
            raise
        raise StellaError(f"{root} cannot be written ({error.strerror}); {again}") from error

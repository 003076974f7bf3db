"""Shards and packed arrays behind an address, as s3://BUCKET/FOLDER, read through a cache on this machine.

JSON files (indexes, settings) are copied when an address is opened, and again once they have changed. Of larger files
those blocks are kept that are read. Processes share the cache: one of them downloads a block, the others wait for it.
A tenth of the disk stays free: what the cache has no room for is read from the address each time.

`STELLA_CACHE` names the folder of the cache, which may be deleted whenever no run uses it.
"""

import errno
import hashlib
import io
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from stella.data.workers import not_counted
from stella.errors import StellaError, require
from stella.files import encoded, is_address, located, lock, publish, read_json, write_bytes, write_json

BLOCK = 8 << 20  # bytes
FREE = 0.1  # share of the disk that the cache leaves
WAITS = (1.0, 4.0, 16.0)  # seconds before a download is tried again
AT_ONCE = 256  # small files
LISTING, BLOCKS = ".listing", ".blocks"


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stella"
    return Path(os.environ.get("STELLA_CACHE") or default).absolute()


@dataclass(frozen=True)
class Disk:
    """A folder of this machine."""

    folder: Path

    @property
    def place(self) -> str:
        return str(self.folder)

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def open(self, name: str) -> "Local":
        return Local(self.folder / name)


@dataclass(frozen=True)
class Mirror:
    """A folder at an address as it was when it was opened."""

    place: str  # its address
    folder: Path  # of its small files
    files: dict[str, tuple[int, str]]  # the bytes of each, and what changes with its content

    def size(self, name: str) -> int:
        return self.open(name).size

    def open(self, name: str) -> "Remote":
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.place}/{name}")
        size, version = self.files[name]
        return Remote(f"{self.place}/{name}", self.folder / BLOCKS / name / version, size)


def opened(place: Path | str) -> Disk | Mirror:
    """A folder of this machine or at an address: its small files are in `folder`, the others can be opened."""
    return mirrored(str(place)) if is_address(place) else Disk(Path(place))


def mirrored(address: str) -> Mirror:
    """The folder at an address, its small files copied to the cache."""
    there: Any = located(address)
    address, root = address.rstrip("/"), there.path.rstrip("/")
    parts = [there.protocol or "file", *(part for part in root.split("/") if part)]
    folder = cache_folder().joinpath(*(quote(part, safe=" ") if part.strip(".") else f"%{part}" for part in parts))
    with _explained(address, folder):
        there.fs.invalidate_cache()
        files = {
            info["name"].rpartition("/")[2]: (int(info["size"]), _version(info))
            for info in there.fs.ls(root, detail=True)
            if info["type"] == "file"
        }
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / ".lock", wait=True):
            _refresh(there.fs, root, folder, files)
    return Mirror(address, folder, files)


def _version(info: dict[str, Any]) -> str:
    """A text that changes with what an address says of a file: its time, size, checksum."""
    text = repr(sorted((key, str(value)) for key, value in info.items() if key != "name"))
    return hashlib.blake2b(encoded(text), digest_size=8).hexdigest()


def _refresh(fs: Any, root: str, folder: Path, files: dict[str, tuple[int, str]]) -> None:
    """Copy small files that are new or have changed, and remove what is there no more."""
    known: dict[str, Any] = {}
    with suppress(StellaError):  # none yet, or damaged
        known = read_json(folder / LISTING)
    small = {name: list(about) for name, about in files.items() if name.endswith(".json")}
    for gone in known.keys() - small.keys():
        (folder / gone).unlink(missing_ok=True)
    fresh = [name for name, about in small.items() if known.get(name) != about or not (folder / name).is_file()]
    for begin in range(0, len(fresh), AT_ONCE):
        paths = {f"{root}/{name}": folder / name for name in fresh[begin : begin + AT_ONCE]}
        for path, data in fs.cat(list(paths)).items():
            write_bytes(paths[path], data)
    if known != small:
        write_json(folder / LISTING, small)
    for blocks in (folder / BLOCKS).glob("*/*"):
        if files.get(blocks.parent.name, (0, ""))[1] != blocks.name:
            shutil.rmtree(blocks, ignore_errors=True)


@contextmanager
def _explained(address: str, folder: Path) -> Iterator[None]:
    """What a store or the cache raises, as a sentence. Stores raise all kinds of exceptions."""
    try:
        yield
    except StellaError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and _is_ours(error):
            raise StellaError(
                f"the cache {folder} cannot be used ({error.strerror}); set STELLA_CACHE to a folder of yours with room"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise StellaError(f"{address} is not there; check the address") from error
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise StellaError(f"{address} cannot be read ({what}); check the network, and run again to resume") from error


def _is_ours(error: OSError) -> bool:
    """Whether the cache failed, not the store."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or Path(str(error.filename)).is_relative_to(cache_folder())


class Local(io.FileIO):
    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def read_at(self, into: memoryview, at: int) -> int:
        return os.preadv(self.fileno(), [into], at)


class Remote(io.RawIOBase):
    """A file behind an address. What was read of it once comes from the cache."""

    def __init__(self, address: str, folder: Path, size: int) -> None:
        self.address, self.folder, self.size = address, folder, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        got = self.read_at(memoryview(buffer).cast("B"), self._at)
        self._at += got
        return got

    def read_at(self, into: memoryview, at: int) -> int:
        """Read into memory what is at this place; returns the number of bytes, 0 only at the end of the file."""
        number, begin = divmod(at, BLOCK)
        into = into[: max(0, min(BLOCK - begin, self.size - at))]
        if not into:
            return 0
        block = self._block(number)
        if block is None:
            into[:] = self._download(at, at + len(into))
            return len(into)
        with block:
            return os.preadv(block.fileno(), [into], begin)

    def _block(self, number: int) -> BinaryIO | None:
        """A block in the cache, downloaded unless it is there; None if there is no room for it."""
        path = self.folder / f"{number:06d}"
        with suppress(FileNotFoundError):
            return path.open("rb", buffering=0)
        with not_counted(), _explained(self.address, self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            disk = shutil.disk_usage(self.folder)
            if disk.free < FREE * disk.total:
                return None
            guard, part = path.with_suffix(".lock"), path.with_suffix(".part")
            with lock(guard, wait=True):
                if not path.exists():
                    part.write_bytes(self._download(number * BLOCK, min((number + 1) * BLOCK, self.size)))
                    publish(part, path)
                guard.unlink(missing_ok=True)
            return path.open("rb", buffering=0)

    def _download(self, begin: int, end: int) -> bytes:
        """These bytes of the file. What fails is tried again a few times."""
        fs, path = require("fsspec.core", "fsspec").url_to_fs(self.address)
        with not_counted(), _explained(self.address, self.folder):
            for wait in WAITS:
                with suppress(Exception):  # stores raise all kinds
                    return _all(fs.cat_file(path, start=begin, end=end), end - begin)
                time.sleep(wait)
            return _all(fs.cat_file(path, start=begin, end=end), end - begin)


def _all(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise OSError(f"it broke off after {len(data):,} of {size:,} bytes")
    return data

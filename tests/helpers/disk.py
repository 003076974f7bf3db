"""A disk that is full."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """No file may grow beyond `most` bytes: the system refuses it in the middle of a write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def own_disk(folder: Path, megabytes: int = 4) -> Iterator[Path]:
    """A folder that is a small disk of its own; needs root."""
    folder.mkdir(parents=True)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free; the file that does so may be deleted."""
    file = disk / "full"
    with file.open("wb", buffering=0) as written, suppress(OSError):
        while True:
            written.write(bytes(4096))
    return file

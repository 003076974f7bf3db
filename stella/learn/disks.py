"""Disks that are full or gone: how they are told from other errors, and what to do about them."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stella.errors import StellaError


class GoneError(StellaError):
    """A folder that was there is not: a disk that was unmounted. Whoever knows HOME says what to do."""


def is_there(root: str) -> bool:
    """Whether a path names anything that can be reached; of a mount that has died `Path.exists` raises the error."""
    try:
        Path(root).stat()
    except OSError:
        return False
    return True


def gone(root: str, device: int | None = None) -> bool:
    """Whether a folder or archive is not there, or is empty as the place of an unmounted disk is.

    An empty folder that is still on its `device` was emptied: it is there.
    """
    try:
        empty = not Path(root).is_file() and next(os.scandir(root), None) is None
        return empty and Path(root).stat().st_dev != device
    except OSError:
        return True


def refuse_gone(root: str, device: int) -> None:
    if gone(root, device):
        raise GoneError(f"{root} is gone")


def full(error: BaseException | None) -> OSError | None:
    """The system's error about a full disk, among the causes of an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error
        error = error.__cause__
    return None


@contextmanager
def explained(root: Path) -> Iterator[None]:
    """What to do about a disk that is full or gone."""
    try:
        yield
    except GoneError as error:
        raise StellaError(
            f"{error}; bring it back and run the same command again, or go on without this round: "
            f"stella learn {root} --drop"
        ) from error
    except (OSError, StellaError) as error:
        if (cause := full(error)) is None:
            raise
        raise StellaError(
            f"{root} cannot be written ({cause.strerror}); nothing is lost: free space and run the same command again"
        ) from error

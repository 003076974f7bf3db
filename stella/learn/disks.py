"""Disks that are full or gone: how they are told from other errors, and what to do about them."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stella.errors import StellaError
from stella.learn.items import GoneError


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

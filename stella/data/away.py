"""A destination behind an address, as s3://BUCKET/FOLDER: shards are made in a folder here and put there whole.

A shard counts once its index is there, which is put last. What a restart needs (the plan, the skipped clips, the
indexes) is fetched when a preparation begins. An address has no locks as files have: `.lock` there says who writes and
when it was last alive.
"""

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stella.errors import StellaError
from stella.files import located

LOCK = ".lock"
ALIVE = 1800.0  # seconds after which a writer that gave no sign of life is taken for dead


class Away:
    """The folder `there`, and the folder `here` where its files are made."""

    def __init__(self, there: Path, here: Path) -> None:
        self.there, self.here = there, here
        self.who = f"{socket.gethostname()}:{os.getpid()}:{time.time_ns()}"

    @property
    def _fs(self) -> tuple[Any, str]:
        place: Any = self.there
        return place.fs, place.path.rstrip("/")

    def fetch(self, of: str = "") -> None:
        """Bring what a preparation needs to go on: everything but the shards; only names that begin with `of`."""
        fs, root = self._fs
        if found := fs.glob(f"{root}/{of}*.json*"):
            fs.get(found, [str(self.here / path.rpartition("/")[2]) for path in found])

    def put(self, *names: str) -> None:
        fs, root = self._fs
        fs.makedirs(root, exist_ok=True)
        for name in names:
            if (self.here / name).exists():
                fs.put_file(str(self.here / name), f"{root}/{name}")

    def put_shard(self, name: str) -> None:
        """Put a shard and its index, and remove the shard here."""
        self.put(f"{name}.tar", f"{name}.json")
        (self.here / f"{name}.tar").unlink()

    def remove(self, name: str) -> None:
        fs, root = self._fs
        if fs.exists(f"{root}/{name}"):
            fs.rm_file(f"{root}/{name}")

    def is_empty(self) -> bool:
        fs, root = self._fs
        return not fs.exists(root) or not fs.glob(f"{root}/shard-*")

    def beat(self) -> None:
        """Say that this writer is alive. Another that took its place ends it."""
        if (other := self._holder()) and other != self.who:
            raise StellaError(f"{self.there} was taken over by {other}; stop one of the two")
        fs, root = self._fs
        fs.makedirs(root, exist_ok=True)
        fs.pipe_file(f"{root}/{LOCK}", json.dumps({"who": self.who, "at": time.time()}).encode())

    def _holder(self) -> str | None:
        fs, root = self._fs
        fs.invalidate_cache()
        if not fs.exists(f"{root}/{LOCK}"):
            return None
        try:
            found = json.loads(fs.cat_file(f"{root}/{LOCK}"))
            who, at = str(found["who"]), float(found["at"])
        except (ValueError, KeyError, TypeError):
            return None
        return who if time.time() - at < ALIVE and not _is_dead(who) else None


def _is_dead(who: str) -> bool:
    """Whether a writer was a process of this machine that has ended."""
    host, _, rest = who.partition(":")
    try:
        os.kill(int(rest.partition(":")[0]), 0)
    except ProcessLookupError:
        return host == socket.gethostname()
    except (ValueError, OverflowError, OSError):
        return False
    return False


@contextmanager
def away_from(address: str) -> Iterator[Away]:
    """A destination that nobody else writes to, with a folder here as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="stella-") as here:
        away = Away(located(address), Path(here))
        if other := away._holder():
            raise StellaError(
                f"{address} is in use by {other}; wait for it, or stop it and delete {LOCK} there if it is dead"
            )
        away.beat()
        try:
            away.fetch()
            yield away
        finally:
            if away._holder() == away.who:
                away.remove(LOCK)

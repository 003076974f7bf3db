"""Uploads on their way: in a folder of our own, under names of our own, deleted when they are answered."""

import asyncio
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stella.errors import StellaError
from stella.files import lock
from stella.serve.answers import HttpError

PREFIX = "stella-serve-"


@dataclass(frozen=True)
class Limits:
    """What is accepted from outside."""

    bytes: int = 50_000_000  # of an upload
    transfer: float = 60.0  # seconds in which an upload must have come
    waiting: int = 256  # uploads that are under way, and jobs that wait for a worker
    disk: int = 1_000_000_000  # bytes of all uploads under way
    seconds: float = 20.0  # of decoding and embedding one
    workers: int = 2


class Uploads:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.sizes: dict[Path, int] = {}  # bytes that have come, of each upload under way
        self._lock = ExitStack()
        _sweep(Path(tempfile.gettempdir()))
        self._make_folder()

    def _make_folder(self) -> None:
        self._lock.close()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock.enter_context(lock(self.folder / "lock"))

    def close(self) -> None:
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @asynccontextmanager
    async def received(self, body: AsyncIterator[bytes], length: int | None) -> AsyncIterator[Path]:
        """The file that a request's body was written to; it is deleted when the block ends."""
        if length is not None and length > self.limits.bytes:
            raise self._too_large()
        if len(self.sizes) >= self.limits.waiting:
            raise HttpError(503, "too many uploads are waiting; try again in a few seconds", retry=5)
        async with AsyncExitStack() as stack:
            try:
                if not (self.folder / "lock").exists():  # something has tidied up the folder of temporary files
                    self._make_folder()
                path = self.folder / uuid.uuid4().hex
                self.sizes[path] = 0
                stack.callback(self._release, path)
                async with asyncio.timeout(self.limits.transfer):
                    size = await self._write(path, body)
            except TimeoutError:
                raise HttpError(408, f"the upload took longer than {self.limits.transfer:g} s; try again") from None
            except OSError as error:
                raise HttpError(507, "the server has no room for the upload; try again later", retry=30) from error
            if not size:
                raise HttpError(422, "the upload is empty; give a sound or a video")
            yield path

    async def _write(self, path: Path, body: AsyncIterator[bytes]) -> int:
        with path.open("xb") as file:
            async for chunk in body:
                self.sizes[path] += len(chunk)
                if self.sizes[path] > self.limits.bytes:
                    raise self._too_large()
                if sum(self.sizes.values()) > self.limits.disk:
                    raise HttpError(503, "too many uploads are waiting; try again in a few seconds", retry=5)
                file.write(chunk)
        return self.sizes[path]

    def _release(self, path: Path) -> None:
        del self.sizes[path]
        with suppress(OSError):
            path.unlink()

    def _too_large(self) -> HttpError:
        return HttpError(
            413, f"the upload has more than {self.limits.bytes / 1e6:g} MB; give a shorter or smaller file"
        )


def _sweep(parent: Path) -> None:
    """Remove the folders of servers that were killed: nobody holds their locks."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, StellaError):
            status = folder.lstat()
            young = time.time() - status.st_mtime < 60  # it may not have its lock yet
            if folder.is_symlink() or status.st_uid != os.getuid() or young:
                continue
            with lock(folder / "lock"):
                shutil.rmtree(folder)

"""What the routes share: the index, its model's version, the workers, uploads, and what was made before."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stella.errors import StellaError, number_of
from stella.search.index import Index, Moment, NoMomentError
from stella.serve.answers import HttpError, place_of, state_tree
from stella.serve.jobs import Jobs, Log
from stella.serve.learner import Attached
from stella.serve.uploads import Limits, Uploads
from stella.serve.versions import Versions, Weights
from stella.serve.work import Warm

WATCH = 2.0  # seconds after which the index and its model are looked at again


class Served:
    """Files and vectors of the index are only read."""

    def __init__(self, index: Path | str, model: str | None, limits: Limits, log: Log = print) -> None:
        self.index = Index(index, shown=Path(index).resolve().name)  # on the page: no folders
        self.limits, self.log = limits, log
        self.versions = Versions(self.index, model)
        self.uploads = Uploads(limits)
        self.jobs = Jobs(limits.workers, limits.waiting, limits.seconds, log)
        self.jobs.warm(Warm(self.weights()))
        self.cache = Cache()
        self._learner: Attached | None = None
        self._state: tuple[float, dict[str, Any]] = (-WATCH, {})

    def close(self) -> None:
        self.jobs.close()
        self.uploads.close()

    async def watch(self) -> None:
        """Notice a refreshed index and a model that went on learning."""
        said = ""
        while True:
            await asyncio.sleep(WATCH)
            try:
                await asyncio.to_thread(self.versions.look)
                problem = ""
            except Exception as error:  # also of a race with a writer: the next look may succeed
                problem = str(error) if isinstance(error, StellaError) else f"{type(error).__name__}: {error}"
            if problem != said:
                said = problem
                self.log(problem or "the index can be read again")

    def weights(self) -> Weights:
        found = self.versions.now.weights
        if found is None:
            raise HttpError(503, "the weights that made this index are gone; ask for stella index --refresh", retry=60)
        return found

    def stale(self) -> str:
        return self.versions.now.stale

    def learner(self) -> Attached:
        """The learner that made the index, as it is now."""
        if (home := self.versions.home()) is None:
            raise HttpError(404, "no learner made this index")
        if self._learner is None or self._learner.root != Path(home):
            self._learner = Attached(home)
        return self._learner

    def state(self) -> dict[str, Any]:
        """Counted every few seconds: an index may have millions of windows."""
        if time.monotonic() - self._state[0] > WATCH:
            found, stale = self.index.state(), self.stale()
            files = number_of(found.stale, "file")
            if found.target:
                stale = f"the index is changing to a newer model, {files} to go; the older one answers"
            elif found.stale and not stale:
                stale = f"the vectors of {files} are of another state of the learner; queries are translated"
            limits = {key: asdict(self.limits)[key] for key in ("bytes", "seconds")}
            tree = state_tree(found, self.index.bad(), stale, limits)
            tree |= {"learner": self.versions.home() is not None, "caveat": self.index.caveat()}
            self._state = time.monotonic(), tree
        return self._state[1]

    def moment(self, id: str) -> Moment:
        try:
            return self.index.moment(place_of(id))
        except NoMomentError as error:
            raise HttpError(404, str(error)) from error


class Cache:
    """What was made for moments: the last used are kept, and each is made once for all who ask at the same time.

    When all who asked are gone, it is not made.
    """

    def __init__(self, most: int = 1 << 26) -> None:
        self.most, self.size = most, 0
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()
        self._coming: dict[Hashable, asyncio.Future[bytes]] = {}
        self._asking: Counter[Hashable] = Counter()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[bytes]]) -> bytes:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._coming:
            self._coming[key] = asyncio.ensure_future(self._make(key, make))
        self._asking[key] += 1
        try:
            return await asyncio.shield(self._coming[key])
        finally:
            self._asking[key] -= 1
            if not self._asking[key]:
                del self._asking[key]
                self._coming.pop(key).cancel()

    async def _make(self, key: Hashable, make: Callable[[], Awaitable[bytes]]) -> bytes:
        data = await make()
        self._kept[key] = data
        self.size += len(data)
        while self.size > self.most:
            self.size -= len(self._kept.popitem(last=False)[1])
        return data

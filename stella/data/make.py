"""Makes the shards of planned groups: workers decode and compress clips; this process reads archives and writes.

Clips are written in the order of their group. A clip is known once it is in a shard or among the skipped ones; a second
attempt repeats those that are not.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from stella.clip import Labels
from stella.data.cut import Cutter, Settings, starts
from stella.data.material import End, Job, Unfetched
from stella.data.plan import Group
from stella.data.skipped import Skipped
from stella.data.workers import WORKER_GB, Done, Lost, Pool
from stella.data.writer import ShardWriter
from stella.errors import ClipError
from stella.files import is_remote

AHEAD = 128  # clips that wait for one before them

Work = tuple[Group, Iterable[Job | End | Unfetched]]


@dataclass(frozen=True)
class Means:
    """What a machine gives to it."""

    workers: int = 1
    time_limit: float = 60.0  # seconds for a clip
    worker_gb: float = WORKER_GB


@dataclass(frozen=True)
class Known:
    """A clip that was made or skipped before."""


@dataclass(frozen=True)
class Ended:
    """The last clip of a group was before this."""


@dataclass(eq=False)
class _Place:
    """A place in the order of writing, and what is to be written there once it is known."""

    job: Job | None
    result: bytes | ClipError | Known | End | Group | Ended | None = None


class Maker:
    def __init__(
        self,
        root: Path,
        settings: Settings,
        writer: ShardWriter,
        skipped: Skipped,
        ended: Callable[[Group], None] = lambda group: None,
        wrote: Callable[[int], None] = lambda clips: None,
        given: Collection[str] = (),
        waiting: Collection[str] = (),
    ) -> None:
        """`root` is where the files of jobs are. `ended` is called after the last clip of a group, `wrote` with the
        number of clips made or skipped so far. `given` are clips that others make. `waiting` are the names of
        all groups to be made: a clip belongs to the first of them."""
        self.root, self.settings, self.writer, self.skipped = root, settings, writer, skipped
        self.ended, self.wrote, self.waiting = ended, wrote, waiting
        self.clips = 0
        self.line: deque[_Place] = deque()  # in the order of writing
        self.ready: deque[_Place] = deque()  # to be submitted
        self.given: dict[str, str | None] = dict.fromkeys(given)  # the file of each clip, where it is known
        self.group, self.position = Group(-1), 0  # that is being written

    def work(self, groups: Iterable[Work], means: Means) -> None:
        feed = self._feed(groups)
        if not self._fetch(feed, means.workers):
            return
        cutter = Cutter(self.root, self.settings, means.time_limit)
        with closing(Pool(cutter, means.workers, 1, 1.5 * means.time_limit, means.worker_gb)) as pool:
            keys, running = count(), dict[int, _Place]()
            while self._fetch(feed, means.workers) or pool.running:
                while self.ready and pool.running < pool.capacity:
                    key, place = next(keys), self.ready.popleft()
                    running[key] = place
                    pool.submit(key, place.job)
                self._fetch(feed, means.workers)  # while they work
                event = pool.wait()
                self._finish(event, running.pop(event.key))

    def _feed(self, groups: Iterable[Work]) -> Iterator[_Place]:
        for group, jobs in groups:
            yield _Place(None, group)
            before: set[str] = set()  # clips of this group
            for each in jobs:
                if isinstance(each, End):
                    yield _Place(None, each)
                else:
                    yield self._place(each, group, twice=each.id in before)
                    before.add(each.id)
            yield _Place(None, Ended())

    def _place(self, each: Job | Unfetched, group: Group | None = None, twice: bool = False) -> _Place:
        shard = self.writer.ids.get(each.id, "")
        if group is not None and group.name < shard[:12] in self.waiting:  # made by a cluster, ahead of its turn
            self.writer.drop(shard)
        if each.id in self.writer.ids or each.id in self.skipped or each.id in self.given:
            return self._again(each, twice) if isinstance(each, Job) else _Place(None, Known())
        self.given[each.id] = each.file if isinstance(each, Job) else None
        if isinstance(each, Job):
            return _Place(each)
        return _Place(Job(each.id, each.error.path, 0.0, Labels()), each.error)

    def _again(self, job: Job, twice: bool) -> _Place:
        """A clip that is known. One from elsewhere, or `twice` in an archive, may be of another video and is listed."""
        before = self.writer.sources.get(job.id) or self.given.get(job.id) or job.file
        if job.row is not None or (before == job.file and not twice) or job.file in self.skipped:
            return _Place(None, Known())
        remedy = f"{before} has it too: rename this one if it is another video"
        return _Place(replace(job, id=job.file, data=None), ClipError(self.root / job.file, "name of another", remedy))

    def _fetch(self, feed: Iterator[_Place], most: int) -> bool:
        """Take jobs until `most` are ready or too many results wait; whether any is ready."""
        while len(self.ready) < most and len(self.line) < AHEAD + most and (place := next(feed, None)) is not None:
            self.line.append(place)
            if place.result is None:
                self.ready.append(place)
            elif self.line[0] is place:
                self._write()
        return bool(self.ready)

    def _finish(self, event: Done | Lost, place: _Place) -> None:
        job = event.job
        if isinstance(event, Lost):
            what = "time limit" if event.hung else f"worker died ({event.exitcode})"
            place.result = ClipError(self.root / job.file, what, "re-encode the video or leave it out")
        elif isinstance(event.result, float):
            self._split(place, job, event.result)
        else:
            place.result = event.result
        if place.job is not None:  # it is not needed for writing, and may be large
            place.job = replace(place.job, data=None)
        self._write()

    def _split(self, place: _Place, job: Job, duration: float) -> None:
        """Put the clips of a video into its place."""
        clips = [
            self._place(replace(job, id=f"{job.id}@{start:.3f}", start=start))
            for start in starts(duration, self.settings.seconds)
        ]
        at = self.line.index(place)
        del self.line[at]
        for new in reversed(clips):
            self.line.insert(at, new)
            if new.result is None:
                self.ready.appendleft(new)

    def _write(self) -> None:
        """Write what is known up to the first result that is not."""
        while self.line and (result := self.line[0].result) is not None:
            job = self.line.popleft().job
            if isinstance(result, Group):
                self.group, self.position = result, 0
            elif isinstance(result, Ended):
                self.writer.close()
                self.ended(self.group)
            elif isinstance(result, End):
                if result.error is not None:  # tried again once it has changed
                    self._list(result.archive, result.archive, result.error)
            else:
                self._put(job, result)

    def _put(self, job: Job | None, result: bytes | ClipError | Known) -> None:
        name = self.group.shard(self.position, self.settings.shard_clips)
        self.writer.turn(name)
        self.position += 1
        if isinstance(result, bytes):
            if self.writer.finished(name):  # a clip that failed when its shard was made
                self.writer.turn(self.writer.unused(self.group.name))
            self.writer.append(result)
        elif isinstance(result, ClipError) and job is not None:
            self._list(job.id, job.file, result)
        self.clips += not isinstance(result, Known)
        self.wrote(self.clips)

    def _list(self, id: str, file: str, error: ClipError) -> None:
        more = {"left_out": "option"} if error.reason in self.settings.leave.split(",") else {}
        self.skipped.add(id, error, source=file, stamp=stamp(self.root, file), **more)


def stamp(root: Path, source: object) -> str | None:
    """A text that changes with the content or permissions of a file, or of its archive; None if it is missing."""
    path = root / str(source)
    try:
        status: Any = (path.parent if path.parent.is_file() else path).stat()
    except OSError:
        return None
    return f"{status.st_size}:{status.st_mtime if is_remote(path) else status.st_ctime_ns}"

"""`stella prepare … --ray`: Ray spreads the groups of a plan over the machines of a cluster.

A task makes the shards of one group, each whole or not at all. A task whose machine dies is run again elsewhere, and
goes on after the shards that are there. This process plans, and notes what became of each group in the order of the
plan, so that everything is as one machine leaves it.
"""

import logging
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from stella.data.away import Away
from stella.data.cut import Settings
from stella.data.make import Maker, Means, Work
from stella.data.material import Job, Material
from stella.data.plan import Group
from stella.data.skipped import Skipped
from stella.data.writer import ShardWriter
from stella.errors import StellaError, require
from stella.files import Line

T = TypeVar("T")
LOCAL = "local"
ARCHIVE_CPUS = 4  # of a task that reads an archive: one reader keeps several decoders busy
RETRIES = 5  # of a task whose machine or process dies
AHEAD = 2  # tasks that wait for each processor


@dataclass(frozen=True)
class Made:
    """What became of the clips of a group."""

    clips: dict[str, str]  # the shard of each, by id
    skipped: list[Line]


@dataclass(frozen=True)
class Task:
    """Makes a group, in a process of Ray."""

    root: Path
    dst: Path
    settings: Settings
    means: Means
    group: Group
    jobs: list[Job]  # of files
    away: Path | None = None  # where shards go, if not to `dst`

    def __call__(self, material: Material | None, known: Collection[str]) -> Made:
        """`material` has the archive of the group; `known` clips are made or skipped in other groups."""
        if self.away is None:
            return self._make(ShardWriter(self.dst, of=self.group.name), material, known)
        with tempfile.TemporaryDirectory(prefix="stella-") as here:
            away = Away(self.away, Path(here))
            away.fetch(self.group.name)
            return self._make(ShardWriter(away.here, of=self.group.name, away=away), material, known)

    def _make(self, writer: ShardWriter, material: Material | None, known: Collection[str]) -> Made:
        skipped = Skipped()
        work: Iterable[Any] = self.jobs
        if material is not None:
            [archive] = [each for each in material.archives if material.name(each) == self.group.archive]
            work = material.unpacked(archive, self.settings.split)
        Maker(self.root, self.settings, writer, skipped, given=known).work([(self.group, work)], self.means)
        return Made(writer.ids, list(skipped.records.values()))


def make_on_ray(
    address: str,
    material: Material,
    settings: Settings,
    means: Means,
    groups: Collection[str],
    works: Iterable[Work],
    writer: ShardWriter,
    skipped: Skipped,
    ended: Callable[[Group], None],
    wrote: Callable[[int], None],
) -> None:
    """Make `works`, which are these groups, on the cluster at `address` (`local`: one of this machine, with
    `means.workers` processors)."""
    ray = require("ray", "ray")
    seen = {id for id, shard in writer.ids.items() if shard[:12] not in groups} | {str(id) for id in skipped.records}
    with cluster(address, means.workers):
        driver = _Driver(ray, material, settings, means, writer)
        driver.share(seen)
        total = 0
        for group, made in driver.run(works):
            if twice := {shard for id, shard in made.clips.items() if id in seen}:  # in an archive before this one too
                for shard in twice:
                    writer.drop(shard)
                made = driver.again(group, seen)
            for record in made.skipped:
                if record["id"] not in seen:
                    skipped.keep(record)
            seen |= {*made.clips, *(record["id"] for record in made.skipped)}
            for part in writer.root.glob(f"{group.name}*.part"):  # of one machine, before
                part.unlink()
            ended(group)
            total += len(made.clips) + len(made.skipped)
            wrote(total)


@contextmanager
def cluster(address: str, processors: int) -> Iterator[None]:
    """A connection to a cluster, or a cluster of this machine alone as long as the block lasts."""
    ray = require("ray", "ray")
    if ray.is_initialized():
        yield
        return
    try:
        if address == LOCAL:
            quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
            ray.init(address=LOCAL, num_cpus=processors, **quiet)
        else:
            ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StellaError(f"no Ray cluster answers at {address} ({error}); start one, or give --ray local") from error
    try:
        yield
    finally:
        ray.shutdown()


def result(ray: Any, reference: Any) -> Any:
    """What a task returned. What a user can cause is raised as on one machine."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, StellaError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        what = " ".join(str(error).split())[:200]
        raise StellaError(f"a task died {RETRIES + 1} times ({what}); run the same command again to resume") from error


def in_order(ray: Any, tasks: Iterable[tuple[T, Callable[[], Any]]]) -> Iterator[tuple[T, Any]]:
    """What tasks return, in their order. Each is submitted by calling it, while those before it run."""
    running: deque[tuple[T, Any]] = deque()
    waiting = iter(tasks)
    while True:
        most = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))  # machines come and go
        while len(running) < most and (task := next(waiting, None)) is not None:
            running.append((task[0], task[1]()))
        if not running:
            return
        name, reference = running.popleft()
        yield name, result(ray, reference)


class _Driver:
    """Submits groups and gives back what became of them, in their order."""

    def __init__(self, ray: Any, material: Material, settings: Settings, means: Means, writer: ShardWriter) -> None:
        self.ray, self.settings, self.means = ray, settings, means
        self.root, self.dst = material.root, writer.root
        self.away = writer.away.there if writer.away else None
        self.material = ray.put(material) if material.archives else None
        self.known: Any = None
        self.tasks: dict[int, Task] = {}
        self.remote = ray.remote(_call)

    def share(self, seen: Collection[str]) -> None:
        self.known = self.ray.put(frozenset(seen)), frozenset(seen)

    def run(self, works: Iterable[Work]) -> Iterator[tuple[Group, Made]]:
        submitted = ((work[0], lambda work=work: self._submit(*work)) for work in works)
        for group, made in in_order(self.ray, submitted):
            yield group, made
            del self.tasks[group.number]

    def again(self, group: Group, seen: Collection[str]) -> Made:
        found: Made = result(self.ray, self._start(self.tasks[group.number], frozenset(seen)))
        return found

    def _submit(self, group: Group, jobs: Iterable[Any]) -> Any:
        whole = group.archive is not None
        means = replace(self.means, workers=min(ARCHIVE_CPUS, self._largest()) if whole else 1)
        task = Task(self.root, self.dst, self.settings, means, group, [] if whole else list(jobs), self.away)
        self.tasks[group.number] = task
        reference, known = self.known
        return self._start(task, reference if whole else {job.id for job in task.jobs} & known)

    def _start(self, task: Task, known: Any) -> Any:
        whole = task.group.archive is not None
        remote = self.remote.options(num_cpus=task.means.workers, max_retries=RETRIES)
        return remote.remote(task, self.material if whole else None, known)

    def _largest(self) -> int:
        nodes = [node["Resources"].get("CPU", 0) for node in self.ray.nodes() if node["Alive"]]
        return max(1, int(max(nodes, default=1)))


def _call(task: Task, material: Material | None, known: Collection[str]) -> Made:
    return task(material, known)

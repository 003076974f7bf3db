"""Brings an index up to date with its sources; behind `stella index`. After a kill the same call continues.

Files are embedded one after the other. What is done is committed every second: first the vectors are forced to the
disk, then one transaction names them and replaces whatever the catalogue said of their files.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.progress import Progress

from stella.embed import Model
from stella.errors import ClipError, StellaError, skippable
from stella.search.asked import counts
from stella.search.catalogue import MODALITIES, Catalogue
from stella.search.sources import Item, Source, open_source
from stella.search.vectors import Writer

COMMIT_SECONDS = 1.0
COMMIT_WINDOWS = 4096

Window = tuple[int, int, float, float]  # shard, row, start, end


@dataclass
class Counts:
    """What an update did, in files."""

    added: int = 0
    redone: int = 0
    renamed: int = 0
    dropped: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # by reason: those that became bad now
    passed_over: dict[Path, str] = field(default_factory=dict)  # folders that cannot be listed, and why


@dataclass(frozen=True)
class Known:
    """What the catalogue says of a file."""

    id: int
    path: bytes
    size: int
    mtime: int
    ctime: int
    hash: bytes | None
    state: str
    embedded: bool  # by the model of this update
    older: int | None  # the model of its vectors, if that is an older state of the same learner

    def unchanged(self, item: Item) -> bool:
        """Size and time tell; a bad file is tried again also when its permissions have changed."""
        same = (self.size, self.mtime) == (item.size, item.mtime)
        return same and (self.state == "ok" or self.ctime == item.ctime)


@dataclass(frozen=True)
class Job:
    source: Source
    source_id: int
    item: Item
    known: Known | None


@dataclass(frozen=True)
class Result:
    job: Job
    hash: bytes | None
    same: bool  # as what the catalogue has: windows of other models stay
    windows: Sequence[Window] = ()
    error: ClipError | None = None


class Update:
    """One writer's work, under the index's lock. With `refresh` files with vectors of older states are embedded too."""

    def __init__(
        self, catalogue: Catalogue, model: Model, model_id: int, overlap: float, bar: Progress, refresh: bool = False
    ) -> None:
        self.catalogue, self.model, self.model_id, self.bar = catalogue, model, model_id, bar
        self.overlap, self.refresh = overlap, refresh
        serving, *older = catalogue.answering()
        self.older = [row.id for row in older] if serving.id == model_id else []
        self.writer = Writer(catalogue, model_id, model.dim)
        self.counts = Counts()

    def run(self, roots: Iterable[Path]) -> None:
        jobs = self._in_order([job for source, items in self._listed(roots) for job in self._plan(source, items)])
        shown = self.bar.add_task("indexing", total=len(jobs))
        pending: list[Result] = []
        committed = time.monotonic()
        try:
            with self.bar:
                for job in jobs:
                    pending.append(self._embed(job))
                    bad = sum(self.counts.bad.values())
                    self.bar.update(shown, advance=1, description=f"indexing, {bad} bad" if bad else "indexing")
                    windows = sum(len(result.windows) for result in pending)
                    if time.monotonic() - committed > COMMIT_SECONDS or windows > COMMIT_WINDOWS:
                        done, pending = pending, []  # first: an interrupted commit is not repeated below
                        self._commit(done)
                        committed = time.monotonic()
        finally:  # also after Ctrl-C
            self._commit(pending)
            self.writer.close()

    def _listed(self, roots: Iterable[Path]) -> list[tuple[Source, list[Item]]]:
        """What each folder holds. One that is gone or empty may only be unmounted: it is passed over, with its vectors.

        If that is so of all of them, it is an error.
        """
        found: list[tuple[Source, list[Item]]] = []
        for root in roots:
            try:
                source = open_source(root)
                found.append((source, list(source.items())))
            except StellaError as error:
                self.counts.passed_over[root] = str(error)
        if not found:
            raise StellaError("; ".join(self.counts.passed_over.values()))
        return found

    def _in_order(self, jobs: Sequence[Job]) -> list[Job]:
        """Files without vectors first; then those asked for most, and of equal ones those with the oldest vectors."""
        asked = counts(self.catalogue.root)

        def key(job: Job) -> tuple[bool, int, int]:
            known = job.known
            return (False, 0, 0) if known is None or known.older is None else (True, -asked[known.id], known.older)

        return sorted(jobs, key=key)

    def _plan(self, source: Source, items: Sequence[Item]) -> list[Job]:
        """What is to be embedded. Renamed and vanished files are dealt with at once."""
        source_id = self._source_id(source.root)
        known = self._known(source_id)
        jobs: list[Job] = []
        for item in items:
            found = known.pop(os.fsencode(item.path), None)
            if (
                found
                and found.state != "gone"
                and found.unchanged(item)
                and (found.state == "bad" or self._done(found))
            ):
                continue
            jobs.append(Job(source, source_id, item, found))
        lost = [file for file in known.values() if file.state != "gone"]
        renamed = _renamed(jobs, lost)
        lost = [file for file in lost if file.id not in {other.id for other in renamed.values()}]
        if renamed or lost:
            with self.catalogue.change() as db:
                for job, file in renamed.items():
                    if job.known:  # a file of that name is gone
                        db.execute("DELETE FROM files WHERE id = ?", (job.known.id,))
                    label = os.fsencode(job.item.label) if job.item.label else None
                    values = (os.fsencode(job.item.path), job.item.mtime, job.item.ctime, label, file.id)
                    db.execute("UPDATE files SET path = ?, mtime = ?, ctime = ?, label = ? WHERE id = ?", values)
                gone = [(file.id,) for file in lost]
                db.executemany("DELETE FROM windows WHERE file = ?", gone)
                db.executemany("UPDATE files SET state = 'gone', reason = NULL WHERE id = ?", gone)
        self.counts.renamed += len(renamed)
        self.counts.dropped += len(lost)
        stale = [replace(job, known=file) for job, file in renamed.items() if not self._done(file)]
        return [job for job in jobs if job not in renamed] + stale

    def _done(self, file: Known) -> bool:
        return file.embedded or (file.older is not None and not self.refresh)

    def _source_id(self, root: Path) -> int:
        key = (os.fsencode(root),)
        found = self.catalogue.db.execute("SELECT id FROM sources WHERE root = ?", key).fetchone()
        if found is None:
            with self.catalogue.change() as db:
                found = db.execute("INSERT INTO sources (root) VALUES (?) RETURNING id", key).fetchone()
        return int(found[0])

    def _known(self, source: int) -> dict[bytes, Known]:
        rows = self.catalogue.db.execute(
            "SELECT id, path, size, mtime, ctime, hash, state, EXISTS (SELECT 1 FROM windows JOIN shards "
            "ON shards.id = windows.shard WHERE windows.file = files.id AND shards.model = ?), "
            "(SELECT min(shards.model) FROM windows JOIN shards ON shards.id = windows.shard "
            f"WHERE windows.file = files.id AND shards.model IN ({', '.join(map(str, self.older))})) "
            "FROM files WHERE source = ?",
            (self.model_id, source),
        )
        return {row[1]: Known(*row) for row in rows}

    def _embed(self, job: Job) -> Result:
        item, known = job.item, job.known
        digest = job.source.digest(item)
        same = known is not None and known.state == "ok" and digest is not None and digest == known.hash
        if same and known and known.embedded:  # only its time has changed
            return Result(job, digest, same)
        try:
            with skippable(item.path):
                both = job.source.embed(self.model, item, self.overlap)
            parts = [(modality, part) for modality, part in zip(MODALITIES, both, strict=True) if part is not None]
            if not any(len(part.vectors) for _, part in parts):
                raise ClipError(item.path, "no windows", "it is too short: leave it out")
            if not all(bool(part.vectors.isfinite().all()) for _, part in parts):
                raise ClipError(item.path, "non-finite vectors", "check the model's weights")
        except ClipError as error:
            self.counts.bad[error.reason] += 1
            return Result(job, digest, False, error=error)
        if known is None or known.state != "ok":
            self.counts.added += 1
        else:
            self.counts.redone += 1
        windows: list[Window] = []
        for modality, part in parts:
            places = self.writer.append(modality, part.vectors)
            times = zip(part.start.tolist(), part.end.tolist(), strict=True)
            windows += [(*place, *span) for place, span in zip(places, times, strict=True)]
        return Result(job, digest, same, windows)

    def _commit(self, results: Sequence[Result]) -> None:
        if not results:
            return
        grown = self.writer.sync()
        with self.catalogue.change() as db:
            for result in results:
                item, error = result.job.item, result.error
                (file,) = db.execute(
                    "INSERT INTO files (source, path, size, mtime, ctime, hash, label, state, reason) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (source, path) DO UPDATE SET "
                    "size = excluded.size, mtime = excluded.mtime, ctime = excluded.ctime, hash = excluded.hash, "
                    "label = excluded.label, state = excluded.state, reason = excluded.reason RETURNING id",
                    (
                        *(result.job.source_id, os.fsencode(item.path), item.size, item.mtime, item.ctime, result.hash),
                        os.fsencode(item.label) if item.label else None,
                        "bad" if error else "ok",
                        f"{error.reason}; {error.remedy}" if error else None,
                    ),
                ).fetchone()
                replaced = result.windows and result.job.known and result.job.known.older is not None
                if not result.same or replaced:
                    db.execute("DELETE FROM windows WHERE file = ?", (file,))
                rows = [(shard, row, file, start, end) for shard, row, start, end in result.windows]
                db.executemany("INSERT INTO windows (shard, row, file, start, end) VALUES (?, ?, ?, ?, ?)", rows)
            db.executemany("UPDATE shards SET rows = ? WHERE id = ?", grown)


def _renamed(jobs: Sequence[Job], lost: Sequence[Known]) -> dict[Job, Known]:
    """New paths whose content is that of a vanished file; only files of the same size are read."""
    by_size: dict[int, list[Known]] = {}
    for file in lost:
        if file.state == "ok" and file.hash:
            by_size.setdefault(file.size, []).append(file)
    found: dict[Job, Known] = {}
    for job in jobs:
        rivals = by_size.get(job.item.size, []) if job.known is None or job.known.state == "gone" else []
        digest = job.source.digest(job.item) if rivals else None
        match = next((file for file in rivals if file.hash == digest), None)
        if match:
            rivals.remove(match)
            found[job] = match
    return found

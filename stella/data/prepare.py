"""`stella prepare SRC DST`: writes videos as shards, in parallel. After a kill the same command continues.

Workers decode and compress clips; only the parent writes. A clip is done once it is in a shard or in `skipped.jsonl`,
so a restart repeats only the clips in flight. A skipped video is tried again when its file has changed (content or
permissions) or its line is removed from `skipped.jsonl`.
"""

import math
import os
import time
from collections import deque
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stella.clip import SAMPLE_RATE, Labels
from stella.config import differences
from stella.data.folder import find_videos, read_labels
from stella.data.shards import PREPARED, ShardWriter, sample
from stella.data.skipped import Skipped, in_words
from stella.data.workers import WORKER_GB, Done, Lost, Pool, Tick
from stella.errors import ClipError, StellaError, skippable
from stella.files import explain_full_disk, lock, read_json, sweep, write_json
from stella.media.decode import read_cut, read_duration
from stella.media.files import Limits

SHORTEST_TAIL = 1.0  # seconds: a shorter rest of a split video is dropped
MOST_CLIPS = 10_000  # of one video: 28 hours of clips of 10 seconds


@dataclass(frozen=True)
class Settings:
    """What all clips of a folder have in common."""

    seconds: float
    split: bool
    fps: float
    size: int
    strict: bool = True  # skip clips that FFmpeg finds damaged


@dataclass(frozen=True)
class Summary:
    clips: int  # in the folder now
    added: int  # by this run
    skipped: dict[str, int]  # by reason
    bytes: int
    seconds: float
    gone: tuple[str, ...] = ()  # files that clips in the folder were made of and that are there no more

    def __str__(self) -> str:
        text = f"{self.clips} clips ({self.added} new) in {self.bytes / 2**20:.1f} MiB, {self.seconds:.0f} s"
        skipped = f"skipped: {in_words(self.skipped)} (see skipped.jsonl)" if self.skipped else "none skipped"
        named = f"{', '.join(self.gone[:5])}{' …' if len(self.gone) > 5 else ''}"
        gone = f"; {len(self.gone)} files are gone whose clips remain: {named}" if self.gone else ""
        return f"{text if self.clips else 'no clip could be used'}; {skipped}{gone}"


@dataclass(frozen=True)
class Job:
    id: str
    file: str
    start: float | None  # None: ask how long the video is
    labels: Labels


def prepare(
    src: Path | str,
    dst: Path | str,
    *,
    labels_csv: Path | str | None = None,
    seconds: float = 10.24,
    split: bool = False,
    fps: float = 8.0,
    size: int = 256,
    workers: int | None = None,
    shard_bytes: int = 256 * 2**20,
    time_limit: float = 60.0,
    strict: bool = True,
    worker_gb: float = WORKER_GB,
    progress: bool = True,
) -> Summary:
    """Write the videos under `src` as shards into `dst`, which `Shards` reads.

    Each video gives one clip (its first `seconds`), or with `split` consecutive clips to its end. A video that cannot
    be used, or that hangs or crashes its worker, is skipped and listed in `dst`/skipped.jsonl. Without `strict` damage
    that FFmpeg conceals is accepted.
    """
    positive = (seconds, fps, size, shard_bytes, time_limit, worker_gb, 1 if workers is None else workers)
    if not all(0 < value < math.inf for value in positive):
        raise StellaError(
            "seconds, fps, size, workers, shard_bytes, time_limit and worker_gb must all be above 0 and finite; "
            "correct them"
        )
    began = time.monotonic()
    src, dst, settings = Path(src), Path(dst), Settings(seconds, split, fps, size, strict)
    files = find_videos(src)
    table = read_labels(labels_csv, src, files)
    dst.mkdir(parents=True, exist_ok=True)
    with explain_full_disk(dst), lock(dst / ".lock"), progress_bar(progress) as bar:
        sweep(dst)
        _keep_settings(dst, settings)
        skipped = Skipped(dst / "skipped.jsonl")
        skipped.forget(lambda record: record.get("stamp") != _stamp(src / str(record.get("source"))))
        writer = ShardWriter(dst, shard_bytes)
        before = len(writer.ids)
        run = _Run(src, settings, writer, skipped, bar)
        run.plan([Job(file, file, None if split else 0.0, table.get(file, Labels())) for file in files])
        run.work(workers or os.cpu_count() or 1, time_limit, worker_gb)
        writer.close()
    total = sum(shard.stat().st_size for shard in dst.glob("shard-*.tar"))
    clips = len(writer.ids)
    gone = tuple(sorted(writer.sources - set(files)))
    return Summary(clips, clips - before, skipped.counts, total, time.monotonic() - began, gone)


class _Run:
    """The parent's side: the jobs that are left, and what becomes of their results."""

    def __init__(self, src: Path, settings: Settings, writer: ShardWriter, skipped: Skipped, bar: Progress) -> None:
        self.src, self.settings, self.writer, self.skipped, self.bar = src, settings, writer, skipped, bar
        self.left: deque[Job] = deque()
        self.done = self.total = 0
        self.shown = bar.add_task("preparing", total=None)

    def plan(self, jobs: list[Job]) -> None:
        """Add those jobs that are not done."""
        left = [job for job in jobs if job.id not in self.writer.ids and job.id not in self.skipped]
        self.left += left
        self.done += len(jobs) - len(left)
        self.total += len(jobs)

    def work(self, workers: int, time_limit: float, worker_gb: float) -> None:
        if not self.left:
            return
        cutter = _Cutter(self.src, self.settings, time_limit)
        with closing(Pool(cutter, workers, 1, 1.5 * time_limit, worker_gb)) as pool:
            keys = count()
            while self.left or pool.running:
                while self.left and pool.running < pool.capacity:
                    pool.submit(next(keys), self.left.popleft())
                self._finish(pool.wait())

    def _finish(self, event: Done | Lost) -> None:
        job, error = event.job, None
        if isinstance(event, Lost):
            what = "time limit" if event.hung else f"worker died ({event.exitcode})"
            error = ClipError(self.src / job.file, what, "re-encode the video or leave it out")
        elif isinstance(event.result, ClipError):
            error = event.result
        elif isinstance(event.result, bytes):
            self.writer.append(event.result)
        else:
            starts = _starts(event.result, self.settings.seconds)
            self.plan([replace(job, id=f"{job.file}@{start:.3f}", start=start) for start in starts])
        if error:
            self.skipped.add(job.id, error, source=job.file, stamp=_stamp(self.src / job.file))
        self.done += 1
        text = f"preparing, {len(self.skipped)} skipped" if len(self.skipped) else "preparing"
        self.bar.update(self.shown, completed=self.done, total=self.total, description=text)


@dataclass(frozen=True)
class _Cutter:
    """The worker's side: the length of a video, or a clip of it as the bytes of a sample."""

    src: Path
    settings: Settings
    time_limit: float  # seconds, checked by the decoder; the pool kills a worker that exceeds it by half

    def __call__(self, job: Job, tick: Tick) -> bytes | float | ClipError:
        tick(0)
        path = self.src / job.file
        try:
            with skippable(path):
                return self._cut(job, path)
        except ClipError as error:
            return error

    def _cut(self, job: Job, path: Path) -> bytes | float | ClipError:
        s = self.settings
        if job.start is None:
            duration = read_duration(path, time_limit=self.time_limit)
            if duration is None or duration <= 0:
                return ClipError(path, "unknown length", "it holds no packets with times: remux it or leave it out")
            if duration / s.seconds > MOST_CLIPS:
                remedy = f"it lasts {duration:,.0f} s, more than {MOST_CLIPS:,} clips: cut it or give longer clips"
                return ClipError(path, "too many clips", remedy)
            return duration
        frames, waveform = read_cut(
            path, job.start, s.seconds, s.fps, s.size, time_limit=self.time_limit, limits=Limits(s.strict)
        )
        meta = {
            "id": job.id,
            "source": job.file,
            "start": job.start,
            "duration": max(len(frames) / s.fps, len(waveform) / SAMPLE_RATE),
            "label": job.labels.name,
            "task": job.labels.task,
        }
        return sample(meta, frames, waveform, s.fps)


def _starts(duration: float, seconds: float) -> list[float]:
    """Start times of the consecutive clips of a video."""
    whole = int(duration / seconds + 1e-6)
    tail = duration - whole * seconds
    return [round(k * seconds, 3) for k in range(whole + (tail >= SHORTEST_TAIL or not whole))]


def _stamp(path: Path) -> str | None:
    """A text that changes with the file's content or permissions; None for a missing file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return f"{status.st_size}:{status.st_ctime_ns}"


def _keep_settings(dst: Path, settings: Settings) -> None:
    path = dst / PREPARED
    if not path.exists():
        if strange := next(dst.glob("shard-*"), None):
            raise StellaError(f"{strange} was not written by stella prepare; choose another folder")
        write_json(path, asdict(settings))
    elif changed := differences({"strict": True} | read_json(path), asdict(settings)):
        raise StellaError(
            f"{dst} was filled with other settings: {'; '.join(changed)}; use the same, or another folder"
        )


def progress_bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not shown)

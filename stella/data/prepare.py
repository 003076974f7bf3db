"""`stella prepare SRC DST`: writes videos as shards, in parallel. After a kill the same command continues.

Workers decode and compress clips; only the parent reads archives and writes. Clips are written in the order of the
source, so that a run that was killed and continued leaves the same bytes as an undisturbed one. A clip is done once it
is in a shard or in `skipped.jsonl`; a restart repeats the clips that were not. A skipped video is tried again when its
file has changed (content or permissions) or its line is removed from `skipped.jsonl`.
"""

import hashlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from stella.clip import SAMPLE_RATE, Labels
from stella.config import differences
from stella.data.accounts import Summary, counted, dry_run, leave_out, list_missing, write_listed
from stella.data.archives.rows import SECONDS
from stella.data.lengths import ENOUGH
from stella.data.material import End, Job, Material, Unfetched, recognise
from stella.data.shards import PREPARED, ShardWriter, sample
from stella.data.skipped import Skipped
from stella.data.workers import WORKER_GB, Done, Lost, Pool, Tick
from stella.errors import ClipError, StellaError, skippable
from stella.files import Lines, explain_full_disk, lock, read_json, read_lines, sweep, write_json
from stella.media.decode import read_cut, read_duration
from stella.media.files import Limits, in_memory
from stella.media.odd import SILENT, STILL, oddities
from stella.media.stills import read_picture, read_sound, scaled

SHORTEST_TAIL = 1.0  # seconds: a shorter rest of a split video is dropped
MOST_CLIPS = 10_000  # of one video: 28 hours of clips of 10 seconds
AHEAD = 128  # clips that wait for one before them
SAID_AFTER = 60.0  # seconds of work after which it says how long the rest will take
ARCHIVES = "archives.jsonl"  # the archives that were read to their end
SHORT = "short"
ODD = (STILL, SILENT, SHORT)


@dataclass(frozen=True)
class Settings:
    """What all clips of a folder have in common."""

    seconds: float
    split: bool
    fps: float
    size: int
    strict: bool = True  # skip clips that FFmpeg finds damaged
    leave: str = ""  # of ODD, joined by commas: clips that are left out
    csv: bool = False  # clips are those of a list, under its names


def prepare(
    src: Path | str,
    dst: Path | str,
    *,
    labels_csv: Path | str | None = None,
    csv: Sequence[Path | str] = (),
    only: str | None = None,
    leave: Sequence[str] = (),
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
    tell: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Write the videos at `src` (see `recognise`) as shards into `dst`, which `Shards` reads.

    Each video gives one clip (its first `seconds`), or with `split` consecutive clips to its end. With lists (`csv`)
    the clips are theirs. A video that cannot be used, or that hangs or crashes its worker, is skipped and listed in
    `dst`/skipped.jsonl. Without `strict` damage that FFmpeg conceals is accepted. Clips that are one of `leave` (still
    picture, silent, short) are left out. `tell` is given what was recognised, and how long it will take.
    """
    positive = (seconds, fps, size, shard_bytes, time_limit, worker_gb, 1 if workers is None else workers)
    if not all(0 < value < math.inf for value in positive):
        raise StellaError(
            "seconds, fps, size, workers, shard_bytes, time_limit and worker_gb must all be above 0 and finite; "
            "correct them"
        )
    if csv and split:
        raise StellaError("--split cuts whole videos and --csv names clips; give one of them")
    began = time.monotonic()
    material, dst = recognise(Path(src), labels_csv, [Path(file) for file in csv], only), Path(dst)
    settings = Settings(seconds, split, fps, size, strict, ",".join(sorted(leave)), material.listed)
    for line in material.told():
        tell(line)
    dst.mkdir(parents=True, exist_ok=True)
    with explain_full_disk(dst), lock(dst / ".lock"), progress_bar(progress) as bar:
        sweep(dst)
        _keep_settings(dst, settings)
        skipped = Skipped(dst / "skipped.jsonl")
        skipped.forget(lambda record: "stamp" in record and record["stamp"] != _stamp(material.root, record["source"]))
        leave_out(material, skipped)
        writer = ShardWriter(dst, shard_bytes)
        before = len(writer.ids)
        run = _Run(material, settings, writer, skipped, bar, tell)
        run.work(workers or os.cpu_count() or 1, time_limit, worker_gb)
        writer.close()
        if material.listed:
            list_missing(material, writer.ids, skipped)
            write_listed(dst, material)
    return _summary(material, writer, skipped, len(writer.ids) - before, time.monotonic() - began)


def _summary(material: Material, writer: ShardWriter, skipped: Skipped, added: int, seconds: float) -> Summary:
    total = sum(shard.stat().st_size for shard in writer.root.glob("shard-*.tar"))
    gone = () if material.archives or material.listed else tuple(sorted(writer.sources - set(material.files)))
    broken, out, missing = counted(skipped)
    listed = len(material.rows) if material.listed else None
    return Summary(len(writer.ids), added, broken, total, seconds, gone, dict(writer.odd), out, missing, listed)


def rehearse(
    src: Path | str,
    dst: Path | str,
    *,
    labels_csv: Path | str | None = None,
    csv: Sequence[Path | str] = (),
    only: str | None = None,
) -> list[str]:
    """What `prepare` would find, miss and leave out, in sentences. Nothing is written."""
    material = recognise(Path(src), labels_csv, [Path(file) for file in csv], only)
    done = ShardWriter.ids_in(Path(dst)) if Path(dst).is_dir() else set()
    return [*material.told(), *dry_run(material, done)]


@dataclass(eq=False)
class _Place:
    """A place in the order of writing, and what is to be written there once it is known."""

    job: Job | None
    result: bytes | ClipError | End | None = None


class _Run:
    """The parent's side: the jobs that are left, and what becomes of their results."""

    def __init__(
        self,
        material: Material,
        settings: Settings,
        writer: ShardWriter,
        skipped: Skipped,
        bar: Progress,
        tell: Callable[[str], None],
    ) -> None:
        self.material, self.settings, self.writer, self.skipped = material, settings, writer, skipped
        self.bar, self.tell = bar, tell
        self.line: deque[_Place] = deque()  # in the order of writing
        self.ready: deque[_Place] = deque()  # to be submitted
        self.journal = _Journal(writer.root, material)
        self.done, self.total, self.broken = 0, material.clips, sum(counted(skipped)[0].values())
        self.shown = bar.add_task("preparing", total=self.total)
        self.began: tuple[float, float] | None = None  # when the first clip was begun, and the share before it

    def work(self, workers: int, time_limit: float, worker_gb: float) -> None:
        feed = self.material.jobs(self._is_done, self.journal.finished(), self.settings.split)
        if not self._fetch(feed, workers):
            self._write()
            return
        cutter = _Cutter(self.material.root, self.settings, time_limit)
        with closing(Pool(cutter, workers, 1, 1.5 * time_limit, worker_gb)) as pool:
            keys, running = count(), dict[int, _Place]()
            while self._fetch(feed, workers) or pool.running:
                while self.ready and pool.running < pool.capacity:
                    key, place = next(keys), self.ready.popleft()
                    running[key] = place
                    pool.submit(key, place.job)
                self._fetch(feed, workers)  # while they work
                event = pool.wait()
                self._finish(event, running.pop(event.key))

    def _is_done(self, id: str) -> bool:
        done = id in self.writer.ids or id in self.skipped
        self.done += done
        return done

    def _fetch(self, feed: Iterator[Job | End | Unfetched], most: int) -> bool:
        """Take jobs until `most` are ready or too many results wait; whether any is ready."""
        while len(self.ready) < most and len(self.line) < AHEAD + most and (each := next(feed, None)) is not None:
            if self.began is None:
                self.began = time.monotonic(), self.material.share
            place = _Place(each) if isinstance(each, Job) else _Place(None, each if isinstance(each, End) else None)
            if isinstance(each, Unfetched):
                place = _Place(Job(each.id, each.error.path, 0.0, Labels()), each.error)
            self.line.append(place)
            if place.result is None:
                self.ready.append(place)
        return bool(self.ready)

    def _finish(self, event: Done | Lost, place: _Place) -> None:
        job = event.job
        if isinstance(event, Lost):
            what = "time limit" if event.hung else f"worker died ({event.exitcode})"
            remedy = "re-encode the video or leave it out"
            place.result = ClipError(self.material.root / job.file, what, remedy)
        elif isinstance(event.result, float):
            self._split(place, job, event.result)
        else:
            place.result = event.result
        if place.job is not None:  # it is not needed for writing, and may be large
            place.job = replace(place.job, data=None)
        self._write()

    def _split(self, place: _Place, job: Job, duration: float) -> None:
        """Put the clips of a video into its place."""
        starts = _starts(duration, self.settings.seconds)
        clips = [replace(job, id=f"{job.id}@{start:.3f}", start=start) for start in starts]
        fresh = [_Place(clip) for clip in clips if not self._is_done(clip.id)]
        at = self.line.index(place)
        del self.line[at]
        for new in reversed(fresh):
            self.line.insert(at, new)
            self.ready.appendleft(new)
        if self.total is not None:
            self.total += len(clips) - 1

    def _write(self) -> None:
        """Write what is known up to the first result that is not."""
        while self.line and (result := self.line[0].result) is not None:
            job = self.line.popleft().job
            if isinstance(result, End):
                self.journal.end(result, self.skipped)
                continue
            if isinstance(result, bytes):
                self.writer.append(result)
            else:
                assert job is not None
                self._skip(job, result)
            self.done += 1
        text = f"preparing, {self.broken} skipped" if self.broken else "preparing"
        self.bar.update(self.shown, completed=self.done, total=self.total, description=text)
        self._say_how_long()

    def _skip(self, job: Job, error: ClipError) -> None:
        more = {"left_out": "option"} if error.reason in self.settings.leave.split(",") else {}
        self.skipped.add(job.id, error, source=job.file, stamp=_stamp(self.material.root, job.file), **more)
        self.broken += not more

    def _say_how_long(self) -> None:
        if self.began is None or (spent := time.monotonic() - self.began[0]) < SAID_AFTER:
            return
        share = (self.material.share - self.began[1]) / max(1e-9, 1 - self.began[1])
        if share > 0:
            left = spent * (1 - share) / share
            self.tell(f"{100 * self.material.share:.0f}% is read after {spent:.0f} s: {in_hours(left)} to go")
            self.began = math.inf, 0.0


class _Journal:
    """The archives that were read to their end, each with what was wanted of it: a restart does not open them."""

    def __init__(self, root: Path, material: Material) -> None:
        self.path, self.material = root / ARCHIVES, material
        ids = "\n".join(row.id for row in material.kept)
        self.wanted = hashlib.blake2b(ids.encode(errors="surrogateescape"), digest_size=8).hexdigest()

    def finished(self) -> set[str]:
        lines = [line for line in read_lines(self.path) if line.get("wanted") == self.wanted]
        root = self.material.root
        return {line["archive"] for line in lines if line["stamp"] == _stamp(root, line["archive"])}

    def end(self, end: End, skipped: Skipped) -> None:
        """Note that an archive ended. A damaged one is listed as skipped, and tried again once it has changed."""
        stamp = _stamp(self.material.root, end.archive)
        if end.error is not None:
            skipped.add(end.archive, end.error, source=end.archive, stamp=stamp)
        with closing(Lines(self.path)) as lines:
            lines.write({"archive": end.archive, "stamp": stamp, "wanted": self.wanted})


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
                if job.data is None:
                    return self._cut(job, path)
                with in_memory(job.data) as content:
                    return self._cut(job, content)
        except ClipError as error:
            return ClipError(path, error.reason, error.remedy)

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
        start, fps = self._start(job, path), s.fps
        if job.pictures:
            waveform = read_sound(path, s.seconds)
            frames = torch.stack([scaled(read_picture(self.src / name), s.size) for name in job.pictures])
            fps = len(frames) / (len(waveform) / SAMPLE_RATE)
        else:
            limits = Limits(s.strict)
            frames, waveform = read_cut(
                path, start, s.seconds, s.fps, s.size, time_limit=self.time_limit, limits=limits
            )
        return self._sample(job, start, frames, waveform, fps)

    def _start(self, job: Job, path: Path) -> float:
        """Where the clip starts in its file, which may be the clip or the whole video."""
        assert job.start is not None
        if job.of_video and job.row is not None:
            if (read_duration(path, time_limit=self.time_limit) or 0.0) > 1.5 * SECONDS:
                return job.row.start
            if job.of_video > 1:
                remedy = f"{job.of_video} listed clips come from this video: name it {job.id}"
                raise ClipError(path, "ambiguous name", remedy)
        return job.start

    def _sample(self, job: Job, start: float, frames: Tensor, waveform: Tensor, fps: float) -> bytes | ClipError:
        duration = max(len(frames) / fps, len(waveform) / SAMPLE_RATE)
        found = oddities(frames, waveform) + [SHORT] * (duration < ENOUGH * self.settings.seconds)
        for what in self.settings.leave.split(","):
            if what in found:
                return ClipError(job.file, what, "it is left out as you asked")
        meta = {"id": job.id, "source": job.file, "start": start, "duration": duration}
        meta |= {"label": job.labels.name, "task": job.labels.task}
        if found:
            meta["odd"] = found
        if job.row is not None:
            meta |= {
                "row": job.row.number,
                "split": job.row.split,
                "classes": list(job.row.classes),
                "nth": job.row.nth,
            }
        return sample(meta, frames, waveform, fps)


def _starts(duration: float, seconds: float) -> list[float]:
    """Start times of the consecutive clips of a video."""
    whole = int(duration / seconds + 1e-6)
    tail = duration - whole * seconds
    return [round(k * seconds, 3) for k in range(whole + (tail >= SHORTEST_TAIL or not whole))]


def _stamp(root: Path, source: object) -> str | None:
    """A text that changes with the content or permissions of a file, or of its archive; None if it is missing."""
    path = root / str(source)
    try:
        status = (path.parent if path.parent.is_file() else path).stat()
    except OSError:
        return None
    return f"{status.st_size}:{status.st_ctime_ns}"


def _keep_settings(dst: Path, settings: Settings) -> None:
    path = dst / PREPARED
    if not path.exists():
        if strange := next(dst.glob("shard-*"), None):
            raise StellaError(f"{strange} was not written by stella prepare; choose another folder")
        write_json(path, asdict(settings))
    elif changed := differences({"strict": True, "leave": "", "csv": False} | read_json(path), asdict(settings)):
        raise StellaError(
            f"{dst} was filled with other settings: {'; '.join(changed)}; use the same, or another folder"
        )


def progress_bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


def in_hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{max(1, round(seconds / 60))} min"

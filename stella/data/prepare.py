"""`stella prepare SRC DST`: writes videos as shards, in parallel. After a kill the same command continues.

The shards are planned (`plan`) and then made (`make`), on one machine or by Ray on many (`cluster`), with the same
bytes. A clip is done once it is in a shard or in `skipped.jsonl`; a restart repeats the clips that were not. A skipped
video is tried again when its file has changed (content or permissions) or its line is removed from `skipped.jsonl`.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stella.config import differences
from stella.data.accounts import (
    LISTED,
    Summary,
    check_lists,
    check_names,
    counted,
    dry_run,
    gone_of,
    leave_out,
    list_missing,
    write_listed,
)
from stella.data.away import Away, away_from
from stella.data.cluster import make_on_ray
from stella.data.cut import Settings
from stella.data.lengths import ENOUGH
from stella.data.make import Maker, Means, Work, stamp
from stella.data.material import Job, Material, recognise
from stella.data.mirror import opened
from stella.data.plan import PLAN, SHARD_CLIPS, SPLIT_VIDEOS, Group, Plan, folders_in
from stella.data.shards import PREPARED
from stella.data.skipped import Skipped
from stella.data.tasks import recording_of
from stella.data.workers import WORKER_GB
from stella.data.writer import ShardWriter
from stella.errors import StellaError, plain
from stella.files import explain_full_disk, is_address, is_remote, located, lock, read_json, sweep, write_json

SKIPPED = "skipped.jsonl"
OLD = {"strict": True, "leave": "", "csv": False}  # settings of folders that do not state them
SAID_AFTER = 60.0  # seconds of work after which it says how long the rest will take


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
    shard_clips: int = SHARD_CLIPS,
    time_limit: float = 60.0,
    strict: bool = True,
    worker_gb: float = WORKER_GB,
    ray: str | None = None,
    progress: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Write the videos at `src` (see `recognise`) as shards into `dst`, which `Shards` reads.

    Each video gives one clip (its first `seconds`), or with `split` consecutive clips to its end. With lists (`csv`)
    the clips are theirs. A video that cannot be used, or that hangs or crashes its worker, is skipped and listed in
    `dst`/skipped.jsonl. Without `strict` damage that FFmpeg conceals is accepted. Clips that are one of `leave` (still
    picture, silent, short) are left out. `tell` is given what was recognised, and how long it will take. With `ray`,
    the address of a cluster or `local`, Ray spreads the work over its machines, which all see `src` and `dst`.
    """
    _check_positive(seconds, fps, size, shard_clips, time_limit, worker_gb, 1 if workers is None else workers)
    if csv and split:
        raise StellaError("--split cuts whole videos and --csv names clips; give one of them")
    src, folder = located(src), Path(dst)
    if ray:
        src, folder = src.absolute(), folder.absolute()
    material = recognise(src, labels_csv, [located(file) for file in csv], only)
    settings = Settings(seconds, split, fps, size, strict, ",".join(sorted(leave)), material.listed, shard_clips)
    means = Means(workers or os.cpu_count() or 1, time_limit, worker_gb)
    for line in material.told():
        tell(line)
    with ExitStack() as stack:
        away = stack.enter_context(away_from(str(dst))) if is_address(dst) else None
        folder = away.here if away else folder
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(explain_full_disk(folder))
        stack.enter_context(lock(folder / ".lock"))
        bar = stack.enter_context(progress_bar(progress))
        return _prepare(material, settings, means, folder, away, ray, bar, tell)


def _check_positive(*values: float) -> None:
    if not all(0 < value < math.inf for value in values):
        raise StellaError(
            "seconds, fps, size, workers, shard_clips, time_limit and worker_gb must all be above 0 and finite; "
            "correct them"
        )


def _prepare(
    material: Material,
    settings: Settings,
    means: Means,
    dst: Path,
    away: Away | None,
    ray: str | None,
    bar: Progress,
    tell: Callable[[str], None],
) -> Summary:
    """Prepare into `dst`, which is locked; with `away` from there to an address."""
    began = time.monotonic()
    sweep(dst)
    _keep_settings(dst, settings, away)
    check_lists(dst, material, away.there if away else dst)
    skipped = Skipped(dst / SKIPPED)
    writer = ShardWriter(dst, away=away)
    leave_out(material, writer.ids, skipped)
    before = len(writer.ids)
    if away is None and (newer := _newer(material, writer)):
        tell(
            f"{plain(newer[0])}{f' and {len(newer) - 1:,} more' if newer[1:] else ''} changed after clips were made. "
            "These clips stay; prepare into another folder to make new ones"
        )
    plan = Plan(dst, writer.next)
    made = {*writer.sources.values(), *plan.archives}
    check_names(plan.folders, material, made, away.there if away else dst)
    plan.add_folder(str(material.root.resolve()))
    groups, works = _planned(plan, material, settings, writer, skipped)
    watch = Watch(material, skipped, bar, tell)

    def ended(group: Group) -> None:
        plan.finish(group)
        keep()

    def keep() -> None:
        if away:
            away.beat()
            away.put(SKIPPED, PREPARED, PLAN, LISTED)  # the plan after what it says of groups that are done

    keep()
    if ray is None:
        Maker(material.root, settings, writer, skipped, ended, watch.wrote, waiting=groups).work(works, means)
    else:
        make_on_ray(ray, material, settings, means, groups, works, writer, skipped, ended, watch.wrote)
        sweep(dst)  # what machines that died were writing
        if away:
            away.fetch("shard-")
        writer = ShardWriter(dst, away=away)
    if material.listed:
        list_missing(material, writer.ids, skipped)
        write_listed(dst, material)
    keep()
    summary = _summary(material, settings, plan.folders, writer, skipped)
    return replace(summary, added=len(writer.ids) - before, seconds=time.monotonic() - began)


def _newer(material: Material, writer: ShardWriter) -> list[str]:
    """Videos whose clips are there and which were written after them."""
    if is_remote(material.root):
        return []
    made = {path.stem: path.stat().st_mtime for path in writer.root.glob("shard-*.tar")}
    known = [(job.file, made[shard]) for job in material.loose() if (shard := writer.ids.get(job.id, "")) in made]
    return [file for file, then in known if (path := material.root / file).exists() and path.stat().st_mtime > then]


def _planned(
    plan: Plan, material: Material, settings: Settings, writer: ShardWriter, skipped: Skipped
) -> tuple[set[str], Iterator[Work]]:
    """The groups of the plan that are to be made, by name and with their jobs. Clips whose files have changed
    are no longer skipped."""
    stale = {
        id: record["source"]
        for id, record in skipped.records.items()
        if "stamp" in record and record["stamp"] != stamp(material.root, record["source"])
    }
    jobs = dict[str, Job]()
    for job in material.loose(settings.split):
        jobs.setdefault(job.id, job)
    again, finished = set(stale.values()), plan.finished if settings.split else set()

    def known(id: str) -> bool:
        if settings.split:
            return id in finished and id not in again
        return id in writer.ids or (id in skipped and id not in stale)

    per = SPLIT_VIDEOS if settings.split else settings.shard_clips
    plan.add_files(jobs, known, per, settings.split)
    ids = "\n".join(row.id for row in material.kept)
    wanted = hashlib.blake2b(ids.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    archives = {material.name(archive): archive for archive in material.archives}
    waiting = plan.add_archives([(name, stamp(material.root, name)) for name in archives], wanted, settings.split)
    unread = {group.archive: group.number for group in waiting}
    for name, archive in archives.items():
        archive.finished = name not in unread
    skipped.forget(lambda record: record["id"] in stale)
    groups = [group for group in plan.waiting if group.jobs or unread.get(group.archive) == group.number]
    names = {group.name for group in groups}
    _settle(writer, names, {group.name for group in plan.waiting}, skipped)
    material.given = len(jobs) - sum(len(group.jobs) for group in groups)

    def works() -> Iterator[Work]:
        for group in groups:
            if group.archive is not None:
                yield group, material.unpacked(archives[group.archive], settings.split)
            else:
                yield group, [jobs[id] for id in group.jobs if id in jobs]
                material.given += len(group.jobs)

    return names, works()


def _settle(writer: ShardWriter, groups: Collection[str], unfinished: Collection[str], skipped: Skipped) -> None:
    """Close part files that no group continues; drop shards of unfinished groups whose clips are made or skipped
    elsewhere."""
    for part in writer.parts:
        if part.name[:12] not in groups:
            writer.turn(part.name.removesuffix(".tar.part"))
            writer.close()
    others = {shard for id, shard in writer.ids.items() if id in skipped}
    for shard in writer.twice | others:
        if shard[:12] in unfinished:
            writer.drop(shard)


def _summary(
    material: Material, settings: Settings, folders: Sequence[str], writer: ShardWriter, skipped: Skipped
) -> Summary:
    """What is in the folder now, which was filled from these `folders`."""
    broken, out, missing = counted(skipped)
    summary = Summary(
        len(writer.ids), 0, broken, writer.total(), 0.0, (), dict(writer.odd), out, least=ENOUGH * settings.seconds
    )
    if material.listed:
        return replace(summary, missing=missing, listed=len(material.rows), wanted=len(material.kept))
    if material.archives or any(is_address(each) for each in folders if each != str(material.root.resolve())):
        return summary  # files at an earlier address are not listed again
    return replace(summary, gone=gone_of({*writer.sources.values()} - {*material.files}, folders))


def rehearse(
    src: Path | str,
    dst: Path | str,
    *,
    labels_csv: Path | str | None = None,
    csv: Sequence[Path | str] = (),
    only: str | None = None,
) -> list[str]:
    """What `prepare` would find, miss and leave out, in sentences. Nothing is written."""
    material = recognise(located(src), labels_csv, [located(file) for file in csv], only)
    there = located(dst)
    folder = opened(dst).folder
    done = ShardWriter.ids_in(folder) if there.is_dir() else set()
    check_names(folders_in(folder), material, {recording_of(id) for id in done}, dst)
    return [*material.told(), *dry_run(material, done)]


class Watch:
    """Shows how far it is, and says once how long it will take."""

    def __init__(self, material: Material, skipped: Skipped, bar: Progress, tell: Callable[[str], None]) -> None:
        self.material, self.skipped, self.bar, self.tell = material, skipped, bar, tell
        total = None if material.clips is None else material.clips - material.given  # not those of earlier calls
        self.shown, self.before = bar.add_task("preparing", total=total), len(skipped)
        self.share, self.began = material.share, time.monotonic()

    def wrote(self, clips: int) -> None:
        """So many clips have been made or skipped."""
        new = len(self.skipped) - self.before
        self.bar.update(self.shown, completed=clips, description=f"preparing, {new} skipped" if new else "preparing")
        spent = time.monotonic() - self.began
        if spent >= SAID_AFTER and (share := self.material.share) > self.share:
            left = spent * (1 - share) / (share - self.share)
            self.tell(f"{100 * share:.0f}% is read after {spent:.0f} s: {in_hours(left)} to go")
            self.began = math.inf


def _keep_settings(dst: Path, settings: Settings, away: Away | None = None) -> None:
    path = dst / PREPARED
    if not path.exists():
        if strange := next(dst.glob("shard-*"), None if away is None or away.is_empty() else away.there):
            raise StellaError(f"{strange} was not written by stella prepare; choose another folder")
        write_json(path, asdict(settings))
    elif changed := differences(asdict(settings) | OLD | read_json(path), asdict(settings)):
        name, what = away.there if away else dst, "; ".join(changed)
        raise StellaError(f"{name} was filled with other settings: {what}; use the same, or another folder")


def progress_bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not (shown and console.is_terminal))


def in_hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{max(1, round(seconds / 60))} min"

"""What `stella prepare` is given, recognised: videos in folders, archives of videos, CAV-MAE's frames and sounds."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stella.clip import Labels
from stella.data.archives.base import read_tree
from stella.data.archives.rows import SECONDS, Row, chosen, class_in, display_names, read_rows
from stella.data.archives.tar import ARCHIVE, Archive, Member
from stella.data.folder import VIDEO_SUFFIXES, read_labels, refuse, walk
from stella.errors import ClipError, StellaError, number_of
from stella.files import is_remote
from stella.media.decode import read_duration

STILLS = 10  # pictures of a clip in CAV-MAE's layout, one a second


@dataclass(frozen=True)
class Job:
    """A clip to make, or with no `start` a video whose length is asked for."""

    id: str
    file: str  # below the source: a path, or ARCHIVE/NAME
    start: float | None
    labels: Labels
    row: Row | None = None
    data: bytes | None = None  # the content, if it comes out of an archive
    pictures: tuple[str, ...] = ()  # frames in files of their own; `file` has the sound
    of_video: int = 0  # the file may be a whole video, of which so many clips are listed; 0: it is the clip


@dataclass(frozen=True)
class End:
    """All of an archive has been read; `error` says why not to its end."""

    archive: str
    error: ClipError | None = None


@dataclass(frozen=True)
class Unfetched:
    """A clip that an archive lists without a video."""

    id: str
    error: ClipError


class Wanted:
    """The clips of a list, by the names that their files may have."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._cut = {name: row for row in rows for name in row.cut_names}
        self._videos: dict[str, list[Row]] = {}
        for row in rows:
            self._videos.setdefault(row.video, []).append(row)

    def find(self, stem: str) -> list[tuple[Row, int]]:
        """The clips in a file of this name, each with the number of clips that come from its video; 0 for a cut one."""
        if (row := self._cut.get(stem)) is not None:
            return [(row, 0)]
        rows = self._videos.get(stem, [])
        return [(row, len(rows)) for row in rows]


def start_in(path: Path, row: Row, of_video: int, time_limit: float = 30.0) -> float:
    """Where a clip that `Wanted.find` gave starts in its file, which may be the clip or the whole video."""
    if of_video:
        if (read_duration(path, time_limit=time_limit) or 0.0) > 1.5 * SECONDS:
            return row.start
        if of_video > 1:
            raise ClipError(path, "ambiguous name", f"{of_video} listed clips come from this video: name it {row.id}")
    return 0.0


@dataclass
class Material:
    """Clips to prepare, in an order that depends on names alone."""

    root: Path  # `Job.file` is below it
    files: list[str] = field(default_factory=list)
    archives: list[Archive] = field(default_factory=list)
    stills: list[Job] = field(default_factory=list)
    labels: dict[str, Labels] = field(default_factory=dict)  # by file
    rows: list[Row] = field(default_factory=list)  # of the lists
    kept: list[Row] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)  # by row number: why
    lists: list[str] = field(default_factory=list)  # their names
    only: str | None = None
    given: int = 0  # of the clips in files of their own

    @property
    def listed(self) -> bool:
        return bool(self.rows)

    @property
    def clips(self) -> int | None:
        """How many clips there are at most; None if only reading the archives tells."""
        if self.listed:
            return len(self.kept)
        return None if self.archives else len(self.files)

    @property
    def share(self) -> float:
        """How much of it has been given out, from 0 to 1."""
        if not self.archives:
            return self.given / max(1, len(self.files) + len(self.stills))
        whole = sum(archive.size for archive in self.archives)
        return sum(archive.read for archive in self.archives) / max(1, whole)

    @cached_property
    def wanted(self) -> Wanted | None:
        return Wanted(self.kept) if self.listed else None

    def name(self, archive: Archive) -> str:
        return archive.path.relative_to(self.root).as_posix()

    def loose(self, split: bool = False) -> Iterator[Job]:
        """The clips in files of their own, or with `split` the videos."""
        yield from self.stills
        for file in self.files:
            if self.wanted is None:
                yield Job(file, file, None if split else 0.0, self.labels.get(file, Labels()))
                continue
            for row, of_video in self.wanted.find(Path(file).stem):
                yield Job(row.id, file, 0.0, self._labels(row), row, of_video=of_video)

    def unpacked(self, archive: Archive, split: bool = False, read: bool = True) -> Iterator[Job | End | Unfetched]:
        """The clips (with `split` the videos) of an archive, then its end; without `read` they have no content."""
        name = self.name(archive)
        try:
            for member in archive.members(lambda stem: read and (self.wanted is None or bool(self.wanted.find(stem)))):
                for job in self._of(member, name, split):
                    if member.failed:
                        yield Unfetched(job.id, ClipError(job.file, "not fetched", f"{member.failed}: fetch it"))
                    else:
                        yield job
        except ClipError as error:
            yield End(name, error)
        else:
            yield End(name)

    def _of(self, member: Member, archive: str, split: bool) -> Iterator[Job]:
        file, wanted = f"{archive}/{member.name}", self.wanted
        if wanted is None:
            yield Job(member.name, file, None if split else 0.0, Labels(), data=member.data)
            return
        found = next((rows for name in member.names if (rows := wanted.find(name))), [])
        for row, of_video in found:
            yield Job(row.id, file, 0.0, self._labels(row), row, member.data, of_video=of_video)

    def _labels(self, row: Row) -> Labels:
        return Labels(*class_in(row, self.only))

    def told(self) -> list[str]:
        """What was recognised, in sentences."""
        size = sum(archive.size for archive in self.archives)
        kinds = Counter(("shard", "video2dataset") if a.video2dataset else ("archive", "videos") for a in self.archives)
        found = [f"{number_of(count, noun)} of {what}" for (noun, what), count in kinds.items()]
        if found:
            found[-1] += f" ({size / 1e9:,.1f} GB)" if size >= 5e7 else f" ({size / 1e6:,.1f} MB)"
        found += [number_of(len(self.files), "video")] if self.files else []
        found += [f"{number_of(len(self.stills), 'clip')} as frames and sound (CAV-MAE)"] if self.stills else []
        lines = [f"{self.root}: {', '.join(found)}"]
        if self.listed:
            why = Counter(self.left_out.values()).most_common()
            out = f"; left out: {', '.join(f'{count:,} {reason}' for reason, count in why)}" if why else ""
            of = f" of {self.only}" if self.only else ""
            listed = f"{number_of(len(self.rows), 'clip')} listed, {len(self.kept):,}{of} wanted"
            lines.append(f"{', '.join(self.lists)}: {listed}{out}")
        return lines


def recognise(
    src: Path, labels_csv: Path | str | None = None, lists: Sequence[Path] = (), only: str | None = None
) -> Material:
    """What is at `src`: a folder of videos and archives, one archive, or the JSON of CAV-MAE.

    `lists` are CSV files of VGGSound or AudioSet: only their clips are taken, with their classes and splits; `only`
    those that a benchmark takes.
    """
    if only and not lists and src.suffix != ".json":
        raise StellaError(f"--only {only} needs the list of the clips; give it with --csv")
    rows = read_rows(lists)
    names = [path.name for path in lists]
    if src.is_file() and src.suffix.lower() == ".json":
        if is_remote(src):
            raise StellaError(f"{src} names frames and sounds in files of their own; copy them to a disk first")
        return _cav_mae(src, rows, names, only)
    if src.is_file():
        if not ARCHIVE.fullmatch(src.name):
            raise StellaError(
                f"{src} is no folder, no archive (.tar, .tar.gz) and no .json of CAV-MAE; give one of them"
            )
        found = Material(src.parent, archives=[Archive(src)])
    else:
        found = _folder(src)
    if rows and labels_csv:
        raise StellaError("--labels and --csv both name classes; give one of them")
    if labels_csv and found.archives:
        raise StellaError(f"--labels {labels_csv} names files, and {src} holds archives; give a list with --csv")
    if not rows:
        found.labels = read_labels(labels_csv, src, found.files)
    return _with_rows(found, rows, names, only)


def _folder(src: Path) -> Material:
    if not src.is_dir():
        raise StellaError(f"{src} is not a folder; give the folder that holds the videos")
    if is_remote(src):
        there: Any = src
        paths = [src / name.removeprefix(there.path).lstrip("/") for name in there.fs.find(there.path)]
    else:
        paths = [folder / name for folder, _, names in walk(src, refuse) for name in names]
    videos = sorted(path.relative_to(src).as_posix() for path in paths if path.suffix.lower() in VIDEO_SUFFIXES)
    archives = sorted(path for path in paths if ARCHIVE.fullmatch(path.name))
    if not videos and not archives:
        kinds = ", ".join(VIDEO_SUFFIXES[:8])
        raise StellaError(f"{src} holds no videos; put files such as {kinds} … or archives of them there")
    return Material(src, videos, [Archive(path) for path in archives])


def _with_rows(found: Material, rows: list[Row], names: list[str], only: str | None) -> Material:
    found.rows, found.lists, found.only = rows, names, only
    found.kept, found.left_out = chosen(rows, only)
    return found


def _cav_mae(file: Path, rows: list[Row], names: list[str], only: str | None) -> Material:
    """The JSON lists clips itself; a CSV replaces its classes and splits."""
    classes = display_names(file) or {}
    split = "test" if any(word in file.stem.lower() for word in ("eval", "test", "val")) else "train"
    own, items = [], {}
    try:
        for number, item in enumerate(read_tree(file)["data"]):
            mids = [mid.strip() for mid in str(item["labels"]).split(",")]
            video = str(item["video_id"])
            own.append(Row(number, video, 0.0, tuple(classes.get(mid, mid) for mid in mids), split))
            items[video] = (str(item["wav"]), str(item["video_path"]))
    except (KeyError, TypeError) as error:
        raise StellaError(f'{file} is not {{"data": [{{video_id, wav, video_path, labels}}]}} ({error!r})') from error
    found = _with_rows(Material(file.parent), rows or own, names or [file.name], only)
    wanted = Wanted(found.kept)
    for video, (wav, folder) in items.items():
        pictures = tuple(f"{folder}/frame_{i}/{video}.jpg" for i in range(STILLS))
        for row, _ in wanted.find(video):
            found.stills.append(Job(row.id, wav, 0.0, found._labels(row), row, pictures=pictures))
    return found

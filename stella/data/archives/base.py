"""What the readers of public data sets share: their config, clips listed in files, and how those files are read."""

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from stella.clip import MIDDLE, Clip, Device, Labels, Origin, Source
from stella.data.archives.members import archive_of, is_tar, list_videos, readable
from stella.data.downstream import Parts
from stella.data.folder import VIDEO_SUFFIXES, size_of
from stella.data.tasks import ONLY_TASK, SizedConfig, Tasks
from stella.errors import ClipError, StellaError, number_of
from stella.files import table_of, text_of
from stella.media.decode import Plan, decode, read_duration
from stella.media.odd import silent


@dataclass(frozen=True)
class ArchiveConfig(SizedConfig):
    """A public data set below `path`. Its own splits are the parts; `serves` are its downstream tasks."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    serves: ClassVar[tuple[str, ...]] = ()

    path: str = ""  # folder of the data set

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise StellaError(f"data.source={self.source} needs your copy of it: set data.path=FOLDER")

    @property
    def root(self) -> Path:
        return Path(self.path)

    @property
    def plan(self) -> Plan:
        return self.inputs().plan()

    @abstractmethod
    def part(self, name: str) -> Source:
        """The clips of a part: train, validation or test."""

    def classes(self) -> tuple[str, ...]:
        """Of classify and events, in the order of their numbers."""
        return ()

    def train_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        return [(ONLY_TASK, self.part("train"))]

    def eval_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        return [(ONLY_TASK, self.part("test"))]

    def all_tasks(self, evaluation: bool = False) -> Tasks:
        return self.eval_tasks() if evaluation else self.train_tasks()

    def downstream(self, task: str) -> Parts:
        if task not in self.serves:
            raise StellaError(f"{self.source} has no ground truth for {task}; use it for {', '.join(self.serves)}")
        return Parts(self.part("train"), self.part("validation"), self.part("test"), self.classes())


@dataclass(frozen=True)
class Item:
    """A clip of a data set: a video file, where it starts there, and its class."""

    id: str
    path: Path
    name: str | None = None
    start: float = 0.0


class Videos:
    """Clips in video files, one for each item. A path may lead into a tar archive: ARCHIVE.tar/NAME."""

    sounding: ClassVar[bool] = True  # clips of a muted track are skipped

    def __init__(self, items: Sequence[Item], plan: Plan) -> None:
        self.items, self.plan = list(items), plan

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index, MIDDLE)

    def clip(self, index: int, window: float) -> Clip:
        item, plan = self.items[index], self.plan
        taken = Plan(self.start(index), plan.duration, plan.frames, plan.size, plan.span)
        with readable(item.path) as path:
            clip = decode(path, taken, window=window)
        audio = heard(clip.audio, item.path) if self.sounding else clip.audio
        return Clip(item.id, clip.video, audio, self.labels(index))

    def start(self, index: int) -> float:
        """Where the clip starts in its file, in seconds."""
        return self.items[index].start

    def labels(self, index: int) -> Labels:
        return Labels(self.class_of(index))

    def class_of(self, index: int) -> str | None:
        return self.items[index].name

    def location(self, index: int) -> str:
        return str(self.items[index].path)

    def origin(self, index: int) -> Origin:
        return Origin(self.items[index].id, str(self.items[index].path))

    def stamp(self, index: int) -> str:
        path = self.items[index].path
        return size_of(archive_of(path) or path)

    def seconds(self, index: int) -> float | None:
        with readable(self.items[index].path) as path:
            whole = read_duration(path)
        return None if whole is None else whole - self.start(index)


def heard(audio: Tensor, path: Path) -> Tensor:
    """The waveform, unless it is silent from beginning to end."""
    if silent(audio):
        raise ClipError(path, "silent audio", "leave this clip out")
    return audio


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise StellaError(f"{folder} is not a folder; check data.path")


def find_named(folder: Path) -> dict[str, Path]:
    """The videos below a folder, in files or in tar archives, by their name without its suffix."""
    check_folder(folder)
    files = sorted(folder.rglob("*"))
    videos = [archive / name for archive in files if is_tar(archive.name) for name in list_videos(archive).videos]
    videos += [path for path in files if path.suffix.lower() in VIDEO_SUFFIXES]
    return {path.stem: path for path in videos}


def find_some(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Where the videos of these names are, as far as they are below a folder; at least one must be."""
    if not names:
        return {}
    found = find_named(folder)
    here = {name: found[name] for name in names if name in found}
    if not here:
        raise StellaError(f"{folder} has none of {number_of(len(names), 'listed video')}; check data.path")
    return here


def told_missing(folder: Path, names: Sequence[str]) -> list[str]:
    """A sentence if some of these videos are not below a folder."""
    missing = len(names) - len(find_some(folder, names))
    return [f"left out: {missing:,} of {number_of(len(names), 'listed video')}, which are not here"] if missing else []


def read_table(path: Path) -> list[list[str]]:
    """The rows of a CSV file, without empty ones."""
    return [row for row in table_of(path) if row]


def read_list(path: Path) -> list[str]:
    """The lines of a text file, without empty ones."""
    return [line.strip() for line in text_of(path).splitlines() if line.strip()]


def read_tree(path: Path) -> Any:
    try:
        return json.loads(text_of(path))
    except ValueError as error:
        raise StellaError(f"{path} is not JSON ({error}); fetch it again") from error


def without_header(rows: list[list[str]], *columns: str) -> list[list[str]]:
    """The rows after a header that names these columns first; all of them if there is no header."""
    first = [cell.strip().lower() for cell in rows[0][: len(columns)]] if rows else []
    return rows[1:] if first == list(columns) else rows


def first_existing(root: Path, *names: str) -> Path:
    check_folder(root)
    for name in names:
        if (root / name).exists():
            return root / name
    none, copy = ("none of", "one of them") if len(names) > 1 else ("no", "it")
    raise StellaError(f"{root} has {none} {', '.join(names)}; check data.path, or copy {copy} there")


def repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]

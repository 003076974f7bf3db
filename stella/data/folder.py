"""Any tree of video files as a source. A clip's label is the name of its folder, or comes from a CSV."""

import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, NoReturn

from stella.clip import MIDDLE, Clip, Labels, Origin
from stella.data.tasks import DecodedConfig
from stella.errors import StellaError
from stella.files import is_address, table_of
from stella.media.decode import Plan, decode, read_duration
from stella.media.files import LIMITS, Limits

VIDEO_SUFFIXES = (
    *(".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ogv", ".webm", ".wmv"),
    *(".3g2", ".3gp", ".asf", ".divx", ".dv", ".f4v", ".m2t", ".m2ts", ".mpe", ".mts", ".mxf", ".nut", ".qt", ".rm"),
    *(".rmvb", ".ts", ".vob"),
)
MUTE_SUFFIXES = (".gif", ".m1v", ".m2v")  # formats of pictures alone: they have vectors, and nothing to learn from
AUDIO_SUFFIXES = (
    *(".aac", ".ac3", ".aif", ".aifc", ".aiff", ".amr", ".caf", ".flac", ".m4a", ".m4b", ".mka", ".mp2", ".mp3"),
    *(".oga", ".ogg", ".opus", ".ra", ".w64", ".wav", ".wma"),
)
MEDIA_SUFFIXES = (*VIDEO_SUFFIXES, *MUTE_SUFFIXES, *AUDIO_SUFFIXES)  # of all that can be embedded


@dataclass(frozen=True)
class FolderConfig(DecodedConfig):
    paths: ClassVar = ("path", "eval_path", "labels", "eval_labels")

    source: Literal["folder"] = "folder"  # video files
    labels: str | None = None  # CSV of file,label[,task]; none: folders are labels
    eval_labels: str | None = None  # the same for eval_path
    tasks_from: Literal["labels", "folders"] = "labels"  # folders: each folder with videos is a task, named by its path
    strict: bool = True  # skip clips that FFmpeg finds damaged; false: take those whose damage it conceals
    most_pixels: int = LIMITS.pixels  # of one picture; a file with larger ones is skipped before it is decoded

    def open(self, evaluation: bool = False) -> "Folder":
        path, labels = (self.eval_path, self.eval_labels) if evaluation else (self.path, self.labels)
        if is_address(path or ""):
            raise StellaError(
                f"{path} holds videos, which are read from a disk; give shards: stella prepare {path} SHARDS"
            )
        limits = Limits(self.strict, self.most_pixels)
        return Folder(path or "", self.inputs().plan(), labels, self.tasks_from == "folders", limits)


class Folder:
    """The videos under `root`, sorted by path, one clip each, cut out by `plan`. A clip's id is its path below `root`.

    Without `labels_csv` a video's class is the name of its folder, unless that is `root`. With it (rows
    `file,label[,task]`, file paths below `root`, an optional header) unlisted videos have no label.
    """

    def __init__(
        self,
        root: Path | str,
        plan: Plan | None = None,
        labels_csv: Path | str | None = None,
        folders_are_tasks: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        self.root, self.plan, self.limits = Path(root), plan or Plan(), limits
        self.files = find_videos(self.root)
        self._labels = read_labels(labels_csv, self.root, self.files)
        if folders_are_tasks:
            tasks = {file: Path(file).parent.as_posix() for file in self.files}
            if loose := [file for file, task in tasks.items() if task == "."]:
                raise StellaError(f"{self.root / loose[0]} is in no sub-folder, so it has no task; move it into one")
            self._labels = {f: replace(self._labels.get(f, Labels()), task=task) for f, task in tasks.items()}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index)

    def clip(self, index: int, window: float = MIDDLE) -> Clip:
        clip = decode(self.root / self.files[index], self.plan, window=window, limits=self.limits)
        return replace(clip, id=self.files[index], labels=self.labels(index))

    def location(self, index: int) -> str:
        return str(self.root / self.files[index])

    def origin(self, index: int) -> Origin:
        return Origin(self.files[index], self.files[index])

    def stamp(self, index: int) -> str:
        return size_of(self.root / self.files[index])

    def seconds(self, index: int) -> float | None:
        return read_duration(self.root / self.files[index])

    def labels(self, index: int) -> Labels:
        return self._labels.get(self.files[index], Labels())


def size_of(path: Path) -> str:
    """A file's bytes, or why they are not known."""
    try:
        return f"{path.stat().st_size} bytes"
    except OSError as error:
        return str(error.strerror)


def find_videos(root: Path, suffixes: Sequence[str] = VIDEO_SUFFIXES) -> list[str]:
    """Sorted paths below `root` of all files with such a suffix, except hidden files and folders.

    Broken links and unreadable files are listed too: they are skipped later, with a reason.
    """
    if not root.is_dir():
        raise StellaError(f"{root} is not a folder; give the folder that holds the videos")
    found = [
        (folder / name).relative_to(root).as_posix()
        for folder, _, names in walk(root, refuse)
        for name in names
        if Path(name).suffix.lower() in suffixes
    ]
    if not found:
        raise StellaError(f"{root} holds no videos; put files such as {', '.join(suffixes[:8])} … there")
    return sorted(found)


def walk(root: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Every folder below `root` with the names of its sub-folders and files, except hidden ones.

    Linked folders are followed, each once: links may form a cycle. Sub-folders that the caller removes from the list
    are not entered.
    """
    walked: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(root, onerror=onerror, followlinks=True):
        try:
            here = Path(folder).stat()
        except OSError as error:
            onerror(error)
            continue
        if (here.st_dev, here.st_ino) in walked:
            subfolders.clear()
            continue
        walked.add((here.st_dev, here.st_ino))
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield Path(folder), subfolders, [name for name in names if not name.startswith(".")]


def read_labels(path: Path | str | None, root: Path, files: list[str]) -> dict[str, Labels]:
    """Labels by file: those of a CSV, or without one the names of the files' folders.

    A row with an unknown or repeated file is an error, so that no label is lost. Accents may be composed in one of the
    list and the folder, and decomposed (as macOS writes them) in the other.
    """
    if not path:
        return {file: Labels(name=Path(file).parent.name or None) for file in files}
    known = {_composed(file): file for file in files} | {file: file for file in files}
    labels: dict[str, Labels] = {}
    rows = [(number, row) for number, row in enumerate(table_of(Path(path)), 1) if row]
    for position, (number, row) in enumerate(rows):
        file = Path(row[0]).as_posix()
        file = known.get(file) or known.get(_composed(file), file)
        if file not in known and position == 0 and row[0].strip().lower() in {"file", "filename", "path", "video"}:
            continue  # a header
        if not 2 <= len(row) <= 3:
            raise StellaError(
                f"{path}, line {number} has {len(row)} columns, not file,label[,task]; "
                'put labels that hold commas in "quotes"'
            )
        if file not in known:
            raise StellaError(f"{path}, line {number} names {row[0]!r}, which is no video in {root}; correct that line")
        if file in labels:
            raise StellaError(f"{path}, line {number} names {row[0]!r} a second time; remove one of the lines")
        labels[file] = Labels(name=row[1] or None, task=(row[2] or None) if len(row) == 3 else None)
    return labels


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def refuse(error: OSError) -> NoReturn:
    raise StellaError(f"{error.filename} cannot be listed ({error.strerror}); correct its permissions or move it away")

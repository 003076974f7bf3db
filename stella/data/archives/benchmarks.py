"""VGGSound and AudioSet as sources, and the paper's two benchmarks out of them.

The clips are shards that `stella prepare … --csv LIST` made, or a folder of videos with the list in it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

from stella.clip import Device, Labels, Source, labels_of, names_of
from stella.data.accounts import LISTED
from stella.data.archives.base import Item, Videos
from stella.data.archives.rows import MOST_TEST, TASKED, Row, chosen, class_in, read_rows, tasks_of
from stella.data.downstream import Parts
from stella.data.folder import find_videos
from stella.data.material import Wanted, start_in
from stella.data.mirror import opened
from stella.data.shards import Entry, Shards, stated_seconds
from stella.data.tasks import ONLY_TASK, SizedConfig, Tasks
from stella.data.views import View, join, part
from stella.errors import ConfigError, StellaError, number_of
from stella.files import is_address, read_json
from stella.media.decode import Plan
from stella.media.inputs import Inputs

VGGSOUND = ("vggsound.csv",)
AUDIOSET = ("balanced_train_segments.csv", "unbalanced_train_segments.csv", "eval_segments.csv")
PAPER = {"continual-vs": "6,000 to 8,000 a task", "initial-vs": "104,000"}  # training clips, as it states them


@dataclass(frozen=True)
class Known:
    """Clips on the disk, and the row of each."""

    source: Source
    rows: list[Row]

    def by_task(self, benchmark: str | None, split: str) -> dict[str, list[int]]:
        """The clips of each task in the order of the list."""
        found: dict[str, list[int]] = {}
        for index in sorted(range(len(self.rows)), key=lambda i: self.rows[i].number):
            if (row := self.rows[index]).split == split:
                found.setdefault(class_in(row, benchmark)[1] or ONLY_TASK, []).append(index)
        return found


class Listed(Videos):
    """Clips of a list in files that may be whole videos. Muted ones are kept, as shards of them keep them."""

    sounding: ClassVar[bool] = False

    def __init__(self, items: Sequence[Item], plan: Plan, rows: Sequence[tuple[Row, int]]) -> None:
        super().__init__(items, plan)
        self.rows = rows  # as `Wanted.find` gives them

    def start(self, index: int) -> float:
        return start_in(self.items[index].path, *self.rows[index])

    def labels(self, index: int) -> Labels:
        row, name = self.rows[index][0], self.class_of(index)
        return Labels(name, others=tuple(other for other in row.classes if other != name))


@dataclass(frozen=True)
class ListedConfig(SizedConfig):
    """Clips of a list with their classes and splits. Training clips train, five test clips a class are the gallery."""

    lists: ClassVar[tuple[str, ...]] = VGGSOUND
    several: ClassVar[bool] = False  # whether a clip's classes all count in classification, not the first alone
    benchmark: ClassVar[str | None] = None  # whose tasks they are sorted into, and whose rules hold; none: one task

    paths: ClassVar[tuple[str, ...]] = ("path",)

    path: str = ""  # shards made with `stella prepare --csv`, or a folder of videos with the list in it

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ConfigError(f"data.source={self.source} needs your copy of it: set data.path=FOLDER")
        known = self.task_classes()
        if unknown := [name for name in self.tasks if name not in known]:
            raise ConfigError(f"{self.source} has no task {', '.join(unknown)}; its tasks are {', '.join(known)}")

    def task_classes(self) -> dict[str, Sequence[str]]:
        """The tasks in the paper's order with their classes; one task takes all classes."""
        return dict(tasks_of(self.benchmark)) if self.benchmark in TASKED else {ONLY_TASK: ()}

    @property
    def named(self) -> tuple[str, ...]:
        return self.tasks or tuple(self.task_classes())

    def following(self, inputs: Inputs | None) -> Self:
        """Without weights a clip takes the seconds that shards say they hold."""
        held = None if inputs or self.duration else stated_seconds(self.path)
        return super().following(replace(Inputs(), duration=held) if held else inputs)

    def train_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        known = self.known()
        return [(name, part(known.source, clips)) for name, clips in self._tasks(known, "train")]

    def eval_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        known = self.known()
        return [(name, part(known.source, self._gallery(known, clips))) for name, clips in self._tasks(known, "test")]

    def _gallery(self, known: Known, clips: Sequence[int]) -> list[int]:
        """The first five clips of each class."""
        taken: Counter[str | None] = Counter()
        found = []
        for index in clips:
            label = class_in(known.rows[index], self.benchmark)[0]
            taken[label] += 1
            if taken[label] <= MOST_TEST:
                found.append(index)
        return found

    def _tasks(self, known: Known, split: str) -> list[tuple[str, list[int]]]:
        names, found = self.tasks or list(self.task_classes()), known.by_task(self.benchmark, split)
        if lacking := [name for name in names if name not in found]:
            more = "prepare the list of test clips too" if split == "test" else "prepare them"
            raise StellaError(
                f"{self.path} has no {split} clips of {', '.join(lacking)}; {more}, or name other tasks in data.tasks"
            )
        return [(name, found[name]) for name in names]

    def all_tasks(self, evaluation: bool = False) -> Tasks:
        return self.eval_tasks() if evaluation else self.train_tasks()

    def downstream(self, task: str) -> Parts:
        parts = super().downstream(task)
        if task != "classify":
            return parts
        if self.several:
            learnt = (
                each for source in (parts.train, parts.validation) for each in labels_of(source, range(len(source)))
            )
            names = {name for labels in learnt for name in (labels.name, *labels.others) if name is not None}
            return replace(parts, classes=tuple(sorted(names)), several=True)
        known = self.task_classes()
        classes = tuple(label for name in self.tasks or known for label in known[name]) or parts.classes
        named = enumerate(names_of(parts.test, range(len(parts.test))))
        test = part(parts.test, [index for index, name in named if name in classes])
        return replace(parts, test=test, classes=classes)

    def _learnt_and_tested(self, task: str) -> tuple[View, View]:
        """Classification is tested on all test clips, not on the gallery alone."""
        if task != "classify":
            return super()._learnt_and_tested(task)
        known = self.known()
        train, test = ([i for _, clips in self._tasks(known, split) for i in clips] for split in ("train", "test"))
        return part(known.source, train), part(known.source, test)

    def remarks(self) -> list[str]:
        """How many training clips each task has, of how many that the lists name, beside the paper's own number."""
        train, listed = self.train_tasks(), self._listed()
        of = {name: f" of {count:,}" for name, count in listed.items()}
        counts = [f"{name} {len(source):,}{of.get(name, '')}" for name, source in train]
        have, all_of = sum(len(source) for _, source in train), sum(listed.get(name, 0) for name, _ in train)
        whole = f" of {all_of:,} listed" if all_of else ""
        paper = f"; the paper has {PAPER[self.benchmark or '']}" if self.benchmark in PAPER else ""
        return [f"{number_of(have, 'training clip')}{whole} are here ({', '.join(counts)}){paper}"]

    # ---- the clips on the disk

    def places(self) -> list[tuple[str, tuple[str, ...]]]:
        """Where the clips are, each with the names of lists to look for there."""
        return [(self.path, self.lists)]

    def known(self) -> Known:
        sources: list[Source] = []
        rows: list[Row] = []
        for place, lists in self.places():
            found = self._shards(place) if _has_shards(place) else self._videos(place, lists)
            kept = {row.number for row in chosen(found.rows, self.benchmark)[0]}
            indices = [i for i, row in enumerate(found.rows) if row.number in kept]
            sources.append(part(found.source, indices))
            after = max((row.number + 1 for row in rows), default=0)  # one place's clips after the other's
            rows += [replace(found.rows[i], number=after + found.rows[i].number) for i in indices]
        return Known(join(sources), rows)

    def _shards(self, place: str) -> Known:
        inputs = self.inputs()

        def labelled(entry: Entry) -> Entry:
            label, task = class_in(row_of(entry, place), self.benchmark)
            return replace(entry, label=label, task=task)

        shards = Shards(place, inputs.frames, inputs.span, inputs.size, inputs.duration).changed(labelled)
        return Known(shards, [row_of(shards.entry(i)[1], place) for i in range(len(shards))])

    def _videos(self, place: str, lists: Sequence[str]) -> Known:
        if is_address(place):
            raise StellaError(
                f"{place} holds no shards; make them with: stella prepare VIDEOS {place} --csv {lists[0]}"
            )
        root = Path(place)
        if not root.is_dir():
            raise StellaError(f"{root} is not a folder; give shards, or a folder of videos with {' or '.join(lists)}")
        wanted = Wanted(self._rows(root, lists))
        clips = [(file, row, n) for file in find_videos(root) for row, n in wanted.find(Path(file).stem)]
        found = {row.id: (file, row, n) for file, row, n in sorted(clips, key=lambda each: -each[2])}  # a cut one wins
        items = [Item(row.id, root / file, class_in(row, self.benchmark)[0]) for file, row, _ in found.values()]
        rows = [(row, of_video) for _, row, of_video in found.values()]
        return Known(Listed(items, self.inputs().plan(), rows), [row for row, _ in rows])

    def _rows(self, root: Path, lists: Sequence[str]) -> list[Row]:
        found = [root / name for name in lists if (root / name).exists()]
        if not found:
            raise StellaError(
                f"{root} holds neither shards nor {' or '.join(lists)}; prepare it with: "
                f"stella prepare VIDEOS {root} --csv {lists[0]}"
            )
        return chosen(read_rows(found), self.benchmark)[0]

    def _listed(self) -> Counter[str]:
        """Training clips of each task that the lists name, as far as that is known."""
        total: Counter[str] = Counter()
        for place, lists in self.places():
            if (listed := opened(place).folder / LISTED).is_file():
                tasks = read_json(listed)["tasks"].get(self.benchmark or ONLY_TASK, {})
                total.update({name: int(splits["train"]) for name, splits in tasks.items()})
            elif not _has_shards(place):
                rows = [row for row in self._rows(Path(place), lists) if row.split == "train"]
                total.update(class_in(row, self.benchmark)[1] or ONLY_TASK for row in rows)
        return total


def _has_shards(place: str) -> bool:
    root = opened(place).folder
    return root.is_dir() and any(root.glob("shard-*"))


def row_of(entry: Entry, place: str) -> Row:
    """The row of a list that a stored clip was made for."""
    if entry.split is None or entry.row is None:
        raise StellaError(f"{place} holds clips without a list, such as {entry.id}; prepare them with --csv")
    video, _, start = entry.id.rpartition("_")
    return Row(entry.row, video, float(start), tuple(entry.classes or ()), entry.split, entry.nth or 0)


@dataclass(frozen=True)
class VGGSoundConfig(ListedConfig):
    source: Literal["vggsound"] = "vggsound"  # all of VGGSound, one task


@dataclass(frozen=True)
class AudioSetConfig(ListedConfig):
    lists: ClassVar[tuple[str, ...]] = AUDIOSET
    several: ClassVar[bool] = True

    source: Literal["audioset"] = "audioset"  # all of AudioSet, one task


@dataclass(frozen=True)
class ContinualVSConfig(ListedConfig):
    benchmark: ClassVar[str | None] = "continual-vs"

    source: Literal["continual-vs"] = "continual-vs"  # VGGSound in eight tasks of 20 classes


@dataclass(frozen=True)
class ContinualASConfig(ListedConfig):
    lists: ClassVar[tuple[str, ...]] = AUDIOSET
    benchmark: ClassVar[str | None] = "continual-as"

    source: Literal["continual-as"] = "continual-as"  # AudioSet in seven tasks


@dataclass(frozen=True)
class InitialVSConfig(ListedConfig):
    """What comes before Continual-VS: VGGSound's other classes, and AudioSet-20K without classes of the same name."""

    paths: ClassVar[tuple[str, ...]] = ("path", "audioset")
    benchmark: ClassVar[str | None] = "initial-vs"

    source: Literal["initial-vs"] = "initial-vs"  # the initial set of Continual-VS
    audioset: str | None = None  # AudioSet-20K, as data.path; none: VGGSound's other classes alone

    def places(self) -> list[tuple[str, tuple[str, ...]]]:
        return [*super().places(), *([(self.audioset, AUDIOSET)] if self.audioset else [])]

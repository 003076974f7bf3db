"""What a data source says of itself: sizes, tasks to train on and to evaluate on, what its gallery is worth.

Each source has a config of its own beside it (`ScenesConfig`, `FolderConfig`, …); `data/config.py` lists them.
"""

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Protocol, Self

import torch

from stella.clip import Device, Labels, Source, Stored, names_of
from stella.data.downstream import Parts
from stella.data.views import View, join, part
from stella.errors import ConfigError, StellaError, number_of
from stella.files import absolute
from stella.media.inputs import Inputs, time_steps, with_margin
from stella.rng import generator

Tasks = list[tuple[str, Source]]
ONLY_TASK = "all"  # the name where clips have no tasks
RANKS = (1, 5, 10)  # A is the mean of R@1, R@5 and R@10


@dataclass(frozen=True)
class SourceConfig(ABC):
    """A data source. A subclass sets `source` to its own name, which `data.source=NAME` picks."""

    least_workers: ClassVar[int] = 0  # worker processes that a run needs
    embedded: ClassVar[bool] = False  # small clips that ship with the package, for small models
    paths: ClassVar[tuple[str, ...]] = ()  # keys that are paths
    class_names: ClassVar[str] = ""  # a sentence about what the names of its classes mean, if they need one

    source: str = ""
    tasks: tuple[str, ...] = ()  # names, in the order of training; empty: all
    eval_clips: int = 240  # for each task; ignored where data.eval_path gives the evaluation clips
    seed: int = 0  # of the choice of evaluation clips

    def __post_init__(self) -> None:
        self.check_positive("eval_clips")
        if len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"data.tasks names one task twice ({', '.join(self.tasks)}); name each once")

    def check_positive(self, *names: str) -> None:
        for name in names:
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"data.{name}={value} must be above 0")

    @abstractmethod
    def inputs(self) -> Inputs:
        """How the clips are made, and their sizes as a model takes them."""

    def following(self, inputs: Inputs | None) -> Self:
        """The source with the sizes that were not given taken from a model's inputs; None: with its own defaults."""
        return self

    def alike(self, inputs: Inputs | None) -> Self:
        """The same for what is evaluated: frames are decoded as for the model, without a margin for moving crops."""
        return self.following(inputs)

    @abstractmethod
    def train_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        """The tasks in the order of training. A source may cache clips on `device`, unless `cache` is false."""

    @abstractmethod
    def eval_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        """The evaluation clips of the same tasks, in the same order; none of them is trained on."""

    @abstractmethod
    def all_tasks(self, evaluation: bool = False) -> Tasks:
        """All clips of the training set, or of the evaluation set, by task: what `stella pack` stores."""

    def absolute(self) -> Self:
        """The config with absolute paths, so that it means the same in another directory."""
        given = {name: getattr(self, name) for name in self.paths if getattr(self, name) is not None}
        changes: dict[str, Any] = {name: absolute(path) for name, path in given.items()}
        return replace(self, **changes)

    @property
    def named(self) -> tuple[str, ...]:
        """The tasks, if the config alone tells; else nothing."""
        return self.tasks

    @property
    def label(self) -> str:
        """The kind of clips, for tables."""
        return self.source

    @property
    def described(self) -> str:
        """What the clips are, in words."""
        return self.source

    @property
    def cached(self) -> bool:
        """Whether clips are cached in this process, which makes worker processes useless for evaluation."""
        return False

    def ceilings(self, clips: Sequence[int]) -> dict[str, float]:
        """A by chance, and by what else is known, in a gallery of these numbers of clips; empty if nothing is."""
        return chance(clips)

    def remarks(self) -> list[str]:
        """What is odd about the data, in sentences for the user. Nothing stops because of it."""
        return []

    def downstream(self, task: str) -> Parts:
        """The clips of a downstream task: a tenth of the training clips chooses the best model.

        Any source serves retrieval and matching, one whose clips all have a class also classify. Sources with masks or
        segments have methods of their own.
        """
        if task not in ("retrieval", "matching", "classify"):
            raise StellaError(
                f"data.source={self.source} has no ground truth for {task}; it serves classify (sub-folders or labels "
                f"are classes), retrieval and matching: leave data.source out to test {task} on scenes"
            )
        train, test = self._learnt_and_tested(task)
        held, kept = self._validation(train, task)
        classes = class_names(train) if task == "classify" else ()
        return Parts(part(train, kept), part(train, held), test, classes)

    def _learnt_and_tested(self, task: str) -> tuple[View, View]:
        """The clips of a downstream task to learn from, some of which choose the best model, and those to test on."""
        train, test = (join([source for _, source in tasks]) for tasks in (self.train_tasks(), self.eval_tasks()))
        return train, test

    def _validation(self, train: View, task: str) -> tuple[list[int], list[int]]:
        """A tenth of the recordings, chosen by their names, or of clips that have none; and the other clips."""
        names = recordings(train)
        ranked = sorted(
            {name for name in names if name}, key=lambda name: (place(self.seed, f"validation {name}"), name)
        )
        if None in names or len(ranked) < 2:
            order = torch.randperm(len(train), generator=generator(self.seed, "validation clips")).tolist()
            return sorted(order[: max(1, len(order) // 10)]), sorted(order[max(1, len(order) // 10) :])
        chosen = set(ranked[: max(1, len(ranked) // 10)])
        if task == "classify":
            chosen = of_every_class(
                chosen, ranked, zip(map(str, names), names_of(train, range(len(train))), strict=True)
            )
        held = [index for index, name in enumerate(names) if name in chosen]
        return held, [index for index, name in enumerate(names) if name not in chosen]


def recordings(source: View) -> list[str | None]:
    """Of each clip; None of one that is not on a disk."""
    found = [source.stored(index) for index in range(len(source))]
    return [each[0].origin(each[1]).recording if each else None for each in found]


def of_every_class(held: Set[str], ranked: Sequence[str], clips: Iterable[tuple[str, str | None]]) -> set[str]:
    """The recordings that are held out, changed so that a class of several has one on either side, and a class of one
    is learnt from.

    `ranked` are all recordings, the first to be held out first; `clips` are a recording and a class each.
    """
    by_class: dict[str | None, set[str]] = {}
    for recording, name in clips:
        by_class.setdefault(name, set()).add(recording)
    found, rank = set(held), {name: number for number, name in enumerate(ranked)}
    for own in by_class.values():
        if len(own) > 1 and not found & own:
            found.add(min(own, key=rank.__getitem__))
        elif found >= own:
            found.discard(max(own, key=rank.__getitem__))
    return found


def place(seed: int, name: str) -> float:
    """A number in [0, 1) that depends on these two alone."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def class_names(source: Source) -> tuple[str, ...]:
    """The classes of a source's clips, sorted; refuses clips without one."""
    found = names_of(source, range(len(source)))
    if missing := sum(name is None for name in found):
        clips = number_of(len(found), "clip")
        raise StellaError(
            f"without a class: {missing:,} of {clips}; put the videos of each class into a folder of its own, "
            "name classes in data.labels, or leave these clips out"
        )
    return tuple(sorted({str(name) for name in found}))


def chance(clips: Sequence[int]) -> dict[str, float]:
    """A in percent of random retrieval in a gallery of these numbers of clips by task."""
    total = sum(clips)
    return {"chance": 100 * sum(min(k, total) / total for k in RANKS) / len(RANKS)} if total else {}


def recording_of(id: str) -> str:
    """The video of a clip that `stella prepare --split` named VIDEO@SECONDS; other ids are videos."""
    return re.sub(r"@\d+\.\d{3}$", "", id)


def natural(name: str) -> tuple[tuple[tuple[int, str], ...], str]:
    """A sort key that orders numbers in names by their value: task2 before task10."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts), name


class Files(Source, Stored, Protocol):
    """Clips on a disk, whose labels name their tasks."""

    root: Path

    def labels(self, index: int) -> Labels: ...


@dataclass(frozen=True)
class FilesConfig(SourceConfig):
    """A source of files. Its tasks are those of its labels, in natural order, or one if it has none.

    Without `eval_path` a share of the recordings is held out for evaluation. A hash of a recording's name decides, so
    that it stays on its side when others come or go. At most `eval_clips` of each task are evaluated.
    """

    paths: ClassVar[tuple[str, ...]] = ("path", "eval_path")

    path: str = ""  # folder of the clips to train on
    eval_path: str | None = None  # folder of the clips to evaluate on, all of them
    eval_share: float = 0.1  # share of the videos held out for evaluation where there is no eval_path

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ConfigError(f"data.source={self.source} needs clips of your own: set data.path=FOLDER")
        if not 0 < self.eval_share < 1:
            raise ConfigError(f"data.eval_share={self.eval_share} must lie between 0 and 1")

    @abstractmethod
    def open(self, evaluation: bool = False) -> Files:
        """The clips of `path`, or of `eval_path`."""

    def train_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        if self.eval_path is not None:
            return self.all_tasks()
        source = self.open()
        split = [(name, self._split(name, source, clips)) for name, clips in self._by_task(source)]
        return [(name, part(source, trained)) for name, (trained, _) in split]

    def eval_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        source = self.open()
        tasks = self._by_task(source)
        if self.eval_path is None:
            return [(name, part(source, self._split(name, source, clips)[1])) for name, clips in tasks]
        given = dict(self.all_tasks(evaluation=True))
        if missing := [name for name, _ in tasks if name not in given]:
            raise StellaError(f"data.eval_path={self.eval_path} has no clips of task {', '.join(missing)}; add some")
        return [(name, given[name]) for name, _ in tasks]

    def all_tasks(self, evaluation: bool = False) -> Tasks:
        if evaluation and self.eval_path is None:
            raise StellaError("there are no clips for evaluation alone: set data.eval_path=FOLDER")
        source = self.open(evaluation)
        return [(name, part(source, clips)) for name, clips in self._by_task(source)]

    def _by_task(self, source: Files) -> list[tuple[str, list[int]]]:
        found: dict[str | None, list[int]] = {}
        for index in range(len(source)):
            found.setdefault(source.labels(index).task, []).append(index)
        if set(found) == {None}:
            found = {ONLY_TASK: found[None]}
        if None in found and not self.tasks:
            raise StellaError(
                f"{len(found[None])} of {len(source)} clips in {source.root} have no task and the others have; "
                "give them one, or name the tasks to use in data.tasks"
            )
        known = sorted((name for name in found if name is not None), key=natural)
        if missing := [name for name in self.tasks if name not in found]:
            raise StellaError(
                f"{source.root} has no clips of task {', '.join(missing)}; its tasks are {', '.join(known)}"
            )
        return [(name, found[name]) for name in self.tasks or known]

    def _split(self, name: str, source: Files, clips: list[int]) -> tuple[list[int], list[int]]:
        """The clips of a task to train on, and those to evaluate on."""
        places = {index: place(self.seed, source.origin(index).recording) for index in clips}
        held_out = sorted((i for i in clips if places[i] < self.eval_share), key=lambda i: (places[i], i))
        if len(held_out) < 2 or len(held_out) == len(clips):
            self._refuse_split(name, sorted(places.values()), len(held_out))
        return [index for index in clips if places[index] >= self.eval_share], sorted(held_out[: self.eval_clips])

    def _refuse_split(self, name: str, places: Sequence[float], held_out: int) -> NoReturn:
        """Say what to do about a task of which too few clips, or all, are held out; `places` are sorted."""
        of = "" if name == ONLY_TASK else f" of task {name}"
        clips, others = number_of(len(places), "clip") + of, "give others to evaluate on with data.eval_path=FOLDER"
        if len(places) < 3 or places[0] == places[-1]:
            raise StellaError(
                f"{self.path} has {clips} from {number_of(len(set(places)), 'video')}, too few to train "
                "on some and retrieve among others; add videos (stella look "
                f"{self.path} tells which can be used), or {others}"
            )
        third = places[min(10, len(places) // 3)]  # holds out ten, or a third of fewer than 30
        why = "too few to retrieve among" if held_out < 2 else "and leaves none to train on"
        raise StellaError(
            f"data.eval_share={self.eval_share} holds out {held_out:,} of {clips}, {why}; "
            f"set data.eval_share={math.ceil(100 * third) / 100}, or {others}"
        )

    def downstream(self, task: str) -> Parts:
        if task == "classify":  # clips without a class are refused before they are divided
            class_names(join([source for _, source in self.all_tasks()]))
        return super().downstream(task)

    def _learnt_and_tested(self, task: str) -> tuple[View, View]:
        if task != "classify" or self.eval_path is not None:
            return super()._learnt_and_tested(task)
        every, usually = (join([source for _, source in tasks]) for tasks in (self.all_tasks(), self.eval_tasks()))
        names = list(map(str, recordings(every)))
        places = {name: place(self.seed, name) for name in names}
        ranked = sorted(places, key=lambda name: (places[name], name))
        usual = {name for name in ranked if places[name] < self.eval_share}
        held = of_every_class(usual, ranked, zip(names, names_of(every, range(len(every))), strict=True))
        tested = held & set(recordings(usually)) | held - usual  # of those held out as usual, at most `eval_clips`
        learnt = part(every, [index for index, name in enumerate(names) if name not in held])
        return learnt, part(every, [index for index, name in enumerate(names) if name in tested])


@dataclass(frozen=True)
class SizedConfig(SourceConfig):
    """Clips that are decoded while training, in sizes that a model may ask for."""

    least_workers: ClassVar[int] = 1  # a file can hang its decoder, and only another process can be killed

    # none, and auto of the span: as the weights that a run starts from want it, or else the paper's (`Inputs`)
    pixels: int | None = None  # side of the square picture after cropping; none: as the weights, or 224
    frames: int | None = None  # video frames of a clip; none: as the weights, or 4
    duration: float | None = None  # seconds of a clip; none: as the weights, or 10.24
    span: float | Literal["auto"] | None = "auto"  # seconds of the frames' window; auto: as the weights; none: all
    short_side: int | None = None  # of a decoded frame; none: pixels and a seventh, in evaluation as the weights

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("pixels", "frames", "duration", "span", "short_side")
        self.check_positive(*(name for name in sizes if getattr(self, name) not in (None, "auto")))
        for name, most in {"pixels": 10_000, "short_side": 10_000, "frames": 10_000, "duration": 3600}.items():
            if (value := getattr(self, name)) is not None and value > most:
                raise ConfigError(f"data.{name}={value} must be at most {most:,}")

    def following(self, inputs: Inputs | None) -> Self:
        inputs = inputs or Inputs()
        return replace(
            self,
            pixels=inputs.pixels if self.pixels is None else self.pixels,
            frames=inputs.frames if self.frames is None else self.frames,
            duration=inputs.duration if self.duration is None else self.duration,
            span=inputs.span if self.span == "auto" else self.span,
        )

    def alike(self, inputs: Inputs | None) -> Self:
        found = self.following(inputs)
        follows = inputs is not None and self.pixels is None and self.short_side is None
        return replace(found, short_side=inputs.size) if inputs and follows else found

    def inputs(self) -> Inputs:
        c = self.following(None)
        assert c.pixels and c.frames and c.duration and c.span != "auto"
        size = c.short_side or with_margin(c.pixels)
        return Inputs(c.duration, c.pixels, size, c.frames, c.span, time_steps(c.duration))


@dataclass(frozen=True)
class DecodedConfig(SizedConfig, FilesConfig):
    """Files that are decoded while training."""

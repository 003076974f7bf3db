"""What a data source says of itself: sizes, tasks to train on and to evaluate on, what its gallery is worth.

Each source has a config of its own beside it (`ScenesConfig`, `FolderConfig`, …); `data/config.py` lists them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Protocol, Self

import torch

from stella.clip import Device, Labels, Source
from stella.data.views import View, part
from stella.errors import ConfigError, StellaError
from stella.media.inputs import PER_SECOND, Inputs, with_margin
from stella.rng import generator

Tasks = list[tuple[str, Source]]
ONLY_TASK = "all"  # the name where clips have no tasks
RANKS = (1, 5, 10)  # A is the mean of R@1, R@5 and R@10


@dataclass(frozen=True)
class SourceConfig(ABC):
    """A data source. A subclass sets `source` to its own name, which `data.source=NAME` picks."""

    least_workers: ClassVar[int] = 0  # worker processes that a run needs

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

    @abstractmethod
    def train_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        """The tasks in the order of training. A source may cache clips on `device`, unless `cache` is false."""

    @abstractmethod
    def eval_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        """The evaluation clips of the same tasks, in the same order; none of them is trained on."""

    @abstractmethod
    def all_tasks(self, evaluation: bool = False) -> Tasks:
        """All clips of the training set, or of the evaluation set, by task: what `stella pack` stores."""

    @property
    def label(self) -> str:
        """The kind of clips, for tables."""
        return self.source

    @property
    def cached(self) -> bool:
        """Whether clips are cached in this process, which makes worker processes useless for evaluation."""
        return False

    def ceilings(self, clips: Sequence[int]) -> dict[str, float]:
        """A by chance, and by what else is known, in a gallery of these numbers of clips; empty if nothing is."""
        return chance(clips)


def chance(clips: Sequence[int]) -> dict[str, float]:
    """A in percent of random retrieval in a gallery of these numbers of clips by task."""
    total = sum(clips)
    return {"chance": 100 * sum(min(k, total) / total for k in RANKS) / len(RANKS)} if total else {}


class Files(Source, Protocol):
    """Clips on a disk, whose labels name their tasks."""

    root: Path

    def labels(self, index: int) -> Labels: ...


@dataclass(frozen=True)
class FilesConfig(SourceConfig):
    """A source of files. Its tasks are those of its labels, sorted by name, or one if it has none.

    Without `eval_path` a tenth of each task's clips is held out for evaluation: at least ten (of fewer than 30 clips a
    third), at most `eval_clips`.
    """

    path: str = ""  # folder of the clips to train on
    eval_path: str | None = None  # folder of the clips to evaluate on, all of them

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ConfigError(f"data.source={self.source} needs clips of your own: set data.path=FOLDER")

    @abstractmethod
    def open(self, evaluation: bool = False) -> Files:
        """The clips of `path`, or of `eval_path`."""

    def train_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        if self.eval_path is not None:
            return self.all_tasks()
        return [(name, part(clips, self._split(name, clips)[0])) for name, clips in self._by_task(self.open())]

    def eval_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        tasks = self._by_task(self.open())
        if self.eval_path is None:
            return [(name, part(clips, self._split(name, clips)[1])) for name, clips in tasks]
        given = dict(self._by_task(self.open(evaluation=True)))
        if missing := [name for name, _ in tasks if name not in given]:
            raise StellaError(f"data.eval_path={self.eval_path} has no clips of task {', '.join(missing)}; add some")
        return [(name, given[name]) for name, _ in tasks]

    def all_tasks(self, evaluation: bool = False) -> Tasks:
        if evaluation and self.eval_path is None:
            raise StellaError("there are no clips for evaluation alone: set data.eval_path=FOLDER")
        return list(self._by_task(self.open(evaluation)))

    def _by_task(self, source: Files) -> list[tuple[str, View]]:
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
        known = sorted(name for name in found if name is not None)
        if missing := [name for name in self.tasks if name not in found]:
            raise StellaError(
                f"{source.root} has no clips of task {', '.join(missing)}; its tasks are {', '.join(known)}"
            )
        return [(name, part(source, found[name])) for name in self.tasks or known]

    def _split(self, name: str, clips: View) -> tuple[list[int], list[int]]:
        """The clips to train on, and those held out for evaluation."""
        total = len(clips)
        if total < 10:
            raise StellaError(f"task {name} has {total} clips, too few to hold some out; set data.eval_path=FOLDER")
        count = min(self.eval_clips, max(total // 10, min(10, total // 3)))
        drawn = torch.randperm(total, generator=generator(self.seed, "evaluation clips"))[:count].tolist()
        held_out = set(drawn)
        return [index for index in range(total) if index not in held_out], sorted(held_out)


@dataclass(frozen=True)
class DecodedConfig(FilesConfig):
    """Clips that are decoded while training."""

    least_workers: ClassVar[int] = 1  # a file can hang its decoder, and only another process can be killed

    # none, and auto of the span: as the weights that a run starts from want it, or else the paper's (`Inputs`)
    pixels: int | None = None  # after cropping
    frames: int | None = None
    duration: float | None = None  # seconds of a clip
    span: float | Literal["auto"] | None = "auto"  # seconds of the window with the frames; none: the whole clip

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("pixels", "frames", "duration", "span")
        self.check_positive(*(name for name in sizes if getattr(self, name) not in (None, "auto")))

    def following(self, inputs: Inputs | None) -> Self:
        inputs = inputs or Inputs()
        return replace(
            self,
            pixels=inputs.pixels if self.pixels is None else self.pixels,
            frames=inputs.frames if self.frames is None else self.frames,
            duration=inputs.duration if self.duration is None else self.duration,
            span=inputs.span if self.span == "auto" else self.span,
        )

    def inputs(self) -> Inputs:
        c = self.following(None)
        assert c.pixels and c.frames and c.duration and c.span != "auto"
        return Inputs(c.duration, c.pixels, with_margin(c.pixels), c.frames, c.span, round(c.duration * PER_SECOND))

"""From a configuration to the tasks of a run: a sequence of named sources to train on, and one to evaluate on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from stella.clip import Source
from stella.data.folder import Folder
from stella.data.packed import Packed, read_header
from stella.data.scenes import SIZES, TASKS, Scenes
from stella.data.shards import Shards
from stella.data.views import Cached, Part, part
from stella.errors import ConfigError, StellaError
from stella.media.decode import Plan
from stella.rng import generator

Tasks = list[tuple[str, Source]]
ONLY_TASK = "all"  # where there are no tasks


@dataclass(frozen=True)
class DataConfig:
    """Where clips come from. The model takes its sizes from here.

    A folder's or shards' tasks are those of its labels, sorted by name, or one if it has none. Without `eval_path` a
    tenth of each task's clips is set aside for evaluation, but of few clips ten or a third, and never more than
    `eval_clips`. Packed clips are what was packed, of the sizes they were packed for.
    """

    source: Literal["scenes", "folder", "shards", "packed"] = "scenes"
    tasks: tuple[str, ...] = ()  # which, in this order; none: all
    eval_clips: int = 240  # for each task, at most
    seed: int = 0  # of the scenes, and of what is set aside
    cache: Literal["off", "cpu", "device"] = "cpu"  # where scenes are kept once they are rendered
    # scenes
    size: str = "scenes"
    clips: int = 2000  # for each task
    # folder, shards and packed
    path: str | None = None
    eval_path: str | None = None
    # folder and shards
    labels: str | None = None  # a folder's CSV of file,label,task
    eval_labels: str | None = None
    pixels: int = 224  # after cropping
    frames: int = 4
    duration: float = 10.24  # seconds
    span: float | None = 4.0  # the frames come from so many seconds in the middle; none: from all

    def __post_init__(self) -> None:
        if self.source == "scenes" and self.path is not None:
            raise ConfigError(f"data.path={self.path} is of no use to data.source=scenes; set another source too")
        if self.source != "scenes" and self.path is None:
            raise ConfigError(f"data.source={self.source} needs a folder: set data.path=FOLDER")
        if self.source == "scenes" and self.size not in SIZES:
            raise ConfigError(f"unknown data.size={self.size!r}; choose one of {', '.join(SIZES)}")
        for name, clips in {"clips": self.clips, "eval_clips": self.eval_clips}.items():
            if clips < 1:
                raise ConfigError(f"data.{name}={clips} must be at least 1")
        if len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"data.tasks names one task twice ({', '.join(self.tasks)}); name each once")


@dataclass(frozen=True)
class Sizes:
    """What the clips of a source look like to a model."""

    pixels: int
    spec_frames: int
    frames: int


def sizes(config: DataConfig) -> Sizes:
    if config.source == "scenes":
        size = SIZES[config.size]
        return Sizes(size.pixels, size.spec_frames, size.frames)
    if config.source == "packed":
        header = read_header(Path(config.path or ""))
        return Sizes(header.pixels, header.spec_frames, header.frames[0])
    return Sizes(config.pixels, round(config.duration * 100), config.frames)


def train_tasks(config: DataConfig, device: torch.device | str = "cpu") -> Tasks:
    """The tasks in the order of training; `device` is where a cache on the device lies."""
    if config.source == "scenes":
        return [(task, _scenes(config, task, "train", config.clips, device)) for task in config.tasks or TASKS]
    tasks = _by_task(config, _open(config, config.path))
    if config.eval_path is not None:
        return [(name, whole) for name, whole in tasks]
    return [(name, _without(whole, _set_aside(config, name, whole))) for name, whole in tasks]


def eval_tasks(config: DataConfig, device: torch.device | str = "cpu") -> Tasks:
    """The evaluation clips of the same tasks, in the same order; none of them is trained on."""
    if config.source == "scenes":
        return [(task, _scenes(config, task, "eval", config.eval_clips, device)) for task in config.tasks or TASKS]
    tasks = _by_task(config, _open(config, config.path))
    if config.eval_path is None:
        return [(name, _only(whole, _set_aside(config, name, whole))) for name, whole in tasks]
    named = dict(_by_task(config, _open(config, config.eval_path)))
    if missing := [name for name, _ in tasks if name not in named]:
        raise StellaError(f"data.eval_path={config.eval_path} has no clips of task {', '.join(missing)}; add some")
    return [(name, _only(named[name], _draw(config, len(named[name]), config.eval_clips))) for name, _ in tasks]


def all_tasks(config: DataConfig, evaluation: bool = False) -> Tasks:
    """All clips of the data's path, or of its `eval_path`, by task, nothing set aside: what `stella pack` stores."""
    if config.source == "scenes":
        return (eval_tasks if evaluation else train_tasks)(replace(config, cache="off"))
    if evaluation and config.eval_path is None:
        raise StellaError("data.eval_path is not set: there are no clips for evaluation alone; set it or leave it out")
    path = config.eval_path if evaluation else config.path
    return [(name, whole) for name, whole in _by_task(config, _open(config, path))]


def _scenes(config: DataConfig, task: str, split: str, clips: int, device: torch.device | str) -> Source:
    if config.cache == "off":
        return Scenes(task, split, clips, size=config.size, seed=config.seed)
    return _kept(task, split, clips, config.size, config.seed, str(device if config.cache == "device" else "cpu"))


@lru_cache(maxsize=2 * len(TASKS))
def _kept(task: str, split: str, clips: int, size: str, seed: int, device: str) -> Cached:
    """Runs of one process share what is rendered, whatever the order of their tasks."""
    return Cached(Scenes(task, split, clips, size=size, seed=seed), device)


def _open(config: DataConfig, path: str | None) -> Folder | Shards | Packed:
    assert path is not None  # DataConfig has checked it
    if config.source == "packed":
        return Packed(path)
    decoded = math.ceil(config.pixels * 8 / 7)  # room for crops, as 256 is to 224
    if config.source == "shards":
        return Shards(path, config.frames, config.span, decoded)
    labels = config.labels if path == config.path else config.eval_labels
    return Folder(path, Plan(0.0, config.duration, config.frames, decoded, config.span), labels)


def _by_task(config: DataConfig, source: Folder | Shards | Packed) -> list[tuple[str, Part]]:
    found: dict[str | None, list[int]] = {}
    for index in range(len(source)):
        found.setdefault(source.labels(index).task, []).append(index)
    if set(found) == {None}:
        found = {ONLY_TASK: found[None]}
    wanted = config.tasks or sorted(name for name in found if name is not None)
    if None in found and not config.tasks:
        raise StellaError(
            f"{len(found[None])} of {len(source)} clips in {source.root} have no task and the others have; "
            "give them one, or name the tasks to use in data.tasks"
        )
    if missing := [name for name in wanted if name not in found]:
        raise StellaError(
            f"{source.root} has no clips of task {', '.join(missing)}; "
            f"its tasks are {', '.join(sorted(name for name in found if name))}"
        )
    return [(name, part(source, found[name])) for name in wanted]


def _set_aside(config: DataConfig, name: str, whole: Part) -> list[int]:
    if len(whole) < 10:
        raise StellaError(
            f"task {name} has {len(whole)} clips, too few to set some aside for evaluation; set data.eval_path"
        )
    aside = max(len(whole) // 10, min(10, len(whole) // 3))
    return _draw(config, len(whole), min(config.eval_clips, aside))


def _draw(config: DataConfig, total: int, count: int) -> list[int]:
    drawn: list[int] = torch.randperm(total, generator=generator(config.seed, "evaluation clips"))[:count].tolist()
    return sorted(drawn)


def _only(whole: Part, chosen: Sequence[int]) -> Part:
    return part(whole.source, [whole.indices[i] for i in chosen])


def _without(whole: Part, chosen: Sequence[int]) -> Part:
    left_out = set(chosen)
    return part(whole.source, [index for i, index in enumerate(whole.indices) if i not in left_out])

"""The config of scenes: which clips are rendered, and where they are cached."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal, Self

from stella.clip import BACKGROUND, Device, Source
from stella.data.downstream import Parts
from stella.data.scenes.audit import audit
from stella.data.scenes.classes import TASKS, classes
from stella.data.scenes.source import SIZES, TENTHS, Scenes, SceneSegments
from stella.data.tasks import SourceConfig, Tasks
from stella.data.views import Cached, join
from stella.errors import ConfigError
from stella.media.inputs import Inputs

DEFAULT = next(iter(SIZES))


@dataclass(frozen=True)
class ScenesConfig(SourceConfig):
    embedded: ClassVar[bool] = True
    class_names: ClassVar[str] = (
        "A class is named by its look, action, timbre and link: hue→pitch means that the hue sets the pitch. "
        "White rings, rims and trails are part of the clips: they show an action."
    )

    source: Literal["scenes"] = "scenes"  # clips that are rendered here
    seed: int = 0  # another seed gives other clips
    size: str | None = None  # scenes, scenes-hard, scenes-full or scenes-full-hard; none: as the weights, or scenes
    clips: int = 2000  # to train on, for each task
    cache: Literal["off", "cpu", "device"] = "cpu"  # where rendered clips are kept

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("clips")
        if self.label not in SIZES:
            raise ConfigError(f"unknown data.size={self.size!r}; choose one of {', '.join(SIZES)}")

    def inputs(self) -> Inputs:
        """Clips are rendered at the model's size, without a margin, and their frames are spread over all of them."""
        size = SIZES[self.label]
        return Inputs(size.duration, size.pixels, size.pixels, size.frames, None, size.spec_frames)

    def following(self, inputs: Inputs | None) -> Self:
        alike = [n for n, s in SIZES.items() if inputs and (s.pixels, s.duration) == (inputs.pixels, inputs.duration)]
        return replace(self, size=self.size or next(iter(alike), DEFAULT))

    def train_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        return self._tasks("train", self.clips, device, cache)

    def eval_tasks(self, device: Device = "cpu", cache: bool = True) -> Tasks:
        return self._tasks("eval", self.eval_clips, device, cache)

    def all_tasks(self, evaluation: bool = False) -> Tasks:
        return (self.eval_tasks if evaluation else self.train_tasks)(cache=False)

    @property
    def named(self) -> tuple[str, ...]:
        return self.tasks or TASKS

    @property
    def label(self) -> str:
        return self.size or DEFAULT

    @property
    def described(self) -> str:
        return f"rendered {self.label}, the embedded benchmark"

    @property
    def cached(self) -> bool:
        return self.cache != "off"

    def ceilings(self, clips: Sequence[int]) -> dict[str, float]:
        """The cue audit of the evaluation clips."""
        return dict(_ceilings(replace(self, cache="off", clips=1)))

    def downstream(self, task: str) -> Parts:
        """All classes of the tasks; for retrieval the classes of `novel`, which no task has.

        The parts are splits of their own. Clips to choose on are as many as clips to test on.
        """
        names = self.tasks or (("novel",) if task == "retrieval" else TASKS)
        own, cut = replace(self, tasks=names), task == "events"
        counts = {"train": self.clips, "validation": self.eval_clips, "eval": self.eval_clips}
        parts: dict[str, Source] = {}
        for split, clips in counts.items():
            found = [Scenes(name, split, clips, size=self.label, seed=self.seed) for name in names]
            cached = [source for _, source in own._tasks(split, clips, "cpu", cache=True)]
            parts[split] = join([SceneSegments(scenes) for scenes in found] if cut else cached)
        known = tuple(kind.name for name in names for kind in classes(name))
        named = (*known, BACKGROUND) if cut else known
        return Parts(parts["train"], parts["validation"], parts["eval"], named, TENTHS if cut else 1)

    def _tasks(self, split: str, clips: int, device: Device, cache: bool) -> Tasks:
        names = self.named
        if not (cache and self.cached):
            return [(name, Scenes(name, split, clips, size=self.label, seed=self.seed)) for name in names]
        place = str(device if self.cache == "device" else "cpu")
        return [(name, _cached(name, split, clips, self.label, self.seed, place)) for name in names]


@lru_cache(maxsize=3 * len(TASKS))
def _cached(task: str, split: str, clips: int, size: str, seed: int, device: str) -> Cached:
    """Runs in one process share rendered clips, whatever the order of their tasks."""
    return Cached(Scenes(task, split, clips, size=size, seed=seed), device)


@lru_cache(maxsize=16)
def _ceilings(config: ScenesConfig) -> dict[str, float]:
    table = audit({name: source for name, source in config.eval_tasks() if isinstance(source, Scenes)})
    return table["mixed"] if "mixed" in table else next(iter(table.values()))

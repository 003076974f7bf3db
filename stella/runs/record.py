"""What a run folder says, and which runs are the same experiment with another seed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from stella.data.config import data_config
from stella.data.skipped import Skipped
from stella.data.tasks import chance
from stella.errors import ConfigError
from stella.evaluate import forgetting
from stella.files import Line, read_lines
from stella.methods import METHODS
from stella.runs.config import FREE
from stella.runs.folder import RunFolder

# No result depends on these; a seed makes another run of the same experiment.
NOT_THE_EXPERIMENT = (*FREE, "seed", "stream.seed", "train.log_every")


@dataclass(frozen=True)
class RunRecord:
    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[Line]
    speed: list[Line]
    skipped: Skipped

    def lines(self, kind: str) -> list[Line]:
        return [line for line in self.metrics if line.get("kind") == kind]

    @cached_property
    def evaluations(self) -> list[Line]:
        """In order, the one before the first task among them."""
        return sorted(self.lines("evaluation"), key=lambda line: int(line["task"]))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """A and F as far as the run has come: those of an unfinished run are not its result."""
        return forgetting.summary(self.evaluations)

    @property
    def finished(self) -> bool:
        return bool(self.lines("end"))

    @property
    def method(self) -> str:
        return str(self.config.get("method", "unknown"))

    @property
    def title(self) -> str:
        """The method as tables call it; its name where this version does not know it."""
        return METHODS[self.method].title if self.method in METHODS else self.method

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def tasks(self) -> list[str]:
        return list(self.evaluations[-1]["tasks"]) if self.evaluations else []

    @property
    def step(self) -> int:
        return max((int(line["step"]) for line in self.metrics if "step" in line), default=0)

    @property
    def status(self) -> str:
        learnt = sum(line["task"] >= 0 for line in self.evaluations)
        if self.finished:
            return "finished"
        return f"unfinished: step {self.step}, {learnt} of {len(self.tasks) or '?'} tasks evaluated"


def read_run(path: Path | str) -> RunRecord:
    """A run folder, whether its run is finished, going on or was killed."""
    folder = RunFolder(path)
    config = folder.read_config()
    environment = json.loads(folder.environment.read_text(encoding="utf-8")) if folder.environment.exists() else {}
    metrics, speed = read_lines(folder.metrics), read_lines(folder.speed)
    return RunRecord(folder.root, config, environment, metrics, speed, Skipped(folder.skipped))


@dataclass(frozen=True)
class Spread:
    """A figure over several runs."""

    values: list[float]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def deviation(self) -> float | None:
        """Of a sample; None for a single run."""
        return stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        if not self.values:
            return "–"
        spread = "" if self.deviation is None else f" ± {self.deviation:.1f}"
        return f"{self.mean:.1f}{spread}"


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[RunRecord] = field(default_factory=list)

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def tasks(self) -> list[str]:
        return max((run.tasks for run in self.runs), key=len)

    @property
    def finished(self) -> list[RunRecord]:
        return [run for run in self.runs if run.finished]

    def spread(self, *keys: str) -> Spread:
        """`spread("A")`, `spread("a2v", "1", "F")`: over the finished runs for which it is defined."""
        values = [_dig(run.summary, keys) for run in self.finished]
        return Spread([value for value in values if value is not None])


def group(runs: Iterable[RunRecord]) -> list[Group]:
    """Runs by experiment, methods in the registry's order; where one method appears twice, labels say what differs."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        found.setdefault(json.dumps(experiment(run.config), sort_keys=True), []).append(run)
    groups = [sorted(members, key=lambda run: run.seed) for members in found.values()]
    order = list(METHODS)
    groups.sort(key=lambda members: order.index(members[0].method) if members[0].method in order else -1)
    alike: dict[str, list[dict[str, Any]]] = {}
    for members in groups:
        alike.setdefault(members[0].method, []).append(experiment(members[0].config))
    return [Group(_label(members[0], alike[members[0].method]), members) for members in groups]


def experiment(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, dotted, that a result depends on, the seed apart."""
    return {key: value for key, value in flatten(config).items() if key not in NOT_THE_EXPERIMENT}


def unlike(runs: Sequence[RunRecord]) -> str | None:
    """A warning where runs are the same but for their folder, or where those of different methods differ in more than
    what a method brings with it."""
    found = [experiment(run.config) for run in runs]
    if len(runs) > len({(repr(one), run.seed) for one, run in zip(found, runs, strict=True)}):
        return "Some runs have the same configuration and the same seed, so a deviation over them is none over seeds"
    if len({run.method for run in runs}) < 2:
        return None
    own = ("method", "args.", "memory.")
    keys = [key for key in found[0] if not key.startswith(own) and any(one.get(key) != found[0][key] for one in found)]
    if not keys:
        return None
    return f"These runs differ in more than their method, so their figures do not compare methods: {', '.join(keys)}"


def flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = value
    return flat


def ceilings(runs: Sequence[RunRecord]) -> dict[str, float] | None:
    """What chance and, of scenes, one cue alone would give in these runs' gallery, if they all share one."""
    seen = [run for run in runs if run.evaluations]
    galleries = [gallery_ceilings(run.config.get("data", {}), run.evaluations[-1].get("clips", ())) for run in seen]
    return galleries[0] if galleries and all(gallery == galleries[0] for gallery in galleries) else None


def gallery_ceilings(data: Mapping[str, Any], clips: Sequence[int] = ()) -> dict[str, float] | None:
    """The same for one configuration of data, with these numbers of evaluation clips by task; None if unknown."""
    try:
        return data_config(data).ceilings(clips) or None
    except ConfigError:  # a run of another version, whose gallery is unknown
        return chance(clips) or None


def _label(run: RunRecord, alike: Sequence[Mapping[str, Any]]) -> str:
    """What differs from others of its method, or the run's folder where that is too much to read."""
    own = experiment(run.config)
    differing = [f"{key}={own[key]}" for key in own if any(other.get(key) != own[key] for other in alike)]
    told = ", ".join(differing)
    where = "/".join(run.path.parts[-2:])
    return f"{run.title} ({told if len(told) <= 40 else where})" if differing else run.title


def _dig(tree: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    value: Any = tree
    for key in keys:
        value = value.get(key) if value else None
    return value if isinstance(value, float) else None

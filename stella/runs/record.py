"""Reads run folders and groups runs that differ only in their seed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from stella.data.config import data_config
from stella.data.skipped import Skipped
from stella.data.tasks import chance
from stella.errors import ConfigError, number_of, plain
from stella.evaluate import forgetting
from stella.files import Line, read_json, read_lines
from stella.methods import METHODS
from stella.runs.config import FREE
from stella.runs.folder import RunFolder

# Keys that do not make another experiment: results do not depend on them, or they are the seed.
NOT_THE_EXPERIMENT = (*FREE, "seed", "stream.seed", "train.log_every")
LONGEST_LABEL = 40  # characters of "key=value, …"; beyond that a label shows the run's folder


@dataclass(frozen=True)
class RunRecord:
    """The files of one run."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[Line]
    speed: list[Line]
    skipped: Skipped
    notes: tuple[str, ...] = ()  # of the import of weights and of the data

    def lines(self, kind: str) -> list[Line]:
        return [line for line in self.metrics if line.get("kind") == kind]

    @cached_property
    def evaluations(self) -> list[Line]:
        """In order of tasks, beginning with the evaluation before the first one (task -1)."""
        return sorted(self.lines("evaluation"), key=lambda line: int(line["task"]))

    @cached_property
    def slow(self) -> "RunRecord | None":
        """The scores of the run's slow weights (`train.ema`) as a record of their own; None without slow weights."""
        scored = [{**line, **line["slow"], "slow": None} for line in self.metrics if line.get("slow")]
        return replace(self, metrics=scored) if scored else None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """A and F up to the last evaluation, as `forgetting.summary` returns them; those of the slow weights under
        `slow`."""
        scores = forgetting.summary(self.evaluations)
        return scores | {"slow": self.slow.summary} if self.slow else scores

    @property
    def finished(self) -> bool:
        return bool(self.lines("end"))

    @property
    def method(self) -> str:
        return str(self.config.get("method", "unknown"))

    @property
    def title(self) -> str:
        """The method's name in tables."""
        if self.method in METHODS:
            return METHODS[self.method].title
        return str(self.environment.get("title", self.method.rpartition(":")[2]))

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def tasks(self) -> list[str]:
        """Names to show."""
        return [plain(name) for name in self.evaluations[-1]["tasks"]] if self.evaluations else []

    @property
    def step(self) -> int:
        return max((int(line["step"]) for line in self.metrics if "step" in line), default=0)

    @property
    def status(self) -> str:
        if self.finished:
            return "finished"
        evaluated = sum(line["task"] >= 0 for line in self.evaluations)
        total = len(self.tasks or task_names(self.config.get("data", {})))
        done = f"{evaluated} of {number_of(total, 'task')}" if total else number_of(evaluated, "task")
        return f"unfinished: step {self.step}, {done} evaluated"


def read_run(path: Path | str) -> RunRecord:
    """Read a run folder, whether the run is finished, in progress or was killed; no file is changed."""
    folder = RunFolder(path)
    config = folder.read_config()
    environment = read_json(folder.environment) if folder.environment.exists() else {}
    skipped = Skipped(folder.skipped)
    told = read_json(folder.notes) if folder.notes.exists() else {}
    notes = tuple(str(note) for kind in ("weights", "data") for note in told.get(kind, []))
    metrics, speed = read_lines(folder.metrics), read_lines(folder.speed)
    return RunRecord(folder.root, config, environment, metrics, speed, skipped, notes)


def mean_recall(evaluation: Line) -> forgetting.Accuracy:
    """Mean of R@1/5/10 in both directions for each task of one evaluation, in percent: a row of acc(t, i)."""
    (row,) = forgetting.mean_accuracy([{**evaluation, "task": 0}])
    return np.asarray(row)


@dataclass(frozen=True)
class Spread:
    """A figure over several runs."""

    values: list[float]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation; None for a single run."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def short(self) -> str:
        """The mean alone."""
        return f"{self.mean:z.1f}" if self.values else "–"

    def __str__(self) -> str:
        return self.short if self.deviation is None else f"{self.short} ± {self.deviation:.1f}"


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: list[RunRecord]

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def tasks(self) -> list[str]:
        return max((run.tasks for run in self.runs), key=len)

    @property
    def finished(self) -> list[RunRecord]:
        return [run for run in self.runs if run.finished]

    @property
    def progress(self) -> str:
        """Number of runs, or `2 of 3` while some are unfinished."""
        done, total = len(self.finished), len(self.runs)
        return str(total) if done == total else f"{done} of {total}"

    @cached_property
    def versions(self) -> list["Group"]:
        """This group and, if it has slow weights, those as a group of their own."""
        slow = [run.slow for run in self.runs if run.slow]
        return [self, Group(f"{self.label}, slow weights", slow)] if slow else [self]

    def spread(self, *keys: str) -> Spread:
        """`spread("A")`, `spread("a2v", "1", "F")`, `spread("slow", "A")`: over the finished runs that define it."""
        found: list[Any] = [run.summary for run in self.finished]
        for key in keys:
            found = [each.get(key) for each in found if each is not None]
        return Spread([value for value in found if value is not None])


def group(runs: Iterable[RunRecord]) -> list[Group]:
    """Group runs by experiment, methods in the registry's order; labels show what differs within one method."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        found.setdefault(json.dumps(experiment(run.config), sort_keys=True), []).append(run)
    order = {name: place for place, name in enumerate(METHODS)}
    members = [sorted(group, key=lambda run: run.seed) for group in found.values()]
    members.sort(key=lambda runs: order.get(runs[0].method, -1))
    firsts = [runs[0] for runs in members]
    return [Group(plain(_label(runs[0], firsts)), runs) for runs in members]


def _label(run: RunRecord, others: Sequence[RunRecord]) -> str:
    """The method's title and what differs from other groups of this method, or the folder if that is too long."""
    own = experiment(run.config)
    rivals = [experiment(other.config) for other in others if other.method == run.method and other is not run]
    if not rivals:
        return run.title
    differing = ", ".join(f"{key}={own[key]}" for key in own if any(rival.get(key) != own[key] for rival in rivals))
    if len(differing) > LONGEST_LABEL:
        differing = "/".join(run.path.parts[-2:])
    return f"{run.title} ({differing})" if differing else run.title


def experiment(config: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted keys that a result depends on, without the seed and without what is not set."""
    flat = flatten(config)
    return {key: value for key, value in flat.items() if key not in NOT_THE_EXPERIMENT and value is not None}


def galleries(runs: Iterable[RunRecord]) -> list[int]:
    """The different numbers of clips that runs were evaluated on, in order."""
    return sorted({sum(run.evaluations[-1]["clips"]) for run in runs if run.evaluations})


def unlike(runs: Sequence[RunRecord]) -> str | None:
    """A warning if galleries differ in size, if a run appears twice, or if runs of several methods differ in more than
    the method's own settings."""
    if len(sizes := galleries(runs)) > 1:
        counts = " and ".join(f"{size:,}" for size in sizes)
        return f"These runs were evaluated on galleries of {counts} clips, in which chance differs: they are not ranked"
    found = [experiment(run.config) for run in runs]
    if len(runs) > len({(repr(one), run.seed) for one, run in zip(found, runs, strict=True)}):
        return "Some runs have the same configuration and the same seed, so their deviation is not one over seeds"
    if len({run.method for run in runs}) < 2:
        return None
    shared = [key for one in found for key in one if not key.startswith(("method", "args.", "memory."))]
    keys = [key for key in dict.fromkeys(shared) if any(one.get(key) != found[0].get(key) for one in found)]
    if not keys:
        return None
    return f"These runs differ in more than their method, so their figures do not compare methods: {', '.join(keys)}"


def flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of a tree by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return flat


def ceilings(runs: Sequence[RunRecord]) -> dict[str, float] | None:
    """Scores of chance and, if the data know them, of single cues in these runs' gallery; None if galleries differ."""
    seen = [run for run in runs if run.evaluations]
    found = [gallery_ceilings(run.config.get("data", {}), run.evaluations[-1].get("clips", ())) for run in seen]
    return found[0] if found and all(each == found[0] for each in found) else None


def task_names(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The tasks that a configuration of data names; nothing if its clips do, or if it is of another version."""
    try:
        return data_config(data).named
    except ConfigError:
        return ()


def gallery_ceilings(data: Mapping[str, Any], clips: Sequence[int] = ()) -> dict[str, float] | None:
    """The same for one configuration of data, with these numbers of evaluation clips by task; None if unknown."""
    try:
        return data_config(data).ceilings(clips) or None
    except ConfigError:  # a run of another version, whose gallery is unknown
        return chance(clips) or None

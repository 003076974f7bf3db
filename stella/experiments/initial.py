"""What comes before a benchmark's runs: the weights that they start from, and what everything will cost.

`initial.KEY=VALUE` on the command line sets KEY of the initial runs; `downstream.TASK=SOURCE:PATH` names the data of a
downstream task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from stella.bench.measure import rates
from stella.data.archives.benchmarks import ListedConfig
from stella.data.config import DataConfig
from stella.errors import ConfigError, number_of
from stella.experiments.recipe import Recipe, run_config
from stella.files import Line, absolute, read_json, write_json
from stella.runs.config import RunConfig, settle
from stella.runs.folder import RunFolder
from stella.runs.loop import pretrain
from stella.runs.progress import say

INITIAL, BACKBONE, MATCHING = "initial", "backbone", "matching"  # folders of runs
SHARED = ("model.", "train.", "data.")  # keys that the initial runs take over
NOT_SHARED = ("data.source", "data.tasks")
STEPS = 5  # that are timed
COST = "cost.json"


def taken_out(overrides: Sequence[str], prefix: str) -> tuple[list[str], list[str]]:
    """The overrides `PREFIX.KEY=VALUE` as KEY=VALUE, and the others."""
    own = [value.removeprefix(f"{prefix}.") for value in overrides if value.startswith(f"{prefix}.")]
    return own, [value for value in overrides if not value.startswith(f"{prefix}.")]


def downstream_data(values: Sequence[str]) -> dict[str, Line]:
    """The data of each downstream task, of `TASK=SOURCE:PATH`."""
    found: dict[str, Line] = {}
    for value in values:
        task, _, named = value.partition("=")
        source, colon, path = named.partition(":")
        if not colon:
            raise ConfigError(f"downstream.{value} names no data; give downstream.TASK=SOURCE:PATH, as ave:FOLDER")
        found[task] = {"source": source, "path": absolute(path)}
    return found


def has_weights(overrides: Sequence[str]) -> bool:
    return any(value.startswith("model.weights=") for value in overrides)


def stages(recipe: Recipe, own: Sequence[str], overrides: Sequence[str], folder: Path) -> dict[Path, RunConfig]:
    """The initial runs in their order: the backbone, then its matching module."""
    main = recipe.config(next(iter(recipe.orders)), next(iter(recipe.variants)), overrides).data
    first, second = recipe.initial
    shared = [value for value in overrides if value.startswith(SHARED) and not value.startswith(NOT_SHARED)]
    backbone = run_config(first, [*shared, *own])
    lists = getattr(main, "lists", None)
    named = any(value.startswith("data.path=") for value in own)
    if isinstance(backbone.data, ListedConfig) and backbone.data.lists != lists and not named:
        raise ConfigError(
            f"{first} trains on {backbone.data.source}, which is not at data.path; give it with "
            "initial.data.path=FOLDER, or weights with model.weights=FILE"
        )
    values = [value for value in [*shared, *own] if not value.startswith(("model.weights=", "data.audioset="))]
    values.append(f"model.weights={folder / BACKBONE}")
    if audioset := getattr(backbone.data, "audioset", None):
        values.append(f"data.path={audioset}")
    elif isinstance(backbone.data, ListedConfig):
        values.append(f"data.source={backbone.data.source}")
    return {folder / BACKBONE: backbone, folder / MATCHING: run_config(second, values)}


def sized(runs: Mapping[Path, RunConfig]) -> dict[str, RunConfig]:
    """The initial runs with the model of the first, before it has left weights."""
    models = [config.model for config in runs.values()]
    return {f"{INITIAL}/{run.name}": replace(config, model=models[0]) for run, config in runs.items()}


def make_initial(runs: Mapping[Path, RunConfig], console: Console) -> int:
    """Do the initial runs that are not finished; returns the exit code."""
    for folder, config in runs.items():
        if RunFolder(folder).end is None:
            say(console, f"initial weights: {folder.name}", "dim")
            result = pretrain(config, folder, resume=True, console=console)
            if result.exit_code:
                say(console, "Run the same command again to resume.")
                return result.exit_code
    return 0


def tell_cost(configs: Mapping[str, RunConfig], seeds: Sequence[int], folder: Path, console: Console) -> None:
    """Say how many hours of this machine the runs that are not finished take, at its measured rate.

    Data that cannot be opened are refused first.
    The rates are kept in `folder`, so that a command that goes on does not measure again.
    """
    left = {key: _unfinished(folder / key, seeds) for key in configs}
    configs = {key: config for key, config in configs.items() if left[key]}
    count = cache(_clips)
    clips = {key: count(settle(config).data) * config.stream.epochs for key, config in configs.items()}
    kinds = {f"{config.method}, batch {config.stream.batch_size}": config for config in configs.values()}
    known = _rates(kinds, folder, console)
    hours = {}
    for key, config in configs.items():
        rate = known.get(f"{config.method}, batch {config.stream.batch_size}")
        if rate is not None:
            hours[key] = left[key] * clips[key] / rate / 3600
    if not configs:
        return
    slowest = max(hours, key=lambda key: hours[key], default="")
    lacking = f"; {len(configs) - len(hours)} could not be measured" if len(hours) < len(configs) else ""
    say(
        console,
        f"{sum(hours.values()):,.1f} hours of training on this machine for {number_of(sum(left.values()), 'run')} of "
        f"{number_of(len(configs), 'configuration')}, most of them {slowest} "
        f"({hours.get(slowest, 0):,.1f} h){lacking}; without reading clips and evaluation. "
        "Stop it at any time: the same command goes on.",
    )


def _clips(data: DataConfig) -> int:
    """The training clips of data that has clips to evaluate on too."""
    data.eval_tasks()
    return sum(len(source) for _, source in data.train_tasks())


def _unfinished(folder: Path, seeds: Sequence[int]) -> int:
    """Runs of a configuration that are not finished; an initial run has one seed."""
    runs = [folder] if folder.parent.name == INITIAL else [folder / f"seed-{seed}" for seed in seeds]
    return sum(RunFolder(run).end is None for run in runs)


def _rates(kinds: Mapping[str, RunConfig], folder: Path, console: Console) -> dict[str, float]:
    """Clips a second of each kind of step, as far as they can be measured, each kept once it is known."""
    known: dict[str, Any] = read_json(folder / COST) if (folder / COST).exists() else {}
    missing = {kind: settle(config) for kind, config in kinds.items() if kind not in known}
    if missing:
        say(console, f"measuring {STEPS} steps of {number_of(len(missing), 'kind')}", "dim")
    folder.mkdir(parents=True, exist_ok=True)
    for kind, rate in rates(missing, STEPS):
        if isinstance(rate, Exception):
            say(console, f"{kind} could not be measured: {rate}", "yellow")
            continue
        say(console, f"{kind}: {rate:.1f} clips/s", "dim")
        write_json(folder / COST, known := known | {kind: rate})
    return known

"""Fading attention: where a model finds the sound in clips of each task, after that task and after each later one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from stella.clip import Batch, Source
from stella.data.downstream import masked, sounds
from stella.data.stream import StreamConfig, evaluation_batches
from stella.data.tasks import Tasks
from stella.data.views import part
from stella.experiments.recipe import Recipe
from stella.experiments.results import to_csv
from stella.files import read_json, write_text
from stella.model import weights
from stella.report.attention import attention_sheet
from stella.runs.config import RunConfig, machine, settle
from stella.runs.environment import provenance
from stella.runs.folder import RunFolder
from stella.runs.progress import say
from stella.transfer import localise
from stella.transfer.config import TransferConfig, WeightsConfig, transfer_config
from stella.transfer.run import transfer
from stella.transfer.weights import open_weights

CLIPS = 24  # of each task, to measure on
SHOWN = 2  # of the first tasks, to draw


@dataclass(frozen=True)
class Measured:
    ciou: list[list[float]]  # [after task t][of task i], adaptive, in percent
    maps: list[list[Tensor]]  # [after task t][clip shown], [T, s, s]


class _StoppedError(Exception):
    """By a signal, with this exit code."""


def fading(
    recipe: Recipe, configs: Mapping[str, RunConfig], seeds: Sequence[int], folder: Path, console: Console
) -> int:
    """Measure every run after each of its tasks into `folder/fading.csv`, and draw clips as `folder/fading-N.png`.

    One of each run is its `fading.png`, for its page. Returns the exit code.
    """
    try:
        _fading(recipe, configs, seeds, folder, console)
    except _StoppedError as stopped:
        say(console, "Run the same command again to resume.")
        return int(stopped.args[0])
    return 0


def _fading(
    recipe: Recipe, configs: Mapping[str, RunConfig], seeds: Sequence[int], folder: Path, console: Console
) -> None:
    rows: list[dict[str, Any]] = []
    drawn: dict[str, list[list[Tensor]]] = {}
    tasks: Tasks = []
    for seed in seeds:
        for key, given in configs.items():
            run, config = folder / key / f"seed-{seed}", settle(replace(given, seed=seed))
            tasks = [(name, part(source, range(min(CLIPS, len(source))))) for name, source in config.data.eval_tasks()]
            say(console, f"where {key}, seed {seed}, finds the sound after each task", "dim")
            found = _measured(run, config, tasks)
            facts = provenance(read_json(RunFolder(run).environment))
            for after, values in enumerate(found.ciou):
                scores = {f"{name}_ciou": value for (name, _), value in zip(tasks, values, strict=True)}
                rows.append({"name": key, "seed": seed, "after": tasks[after][0], **scores, **facts})
            label = recipe.variants[key.split("/")[-1]].label
            _draw(tasks, 0, {label: found.maps}, RunFolder(run).fading)
            if seed == seeds[0]:
                drawn[label] = found.maps
    write_text(folder / "fading.csv", to_csv(rows))
    for number, (name, _) in enumerate(tasks[:SHOWN]):
        path = folder / f"fading-{number + 1}.png"
        _draw(tasks, number, drawn, path)
        say(console, f"{path}  a clip of {name}")
    say(console, str(folder / "fading.csv"))


def _draw(tasks: Tasks, number: int, found: Mapping[str, list[list[Tensor]]], path: Path) -> None:
    """The first clip of a task after that task and after each later one, a row for each of `found`."""
    clip = tasks[number][1][0]
    frame = int(sounds(clip.labels, len(clip.video)).int().argmax())
    moments = range(number, len(tasks))
    maps = {label: [each[t][number][frame] for t in moments] for label, each in found.items()}
    attention_sheet(clip, frame, maps, [f"after {tasks[t][0]}" for t in moments], path)


def _measured(run: Path, config: RunConfig, tasks: Tasks) -> Measured:
    place = machine(config.train)
    stream = replace(config.stream, batch_size=config.evaluate.batch)
    ciou: list[list[float]] = []
    maps: list[list[Tensor]] = []
    for after in range(1, len(tasks) + 1):
        model, avm = _with_matching(run, after, config).to(place.device)
        ciou.append([_score(model, avm, source, stream, place.device) for _, source in tasks])
        shown = [next(evaluation_batches(part(source, [0]), stream, place.device)) for _, source in tasks[:SHOWN]]
        maps.append([localise.sound_maps(model, avm, batch)[0].cpu() for batch in shown])
    return Measured(ciou, maps)


def _with_matching(run: Path, after: int, config: RunConfig) -> weights.Loaded:
    """The weights after a task, with a matching module of the run, or one trained on its frozen backbone."""
    loaded, _ = open_weights(WeightsConfig(str(run), after), config.seed)
    if loaded.avm is not None:
        return loaded
    test, where = matching_test(run, after, config)
    if exit_code := transfer(test, where, resume=True, console=Console(quiet=True)).exit_code:
        raise _StoppedError(exit_code)
    return weights.load(RunFolder(where).weights)


def matching_test(run: Path, after: int, config: RunConfig) -> tuple[TransferConfig, Path]:
    """The training of a matching module on a run's weights after a task, and its folder."""
    own = [f"weights.source={run}", f"weights.after={after}", f"seed={config.seed}"]
    given = [*own, f"train.device={config.train.device}"]
    return transfer_config("matching", None, given), run / f"matching-{after}"


@torch.no_grad()
def _score(model: Any, avm: Any, source: Source, stream: StreamConfig, device: torch.device) -> float:
    batches: list[Batch] = list(evaluation_batches(masked(source, sounding=True), stream, device))
    found = [localise.judged(model, avm, batch) for batch in batches]
    return 100 * torch.cat([each["adaptive"] for each in found]).mean().item()

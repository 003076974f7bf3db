"""`stella evaluate`: any weights on any tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from stella.clip import Device
from stella.config import build, layered, to_tree
from stella.data.skipped import Skipped
from stella.data.tasks import FilesConfig, Tasks
from stella.errors import StellaError, number_of
from stella.evaluate.after_task import evaluate_tasks
from stella.model import weights
from stella.runs.config import RunConfig, model_config, settle, stored_config
from stella.runs.folder import RunFolder
from stella.runs.progress import Display, say
from stella.train.device import runtime
from stella.train.processes import Elsewhere, processes


def evaluate_weights(
    model: str,
    recipe: Mapping[str, Any] | None = None,
    values: Sequence[str] = (),
    console: Console | None = None,
    slow: bool = False,
) -> dict[str, Any]:
    """The record that a run writes between tasks, for a finished run, a weight file or a shipped name.

    `slow` evaluates the slow weights of a run. Of several processes the first returns it and the others end.
    """
    is_run = model not in weights.shipped() and (Path(model) / "metrics.jsonl").is_file()
    folder = RunFolder(model) if is_run else None
    if folder and folder.end is None:
        raise StellaError(f"{model} is not finished; continue it with stella pretrain --resume {model}")
    if slow and not (folder and folder.slow_weights.exists()):
        raise StellaError(f"{model} has no slow weights; give a run that was trained with train.ema")
    tree = dict(recipe) if recipe else to_tree(stored_config(folder)) if folder else {}
    own = tree.get("data", {})
    if layered(RunConfig, tree, values).get("data", {}).get("source") != own.get("source"):
        tree["data"] = {key: value for key, value in own.items() if key != "tasks"}  # another source has other tasks
    file = weights.find(model)  # refuses an unfinished run
    about = weights.describe(file)
    ours = about.format == weights.OURS
    if ours:  # the data take the model's sizes where they are not given
        sizes = {name: about.sizes[name] for name in ("image_size", "spec_frames", "frames")}
        tree["model"] = {"weights": str(file), **sizes}
    config = build(RunConfig, layered(RunConfig, tree, values))
    config = settle(replace(config, data=config.data.alike(weights.read_inputs(file) if ours else None)))
    with processes(config.train.patience_minutes, config.train.device) as peers:
        machine = runtime(config.train.device, config.train.precision)
        loaded = weights.load(folder.slow_weights if folder and slow else file, None if ours else model_config(config))
        tasks, which = _tasks(config, values, folder, machine.device)
        shown = console if console is not None and peers.first else Console(quiet=True)
        clips = number_of(sum(len(source) for _, source in tasks), "clip")
        say(shown, f"evaluating {model} on {clips} of {number_of(len(tasks), 'task')}, {which}", "dim")
        if not folder and "source" not in layered(RunConfig, recipe or {}, values).get("data", {}):
            say(shown, "for clips of your own give data.source=folder data.path=VIDEOS", "dim")
        stream = replace(config.stream, batch_size=config.evaluate.batch)
        place, skipped = machine.device, Skipped()
        placed, avm = loaded.to(place)
        how = place, config.seed, machine.autocast, skipped, None, peers
        with Display(shown) as display:
            found = evaluate_tasks(placed, avm, tasks, stream, *how, display.clips)
        if not peers.first:
            raise Elsewhere(0)
    return {"tasks": [name for name, _ in tasks], "data": to_tree(config.data), "skipped": skipped.counts, **found}


def _tasks(config: RunConfig, values: Sequence[str], folder: RunFolder | None, device: Device) -> tuple[Tasks, str]:
    """The clips to evaluate on, and a phrase that says which: a data.path that is given means all its clips.

    Of the folder that a run was trained on, it means the clips that were held out.
    """
    data, own = config.data, settle(stored_config(folder)).data if folder else None
    if not isinstance(data, FilesConfig):
        return data.eval_tasks(device), data.described
    if data.eval_path is not None:
        return data.eval_tasks(device), f"all of {data.eval_path}"
    trained_on = isinstance(own, FilesConfig) and own.path == data.path
    if any(value.startswith("data.path=") for value in values) and not trained_on:
        return data.all_tasks(), f"all of {data.path}"
    return data.eval_tasks(), f"held out of {data.path}"

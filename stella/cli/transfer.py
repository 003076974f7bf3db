"""`stella transfer`: what a finished model is good for."""

from pathlib import Path
from typing import Annotated

import typer

from stella.cli.common import Overrides, console, say, split, typed
from stella.errors import StellaError, number_of

FOLDER = "runs/TASK-MODEL, or the next of runs/TASK-MODEL-2, …"


def transfer(
    context: typer.Context,
    task: Annotated[
        str | None,
        typer.Argument(help="retrieval, classify, segment, events, localise or matching.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(help="Run, weight file, shipped weights such as base-tiny, or random:tiny.", show_default=False),
    ] = None,
    data: Annotated[
        str | None, typer.Argument(help="Recipe whose data to use: a name, or a TOML file.", show_default="scenes")
    ] = None,
    values: Overrides = None,
    probe: Annotated[bool, typer.Option("--probe", help="Train one linear layer instead of the task's head.")] = False,
    frozen: Annotated[
        bool | None,
        typer.Option("--frozen/--trained", help="Keep the backbone as it is, or train it.", show_default="the task's"),
    ] = None,
    after: Annotated[
        int | None, typer.Option(min=1, help="Use a run's weights after this task (1, 2, …).", show_default="the last")
    ] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Use the slow weights of a run (train.ema).")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the head and of the order.")] = 0,
    run: Annotated[Path | None, typer.Option(help="New folder for the run.", show_default=FOLDER)] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a downstream run to resume.", show_default="none")
    ] = None,
) -> None:
    """Train a head on a finished model, choose the best epoch on a validation part, and test it once.

    `stella config transfer` lists the keys that a downstream run has besides those of data, stream, train and evaluate.
    """
    from stella.report.predictions import predictions_sheet
    from stella.runs.loop import free_folder
    from stella.transfer import run as runs
    from stella.transfer.config import run_name, transfer_config
    from stella.transfer.predictions import ANSWERS, CLASSES

    if resume:
        options = [param.opts[0] for param in typed(context) if param.param_type_name == "option"]
        if left_out := [option for option in options if option != "--resume"]:
            raise StellaError(f"--resume {resume} takes the settings of that run; leave {', '.join(left_out)} out")
        result = runs.resume(resume, [value for value in (task, model, data) if value] + (values or []), console)
    else:
        if task is None or model is None:
            raise StellaError("name a task and a model: stella transfer classify base-tiny")
        name, given = split(data, values)
        given = [*given, f"seed={seed}", f"weights.source={model}", f"weights.slow={str(slow).lower()}"]
        given += [f"weights.after={after}"] if after else []
        given += ["head.probe=true"] if probe else []
        given += [f"head.frozen={str(frozen).lower()}"] if frozen is not None else []
        config = transfer_config(task, _data(name), given)
        result = runs.transfer(config, run or free_folder(Path("runs", run_name(config))), console=console)
    if result.finished:
        end = result.end
        figures = ", ".join(f"{_in_words(name)} {value:.1f}" for name, value in end["test"].items())
        beside = ", ".join(f"{name} {value:.1f}" for name, value in end["ceilings"].items())
        whole, tested = end["parts"][2], end.get("measured", end["parts"][2])
        clips = number_of(whole, "test clip") if tested == whole else f"{tested:,} of {number_of(whole, 'test clip')}"
        say(f"{end['task']}: {figures} on {clips} ({_in_words(end['figure'])} by {beside}); in {result.run}")
        if (result.run / runs.PREDICTIONS).exists():
            say(f"{predictions_sheet(result.run, result.run / 'predictions.png')}  what it says of a few test clips")
        for name, about in ((ANSWERS, "of each test clip"), (CLASSES, "of each class")):
            if (result.run / name).exists():
                say(f"{result.run / name}  what it says {about}")
    raise typer.Exit(result.exit_code)


def _in_words(figure: str) -> str:
    known = {"map": "mAP", "miou": "mIoU", "f": "F", "ciou": "cIoU", "auc": "AUC"}
    known |= {"adaptive_ciou": "adaptive cIoU", "mean_ciou": "mean cIoU"}
    return known.get(figure, figure.replace("a2v_", "a→v R@").replace("v2a_", "v→a R@"))


def _data(recipe: str | None) -> dict[str, object] | None:
    """The data of a recipe; None: the embedded benchmark's."""
    if recipe is None:
        return None
    from stella.experiments.recipe import run_tree

    found: dict[str, object] = run_tree(recipe).get("data", {})
    return found

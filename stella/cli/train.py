"""`stella demo`, `pretrain`, `compare` and `reproduce`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stella.cli.common import Overrides, Recipe, console, integers, listed, say, split, typed, wide
from stella.errors import StellaError

Processes = Annotated[
    int, typer.Option(min=1, help="Number of runs at a time, each in its own process. Small models leave a GPU idle.")
]
RUN_OPTIONS = ("--seeds", "--seeds-list", "--only", "--orders", "--processes", "--out")


def demo(out: Annotated[Path, typer.Option(help="Folder for the runs and the page.")] = Path("demo")) -> None:
    """Watch three methods learn from a stream that changes: about four minutes on two cores."""
    from stella.experiments.demo import demo as run

    raise typer.Exit(run(out, console))


def pretrain(
    recipe: Recipe = None,
    values: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="New folder for configuration, metrics, checkpoints, weights.",
            show_default="runs/pretrain, or the next of runs/pretrain-2, …",
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run to resume from its last checkpoint.", show_default="none")
    ] = None,
    compile: Annotated[
        str | None, typer.Option(help="auto, on or off: short for train.compile=…", show_default="the recipe's")
    ] = None,
) -> None:
    """Pre-train on a stream of tasks with one method. Ctrl-C saves a checkpoint and stops."""
    from stella.experiments.recipe import run_config, run_tree
    from stella.report.tables import ceilings_line
    from stella.runs import loop
    from stella.runs.build import without_effect
    from stella.runs.record import ceilings, read_run
    from stella.train.processes import first

    name, given = split(recipe, values)
    given = [*given, f"train.compile={compile}"] if compile else given
    if resume and run:
        raise StellaError(f"--run {run} and --resume {resume} both name a run; give --resume alone to resume one")
    if resume:
        result = loop.resume(resume, given, console, run_tree(name) if name else None)
    else:
        config = run_config(name, given)
        for line in without_effect(config, given) if first() else ():
            say(line, "yellow")
        result = loop.pretrain(config, run, console=console)
    if result.finished and result.speaks:
        cues = ceilings([read_run(result.run)])
        beside = f" ({ceilings_line(cues)})" if cues else ""
        say(f"{_scores(result.end)}{beside}; weights and metrics in {result.run}")
        if slow := result.end.get("slow"):
            say(f"slow weights: {_scores(slow)}; in {result.run / 'slow.safetensors'}")
    raise typer.Exit(result.exit_code)


def _scores(end: dict[str, Any]) -> str:
    return ", ".join(f"{figure} {end[figure]:z.1f}" for figure in "AF" if end[figure] is not None)


def compare(
    recipe: Recipe = None,
    values: Overrides = None,
    methods: Annotated[
        str, typer.Option(help="Methods to train, separated by commas.")
    ] = "finetune,er,derpp,stella,stella_plus",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds to run (0, 1, …).")] = 3,
    processes: Processes = 1,
    out: Annotated[Path, typer.Option(help="Folder for the runs, their results and the page.")] = Path("runs/compare"),
) -> None:
    """Train several methods with several seeds, then print a table and write a page. Finished runs are skipped.

    A hyper-parameter, args.KEY=VALUE, goes to the methods that have it.
    """
    from stella.experiments.comparison import comparison
    from stella.experiments.recipe import run_config
    from stella.experiments.runner import run_all, with_methods
    from stella.experiments.tables import markdown, terminal
    from stella.files import write_text
    from stella.report.page import write_page
    from stella.report.tables import results_table
    from stella.runs.record import ceilings, group, read_run

    configs = with_methods(run_config(*split(recipe, values)), listed(methods))
    outcome = run_all(configs, range(seeds), out, console, processes)
    if not outcome.exit_code:
        runs = [read_run(run) for run in outcome.runs]
        groups, cues = group(runs), ceilings(runs)
        console.print(results_table(groups, cues))
        sheets = comparison(groups, cues)
        console.print(terminal(sheets[1:]))
        write_text(out / "results.md", markdown(out.name, sheets))
        say(f"{out / 'results.csv'}, {out / 'results.md'}  and  {write_page(outcome.runs, out / 'report.html')}")
    raise typer.Exit(outcome.exit_code)


def reproduce(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Name or path of a reproduction's recipe.", show_default="list all")
    ] = None,
    values: Overrides = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Number of seeds to run, from the recipe's first (0) on.", show_default="5 or 3"),
    ] = None,
    seeds_list: Annotated[
        str, typer.Option(help="Seeds to run, separated by commas, instead of --seeds.", show_default="none")
    ] = "",
    only: Annotated[str, typer.Option(help="Variants to run, separated by commas.", show_default="all")] = "",
    orders: Annotated[str, typer.Option(help="Orders of tasks to run, separated by commas.", show_default="all")] = "",
    processes: Processes = 1,
    out: Annotated[Path, typer.Option(help="Folder for the runs, in a sub-folder NAME.")] = Path("runs/reproduce"),
    results: Annotated[
        Path | None,
        typer.Option("--from", help="Run nothing: print this results.csv and write its table beside it."),
    ] = None,
) -> None:
    """Run one of the paper's comparisons, skip what is finished, and print it beside the paper's own figures."""
    from stella.experiments import reproduce as paper
    from stella.experiments.coverage import coverage
    from stella.experiments.recipe import load

    page = wide(160)
    if name is None and results is not None:
        raise StellaError(f"say what {results} is of: stella reproduce NAME --from {results}")
    if name is None:
        page.print(paper.listing())
        page.print(coverage())
    elif results is not None:
        if left_out := [each.opts[0] for each in typed(context) if each.opts[0] in RUN_OPTIONS]:
            raise StellaError(f"--from prints all runs of {results}; leave {', '.join(left_out)} out")
        paper.show(name, results, page, values or [])
    else:
        recipe = load(name)
        last = recipe.first_seed + (seeds or recipe.seeds)
        numbers = integers("--seeds-list", seeds_list) or range(recipe.first_seed, last)
        selected = listed(only), listed(orders), values or []
        raise typer.Exit(paper.reproduce(name, numbers, out / Path(name).stem, page, *selected, processes))

"""The paper's comparisons, run here and set beside the paper's own figures.

`reproduce("table1", …)` runs what is missing and shows it; `runs("table1")` has the configurations for whoever runs
them elsewhere, `collect(folder)` makes one results.csv of all that was run, `show` renders it, `measure` is for speed.
"""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from stella.errors import StellaError
from stella.experiments.compare import to_csv
from stella.experiments.many import train_all
from stella.experiments.recipe import Recipe, load, names, runs
from stella.experiments.results import collect, read_results
from stella.experiments.speed import has_gpu, measure, measure_all
from stella.experiments.tables import learning_sheet, markdown, speed_sheet, terminal
from stella.files import write_text
from stella.runs.config import RunConfig
from stella.runs.record import gallery_ceilings

__all__ = ["Recipe", "collect", "listing", "load", "measure", "names", "reproduce", "runs", "show"]


def reproduce(
    name: str,
    seeds: Sequence[int],
    folder: Path | str,
    console: Console,
    only: Sequence[str] = (),
    orders: Sequence[str] = (),
    overrides: Sequence[str] = (),
    processes: int = 1,
) -> int:
    """Run what is missing in `folder/ORDER/VARIANT/seed-N`, then write and show results.csv and reproduce.md there.

    Seed by seed, so that one that is stopped early still compares. With `processes` so many runs go on at a time (a
    small model leaves most of a GPU idle); others may share the folder if they choose different runs. Finished runs
    keep no checkpoints. Returns the exit code: 128 + signal where one stopped it.
    """
    recipe, folder = load(name), Path(folder)
    for sentence in recipe.shadowed(overrides, only):
        console.print(sentence, style="yellow", highlight=False)
    if recipe.speed is not None:
        folder.mkdir(parents=True, exist_ok=True)
        configs, results = _for_device(name, recipe, only, orders, overrides), folder / "results.csv"
        before = read_results(results, recipe.keys)[0] if results.exists() else {}
        measured = measure_all(configs, recipe.speed.steps, recipe.speed.warmup, console, processes)
        others = [line for key, lines in before.items() if key not in configs for line in lines]
        write_text(results, to_csv([*measured, *(line for line in others if line.keys() == measured[0].keys())]))
    else:
        exit_code = train_all(runs(name, overrides, only, orders), seeds, folder, console, processes)
        if exit_code:
            return exit_code
        collect(folder)
    show(name, folder / "results.csv", console, overrides)
    return 0


def listing() -> Table:
    """All reproductions, a line each, with what they take."""
    table = Table("name", "what", "runs a seed", "on what", box=box.SIMPLE_HEAD)
    for name in names():
        recipe = load(name)
        count = len(recipe.orders) * len(recipe.variants)
        table.add_row(f"[bold]{name}[/]", recipe.title, str(count), recipe.cost)
    return table


def show(name: str, results: Path | str, console: Console, overrides: Sequence[str] = ()) -> None:
    """The table of a results.csv, also into reproduce.md beside it (of X.csv into X.md). Only the CSV is needed."""
    recipe, results = load(name), Path(results)
    found, unknown = read_results(results, recipe.keys)
    if len(unknown) > sum(map(bool, found.values())):
        raise StellaError(f"{results} is not of {name}: it has {', '.join(unknown)}; give another file or name")
    if recipe.speed is not None:
        sheets = [speed_sheet(recipe, order, found) for order in recipe.orders]
    else:
        first = next(iter(recipe.orders.values()))
        cues = gallery_ceilings(recipe.tree(overrides, first.tasks).get("data", {}))
        begun = [order for order in recipe.orders if any(found[f"{order}/{each}"] for each in recipe.variants)]
        sheets = [learning_sheet(recipe, order, found, cues, overrides) for order in begun]
    console.print(terminal(sheets))
    if unknown:
        console.print(f"Not in this table: {', '.join(unknown)}", highlight=False)
    page = results.with_name("reproduce.md" if results.name == "results.csv" else f"{results.stem}.md")
    page.write_text(markdown(name, sheets), encoding="utf-8")  # at once: processes side by side would share a .tmp
    console.print(f"{results}  and  {page}", highlight=False)


def _for_device(
    name: str, recipe: Recipe, only: Sequence[str], orders: Sequence[str], overrides: Sequence[str]
) -> dict[str, RunConfig]:
    configs = runs(name, overrides, only, orders)
    if recipe.speed is not None and has_gpu(next(iter(configs.values()))):
        return runs(name, [*recipe.speed.gpu, *overrides], only, orders)
    return configs

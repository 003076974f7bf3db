"""The paper's comparisons, run here and printed beside the paper's own figures.

`reproduce("table1", …)` runs what is missing and prints it; `show` prints a results.csv without running anything.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stella.bench.measure import bench
from stella.errors import StellaError, some_of
from stella.experiments.downstream import show_downstream, transfer_all
from stella.experiments.fading import fading
from stella.experiments.figures import GAP, draw, draw_pairs
from stella.experiments.initial import (
    INITIAL,
    downstream_data,
    has_weights,
    make_initial,
    sized,
    stages,
    taken_out,
    tell_cost,
)
from stella.experiments.recipe import load, names, runs
from stella.experiments.results import check_columns, read_results, to_csv
from stella.experiments.runner import run_all
from stella.experiments.tables import MEASURED, learning_sheet, markdown, rank_sheets, speed_sheet, terminal
from stella.files import write_text
from stella.runs.config import RunConfig, machine, model_config, settle
from stella.runs.environment import environment, provenance
from stella.runs.progress import say
from stella.runs.record import gallery_ceilings

SHOWN = 3  # names of foreign runs in a message


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
    """Run what is missing in `folder/ORDER/VARIANT/seed-N`, then write and print results.csv and reproduce.md there.

    Returns the exit code: 128 + signal if a signal stopped it, 1 if a measurement failed.
    """
    recipe, folder = load(name), Path(folder)
    own, overrides = taken_out(overrides, "initial") if recipe.initial else ([], list(overrides))
    named, overrides = taken_out(overrides, "downstream")
    elsewhere = downstream_data(named)
    if recipe.initial:
        first = {} if has_weights(overrides) else stages(recipe, own, overrides, folder / INITIAL)
        tell_cost(sized(first) | runs(name, overrides, only, orders), seeds, folder, console)
        if exit_code := make_initial(first, console):
            return exit_code
        overrides = [*overrides, *(f"model.weights={run}" for run in list(first)[-1:])]
    for sentence in recipe.shadowed(overrides, only, orders):
        say(console, sentence, "yellow")
    configs = runs(name, overrides, only, orders)
    if recipe.speed is None:
        exit_code = run_all(configs, seeds, folder, console, processes).exit_code
        if exit_code:
            return exit_code
        if recipe.attention and (exit_code := fading(recipe, configs, seeds, folder, console)):
            return exit_code
        if recipe.transfer or elsewhere:
            title = recipe.title if recipe.transfer else f"{recipe.title}: downstream tasks"
            run = replace(recipe, title=title, base=recipe.tree(overrides))
            exit_code = transfer_all(run, configs, seeds, folder, console, processes, elsewhere)
            if exit_code or recipe.transfer:
                return exit_code
    else:
        if machine(next(iter(configs.values())).train).device.type != "cpu":
            configs = runs(name, [*recipe.speed.gpu, *overrides], only, orders)
        exit_code = _measure(configs, recipe.keys, recipe.speed.steps, folder, console, processes)
    show(name, folder / "results.csv", console, overrides)
    order = next(iter(recipe.orders))
    if recipe.plot == GAP and draw_pairs(recipe, order, folder, seeds[0], folder / "pairs.png"):
        say(console, str(folder / "pairs.png"))
    return exit_code


def _measure(
    configs: dict[str, RunConfig], keys: Sequence[str], steps: int, folder: Path, console: Console, processes: int
) -> int:
    """Measure into `folder/results.csv`, which keeps its lines of other configurations; returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.csv"
    before = read_results(results, keys)[0] if results.exists() else {}
    settled = {key: settle(config) for key, config in configs.items()}
    lines: list[dict[str, Any]] = []
    for key, row in bench(settled, steps, None, console, processes).items():
        facts = environment(machine(settled[key].train))
        c = model_config(settled[key])
        clips = f"{c.frames} frames of {c.image_size}², {c.spec_frames}×{c.mel_bins} log-mel"
        about = {"name": key, "model": settled[key].model.preset, "clips": clips, "precision": facts["precision"]}
        lines.append(asdict(row) | about | provenance(facts))
    if not lines:
        raise StellaError(f"none of {', '.join(configs)} could be measured; see the reasons above")
    others = [line for key, found in before.items() if key not in configs for line in found]
    write_text(results, to_csv([*lines, *(line for line in others if line.keys() == lines[0].keys())]))
    return int(len(lines) < len(configs))


def listing() -> Table:
    """All reproductions, a line each, with their cost."""
    table = Table("name", "what", "runs a seed", "on what", box=box.SIMPLE_HEAD)
    for name in names():
        recipe = load(name)
        table.add_row(Text(name, "bold"), Text(recipe.title), str(len(recipe.keys)), Text(recipe.cost))
    return table


def show(name: str, results: Path | str, console: Console, overrides: Sequence[str] = ()) -> None:
    """Print the table of a results.csv and write it beside the file: reproduce.md, or X.md for another X.csv."""
    recipe, results = load(name), Path(results)
    if recipe.transfer:
        show_downstream(name, recipe, results, console)
        return
    found, unknown = read_results(results, recipe.keys)
    unknown = [each for each in unknown if each != INITIAL]
    page = results.with_name("reproduce.md" if results.name == "results.csv" else f"{results.stem}.md")
    if len(unknown) > sum(map(bool, found.values())):
        raise StellaError(f"{results} is not of {name}: it has {some_of(unknown, SHOWN)}; give another file or name")
    lines = [line for rows in found.values() for line in rows]
    check_columns(name, results, lines, MEASURED if recipe.speed else ("A",))
    _check_table(name, page)
    if recipe.speed is not None:
        sheets = [speed_sheet(recipe, order, found) for order in recipe.orders]
    else:
        first = next(iter(recipe.orders.values()))
        cues = gallery_ceilings(recipe.tree(overrides, first.tasks).get("data", {}))
        started = [order for order in recipe.orders if any(found[f"{order}/{each}"] for each in recipe.variants)]
        sheets = []
        for order in started:
            sheets += [learning_sheet(recipe, order, found, cues, overrides), *rank_sheets(recipe, order, found)]
    console.print(terminal(sheets))
    if unknown:
        say(console, f"Not in this table: {', '.join(unknown)}")
    write_text(page, markdown(name, sheets))
    say(console, f"{results}  and  {page}")
    picture = results.with_suffix(".png")
    if recipe.plot and draw(recipe, next(iter(recipe.orders)), found, picture):
        say(console, str(picture))


def _check_table(name: str, page: Path) -> None:
    """Refuse a CSV beside the table of another reproduction: the CSV alone cannot tell table1 from table1-small."""
    heading = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") if page.exists() else name
    if Path(heading).stem != Path(name).stem:  # a recipe may have been named by its path
        raise StellaError(f"{page} is of {heading}, not of {name}; give that name, or move {page.name} away")

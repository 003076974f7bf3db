"""The figure of a reproduction, drawn from its results.csv: the modality gap, or A and F over sizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stella.experiments.recipe import Recipe
from stella.experiments.results import Rows, spread
from stella.files import read_json
from stella.runs.folder import RunFolder

GAP = "gap"
WHITE, GREY = "white", "#bbbbbb"
STYLE: Any = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False, "grid.color": GREY}


def draw(recipe: Recipe, order: str, found: Mapping[str, Rows], path: Path) -> bool:
    """Write the figure of a recipe that has a `plot`; False if there is nothing to draw."""
    import matplotlib

    rows = {name: found[f"{order}/{name}"] for name in recipe.variants if found[f"{order}/{name}"]}
    with matplotlib.rc_context(STYLE):
        figure = _gap(recipe, rows) if recipe.plot == GAP else _sizes(recipe, rows)
        if figure is not None:
            figure.savefig(path, dpi=130)
    return figure is not None


def draw_pairs(recipe: Recipe, order: str, folder: Path, seed: int, path: Path) -> bool:
    """Write pairs in two dimensions, of every variant whose run with this seed has them; False if none has."""
    import matplotlib

    from stella.report.gap import new_pairs_figure

    files = {name: RunFolder(folder / order / name / f"seed-{seed}").pairs for name in recipe.variants}
    names = [name for name, file in files.items() if file.is_file()]
    if not names:
        return False
    looks = zip(names, _looks(names), strict=True)
    found = [(recipe.variants[name].label, colour, read_json(files[name])) for name, (colour, _) in looks]
    with matplotlib.rc_context(STYLE):
        new_pairs_figure(found, GREY, WHITE).savefig(path, dpi=130)
    return True


def _looks(names: list[str]) -> list[tuple[str, str]]:
    """Colour and marker of each variant; one that has a method's name has its colour."""
    from stella.report.colours import LIGHT, colours
    from stella.report.svg import MARKERS

    return [(LIGHT[colour], MARKERS[place % len(MARKERS)]) for place, colour in enumerate(colours(names))]


def _gap(recipe: Recipe, rows: Mapping[str, Rows]) -> Any:
    from stella.report.gap import Series, new_gap_figure

    known = {name: own for name, each in rows.items() if (own := [line for line in each if line.get("gaps")])}
    series, tasks = [], 0
    for (name, own), (colour, marker) in zip(known.items(), _looks(list(known)), strict=True):
        curves = [[float(gap) for gap in line["gaps"].split()] for line in own]
        if len(curves[0]) > 1:  # not Multitask
            declines = [float(line["gap_decline"]) for line in own if line["gap_decline"]]
            series.append(Series(recipe.variants[name].label, colour, marker, curves, declines))
            tasks = max(tasks, *map(len, curves))
    return new_gap_figure(series, [f"task {number + 1}" for number in range(tasks)], GREY, WHITE) if series else None


def _sizes(recipe: Recipe, rows: Mapping[str, Rows]) -> Any:
    """A and F of variants called METHOD-NUMBER over the number, a line for each method."""
    from stella.report.svg import new_figure

    points: dict[str, list[tuple[float, str]]] = {}
    for name in rows:
        method, _, number = name.rpartition("-")
        points.setdefault(method, []).append((float(number), name))
    if not points:
        return None
    figure, axes = new_figure(7.6, 3.0, columns=2)
    for sizes, (colour, marker) in zip(points.values(), _looks(list(points)), strict=True):
        label = recipe.variants[sizes[0][1]].label.partition(",")[0]
        for axis, column in zip(axes, "AF", strict=True):
            spreads = [spread(rows[name], column) for _, name in sorted(sizes)]
            look: dict[str, Any] = {"color": colour, "marker": marker, "ms": 5, "lw": 1.6, "capsize": 3, "label": label}
            x, y = [size for size, _ in sorted(sizes)], [each.mean for each in spreads]
            axis.errorbar(x, y, yerr=[each.deviation or 0.0 for each in spreads], **look)
    ticks = sorted({size for sizes in points.values() for size, _ in sizes})
    for axis, title in zip(axes, ("accuracy A, % (higher is better)", "forgetting F (lower is better)"), strict=True):
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axis.minorticks_off()
        axis.set(xlabel=recipe.plot, ylabel=title, ylim=(0, None))
        axis.grid(axis="y")
    axes[0].legend(frameon=False)
    return figure

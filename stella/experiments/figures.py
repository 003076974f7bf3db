"""The figure of a reproduction, drawn from its results.csv: A and F by method or over sizes, or the modality gap."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stella.experiments.recipe import Recipe
from stella.experiments.results import Rows, spread
from stella.files import read_json, whole
from stella.runs.folder import RunFolder

GAP, METHODS = "gap", "methods"
BOUNDS = {"derpp-unlimited": ("DER++, unlimited memory", (0, (4, 2))), "multitask": ("Multitask", (0, (1, 1.5)))}
CLIPS_3 = "codec, 3 past clips"
KINDS = {
    "": "as it is",
    "codec": "with the codec",
    CLIPS_3: "with the codec, three past clips for each current one",
}
WHITE, GREY = "white", "#bbbbbb"
STYLE: Any = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False, "grid.color": GREY}


def draw(recipe: Recipe, order: str, found: Mapping[str, Rows], path: Path) -> bool:
    """Write the figure of a recipe that has a `plot`; False if there is nothing to draw."""
    import matplotlib

    rows = {name: found[f"{order}/{name}"] for name in recipe.variants if found[f"{order}/{name}"]}
    with matplotlib.rc_context(STYLE):
        figure = {GAP: _gap, METHODS: _methods}.get(recipe.plot, _sizes)(recipe, rows)
        if figure is not None:
            _save(figure, path)
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
        _save(new_pairs_figure(found, GREY, WHITE), path)
    return True


def _save(figure: Any, path: Path) -> None:
    with whole(path) as fresh:
        figure.savefig(fresh, format="png", dpi=130)


def _looks(names: list[str]) -> list[tuple[str, str]]:
    """Colour and marker of each variant; one that has a method's name, or METHOD-dct, has its colour."""
    from stella.report.colours import LIGHT, colours
    from stella.report.svg import MARKERS

    of = [name.removesuffix("-dct") for name in names]
    own = dict(zip(dict.fromkeys(of), colours(list(dict.fromkeys(of))), strict=True))
    return [(LIGHT[own[method]], MARKERS[place % len(MARKERS)]) for place, method in enumerate(of)]


def _gap(recipe: Recipe, rows: Mapping[str, Rows]) -> Any:
    """The gap after each task, a line for each variant; METHOD is dashed and hollow where METHOD-dct is beside it."""
    from stella.report.gap import Series, new_gap_figure

    known = {name: own for name, each in rows.items() if (own := [line for line in each if line.get("gaps")])}
    series, tasks = [], 0
    for (name, own), (colour, marker) in zip(known.items(), _looks(list(known)), strict=True):
        curves = [[float(gap) for gap in line["gaps"].split()] for line in own]
        if len(curves[0]) > 1:  # not Multitask
            declines = [float(line["gap_decline"]) for line in own if line["gap_decline"]]
            series.append(Series(recipe.variants[name].label, colour, marker, curves, declines, f"{name}-dct" in known))
            tasks = max(tasks, *map(len, curves))
    return new_gap_figure(series, [f"task {number + 1}" for number in range(tasks)], GREY, WHITE) if series else None


def _methods(recipe: Recipe, rows: Mapping[str, Rows]) -> Any:
    """A and F of every method, a row each, as it is and with the codec: the best A on top; bounds as lines."""
    from stella.report.svg import new_figure

    marks: dict[str, dict[str, str]] = {}  # by row and kind, the variant
    for name in (name for name in rows if name not in BOUNDS):
        method, _, kind = recipe.variants[name].label.partition(", ")
        row, kind = (method, kind) if kind in KINDS else (f"{method}, {kind}", "")
        marks.setdefault(row, {})[kind] = name
    if not marks:
        return None
    order = sorted(marks, key=lambda row: max(spread(rows[name], "A").mean for name in marks[row].values()))
    looks = {row: min(kinds.values(), key=len) for row, kinds in marks.items()}
    colour = dict(zip(looks, (look for look, _ in _looks(list(looks.values()))), strict=True))
    figure, axes = new_figure(7.6, 1.1 + 0.24 * len(order), columns=2)
    for axis, column in zip(axes, "AF", strict=True):
        for height, row in enumerate(order):
            found = [(kind, each) for kind, name in marks[row].items() if (each := spread(rows[name], column)).values]
            axis.plot([each.mean for _, each in found], [height] * len(found), color=GREY, lw=1.2, zorder=1)
            for kind, each in found:
                look: dict[str, Any] = {"color": colour[row], "marker": "D" if kind == CLIPS_3 else "o", "ms": 5.5}
                look |= {"mfc": colour[row] if kind else WHITE, "capsize": 2}
                axis.errorbar(each.mean, height, xerr=each.deviation or 0.0, **look)
        for name, (label, style) in BOUNDS.items():
            if name in rows and (bound := spread(rows[name], column)).values:
                axis.axvline(bound.mean, color="black", lw=1, ls=style, label=label, zorder=0)
        axis.set_yticks(range(len(order)), order if column == "A" else [])
        axis.locator_params(axis="x", integer=True)
        axis.set(xlim=(0, None), ylim=(-0.7, len(order) - 0.3))
        axis.grid(axis="x")
    axes[0].set_xlabel("accuracy A, % (higher is better)")
    axes[1].set_xlabel("forgetting F (lower is better)")
    used = {kind for kinds in marks.values() for kind in kinds}
    for kind, label in KINDS.items():
        if kind in used:
            look = {"color": "dimgrey", "marker": "D" if kind == CLIPS_3 else "o", "mfc": "dimgrey" if kind else WHITE}
            axes[0].plot([], [], ls="", ms=5.5, label=label, **look)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def _sizes(recipe: Recipe, rows: Mapping[str, Rows]) -> Any:
    """A and F of variants called METHOD-NUMBER over the number, a line for each method. METHOD-dct has its colour, and
    then the line without the codec is dashed."""
    from stella.report.svg import new_figure

    points: dict[str, list[tuple[float, str]]] = {}
    for name in rows:
        method, _, number = name.rpartition("-")
        points.setdefault(method, []).append((float(number), name))
    if not points:
        return None
    figure, axes = new_figure(7.6, 3.0, columns=2)
    of = {line: line.removesuffix("-dct") for line in points}
    methods = list(dict.fromkeys(of.values()))
    looks = dict(zip(methods, _looks(methods), strict=True))
    for line, sizes in points.items():
        colour, marker = looks[of[line]]
        label = recipe.variants[sizes[0][1]].label.partition(",")[0]
        for axis, column in zip(axes, "AF", strict=True):
            spreads = [spread(rows[name], column) for _, name in sorted(sizes)]
            look: dict[str, Any] = {"color": colour, "marker": marker, "ms": 5, "lw": 1.6, "capsize": 3, "label": label}
            look |= {"mfc": WHITE, "ls": "--"} if f"{line}-dct" in points else {}
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

"""The figures of the page. Each function draws one or more groups of runs; None if there is nothing to draw."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from stella.report.colours import colours
from stella.report.svg import FAINT, GRID, INK, MARKERS, PAPER, RAMP, SERIES, STYLES, new_figure, styled, to_svg
from stella.report.tables import CEILINGS
from stella.runs.record import Group, RunRecord, Spread, mean_recall

POINTS = 240  # at most, of a loss curve
LINE = 105  # characters across a wide figure
BESIDE = 26  # of a label that leaves room beside it in a narrow one
PARTS = {"recon_a": "sound rebuilt", "recon_v": "video rebuilt", "avm": "matching"}  # of the loss, in words
DOTTED, DASHED = (0, (2, 2)), (0, (4, 2))
Floats = NDArray[np.float64]


@styled
def comparison(groups: Sequence[Group], ceilings: Mapping[str, float] | None) -> list[Markup]:
    """A and F of each method: a dot for each run, and their mean with its deviation. Slow weights are hollow."""
    versions = [(i, slow, one) for i, group in enumerate(groups) for slow, one in enumerate(group.versions)]
    shown = [(i, slow, one) for i, slow, one in versions if one.spread("A").values]
    own = colours([group.method for group in groups])
    dots = [(SERIES[own[i]], bool(slow), one) for i, slow, one in shown]
    (accuracy, left), (forgetting, right) = (_dots(dots, name, width) for name, width in (("A", 4.3), ("F", 3.3)))
    _ceiling_lines(left, ceilings or {}, right)
    left.set(xlabel="accuracy A, % (higher is better)", xlim=(min(0, left.get_xlim()[0]), left.get_xlim()[1]))
    right.set(xlabel="forgetting F (lower is better)", xlim=_reach(right, [one.spread("F") for *_, one in dots]))
    right.axvline(0, color=FAINT, lw=0.8)
    if max((len(one.label) for *_, one in dots), default=0) > BESIDE:
        right.set(yticklabels=[""] * len(dots))  # the rows of the other figure
    return [to_svg(accuracy, "A of each method"), to_svg(forgetting, "F of each method")]


def _dots(dots: Sequence[tuple[str, bool, Group]], name: str, width: float) -> tuple[Any, Any]:
    """A figure and its axis with a row for each colour and group; hollow if so."""
    figure, (axis,) = new_figure(width, 0.9 + 0.36 * max(len(dots), 2))
    for row, (colour, hollow, one) in enumerate(dots):
        spread = one.spread(name)
        if not spread.values:
            axis.text(0.02, row, "not defined", transform=axis.get_yaxis_transform(), color=FAINT, va="center")
            continue
        if len(spread.values) > 1:
            axis.plot(spread.values, [row] * len(spread.values), "o", ms=3.5, color=colour, alpha=0.45, mew=0)
        look = {"color": colour, "mfc": PAPER if hollow else colour, "capsize": 3, "lw": 1.6}
        axis.errorbar(spread.mean, row, xerr=spread.deviation, fmt="o", ms=7, **look)
        place = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
        axis.annotate(spread.short, (spread.mean, row), **place, color=INK)
    axis.set_yticks(range(len(dots)), [one.label for *_, one in dots])
    axis.set_ylim(len(dots) - 0.5, -0.75)
    axis.grid(axis="x")
    return figure, axis


def _reach(axis: Any, spreads: Sequence[Spread]) -> tuple[float, float]:
    """From zero, or from further left if a dot's figure would touch the axis; to one point at least, for noise."""
    low, high = min(0.0, axis.get_xlim()[0]), max(1.0, axis.get_xlim()[1])
    room = 0.1 * (high - low)
    return (low - room if any(s.values and s.mean < room for s in spreads) else low), high


def _ceiling_lines(axis: Any, ceilings: Mapping[str, float], beside: Any) -> None:
    """Vertical lines at the ceilings within the axis; those beyond would compress the methods' dots. The axis beside
    it leaves as much room for their names, so that rows of both are level."""
    reach = axis.get_xlim()[1]
    ends: list[float] = []  # right end of the last label on each level
    for name, value in sorted(ceilings.items(), key=lambda item: item[1]):
        if value > reach:
            return
        axis.axvline(value, color=FAINT, lw=0.9, ls=DOTTED, zorder=0)
        level = next((i for i, end in enumerate(ends) if end < value), len(ends))
        label = CEILINGS.get(name, name).removesuffix(" alone")
        ends[level : level + 1] = [value + 0.022 * reach * (len(label) + 1)]
        above = {"xytext": (1, 2 + 8 * level), "textcoords": "offset points", "clip_on": False}
        look: dict[str, Any] = {**above, "color": FAINT, "fontsize": 7, "va": "bottom", "ha": "left"}
        axis.annotate(label, (value, -0.75), **look)
        beside.annotate(" ", (0, -0.75), **look)


@styled
def course(groups: Sequence[Group]) -> Markup:
    """After each task, the mean accuracy on the tasks seen so far. Slow weights are thin and dashed."""
    figure, (axis,) = new_figure(7.6, 3.0)
    names: list[str] = []
    own = colours([group.method for group in groups])
    for row, group in enumerate(groups):
        for slow, one in enumerate(group.versions):
            curves = [_seen_so_far(run) for run in one.runs]
            longest = max(map(len, curves))
            width = {"color": SERIES[own[row]], "lw": 1.0 if slow else 1.7, "label": one.label}
            if longest > 1:
                names = max(names, one.tasks[:longest], key=len)
                look = {**width, "ls": DASHED if slow else "-", "marker": MARKERS[row % len(MARKERS)], "ms": 4.5}
                band(axis, np.arange(longest), [c for c in curves if len(c)], mfc=PAPER if slow else None, **look)
            elif one.finished:  # trained on all tasks at once: a single figure, at the end
                axis.axhline(np.mean([_seen_so_far(run)[-1] for run in one.finished]), ls=DOTTED, **width)
                names = max(names, one.tasks, key=len)
    after = [f"after {name}" for name in names]
    slanted = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"} if len("  ".join(after)) > LINE else {}
    axis.set_xticks(range(len(names)), after, **slanted)
    axis.set(ylabel="accuracy on tasks so far, %", ylim=(0, None))
    axis.grid(axis="y")
    labels = [one.label for group in groups for one in group.versions]
    columns = max(1, min(6, LINE // (max(map(len, labels)) + 8)))
    figure.set_figheight(2.8 + 0.2 * -(-len(labels) // columns) + (0.5 if slanted else 0))
    legend(axis, columns)
    return to_svg(figure, "Mean accuracy on the tasks seen so far, after each task")


@styled
def losses(group: Group) -> Markup | None:
    """The loss and its parts over the steps, and where tasks end."""
    width = max(1, -(-max(run.step for run in group.runs) // POINTS))
    runs = [_losses(run, width) for run in group.runs]
    names = dict.fromkeys(name for curves in runs for name in curves)
    if not names:
        return None
    figure, (axis,) = new_figure(4.1, 2.7)
    for i, name in enumerate(names):
        several = [curves[name] for curves in runs if name in curves]
        bins = sorted({bin for curve in several for bin in curve})
        values = [np.array([curve.get(bin, np.nan) for bin in bins]) for curve in several]
        look: dict[str, Any] = {"color": INK, "ls": "-", "label": "total"}
        if name != "loss":
            look = {
                "color": SERIES[(i - 1) % len(SERIES)],
                "ls": STYLES[(i - 1) % len(STYLES)],
                "label": PARTS.get(name, name),
            }
        band(axis, width * np.array(bins), values, lw=1.7, **look)
    for line in max(group.runs, key=lambda run: len(run.evaluations)).evaluations:
        if line["task"] >= 0:
            axis.axvline(line["step"], color=GRID, lw=1, zorder=0)
    axis.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axis.grid(axis="y")
    legend(axis)
    return to_svg(figure, f"Loss curves of {group.label}")


@styled
def memory(group: Group) -> Markup | None:
    """Clips of each task in the memory after each task, mean over runs."""
    found = after_tasks(group, "memory_by_task")
    if not found:
        return None
    figure, (axis,) = new_figure(4.1, 2.5)
    held = per_task(found).T  # [tasks, evaluations]
    axis.stackplot(range(len(found)), held, colors=_ramp(len(held)), edgecolor=PAPER, linewidth=0.7)
    top = held[:, -1].cumsum()
    for name, low, high in zip(group.tasks, [0, *top[:-1]], top, strict=True):
        if high - low > 0.035 * top[-1]:  # else its name would overlap the next
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5}
            axis.annotate(name, (len(found) - 1, (low + high) / 2), **place)
    task_axis(axis, found, "clips in memory", xlim=(0, max(1, len(found) - 1)), ylim=(0, max(1, top[-1] * 1.02)))
    return to_svg(figure, f"Clips in the memory of {group.label}, by task")


@styled
def importance(group: Group) -> Markup | None:
    """Median importance on the sounding object over that elsewhere: a line for each task and their median."""
    found = after_tasks(group, "importance_ratio")
    if not found or (ratio := per_task(found)).mask.all():
        return None
    figure, (axis,) = new_figure(4.1, 2.5)
    middle = [np.median(row.compressed()) if row.count() else np.nan for row in ratio]
    task_lines(axis, ratio, middle, "median of tasks")
    axis.axhline(1, color=FAINT, lw=0.9, ls=DOTTED, label="no difference")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axis.yaxis.set_minor_formatter(NullFormatter())
    task_axis(axis, found, "on the object / elsewhere")
    axis.grid(axis="y")
    legend(axis)
    return to_svg(figure, f"Importance of the sounding object over the rest, {group.label}")


@styled
def matching(group: Group) -> Markup | None:
    """Accuracy of the matching module after each task."""
    found = after_tasks(group, "avm_accuracy")
    if not found:
        return None
    figure, (axis,) = new_figure(4.1, 2.5)
    means = [np.mean(at) for at in found.values()]
    deviations = [np.std(at, ddof=1) if len(at) > 1 else 0.0 for at in found.values()]
    look = {"color": SERIES[0], "lw": 2, "marker": "o", "ms": 5, "capsize": 3, "elinewidth": 1}
    axis.errorbar(range(len(found)), means, yerr=deviations, **look)
    axis.axhline(50, color=FAINT, lw=0.9, ls=DOTTED)
    axis.text(len(found) - 1, 50, "chance ", color=FAINT, fontsize=7, ha="right", va="bottom")
    task_axis(axis, found, "correct, %", ylim=(min(40, *means), 100))
    axis.grid(axis="y")
    return to_svg(figure, f"Accuracy of the matching module, {group.label}")


def _seen_so_far(run: RunRecord) -> Floats:
    """After each task, the mean accuracy on it and those before it."""
    return np.array([mean_recall(line)[: line["task"] + 1].mean() for line in run.evaluations if line["task"] >= 0])


def _losses(run: RunRecord, width: int) -> dict[str, dict[int, float]]:
    """`loss` and each part: mean over bins of `width` steps, by number of the bin. Runs may have different lengths."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in run.lines("step"):
        if line.get("loss") is not None:
            for name, value in {"loss": line["loss"], **line["parts"]}.items():
                found.setdefault(name, {}).setdefault(int(line["step"]) // width, []).append(value)
    return {name: {bin: float(np.mean(values)) for bin, values in bins.items()} for name, bins in found.items()}


def after_tasks(group: Group, key: str) -> dict[str, list[Any]]:
    """What the runs measured in each evaluation, in order: `start`, then `1`, `2`, … for the task just learnt."""
    by_task: dict[int, list[Any]] = {}
    for run in group.runs:
        for line in run.evaluations:
            if line.get(key) is not None:
                by_task.setdefault(int(line["task"]), []).append(line[key])
    return {str(task + 1) if task >= 0 else "start": by_task[task] for task in sorted(by_task)}


def per_task(found: Mapping[str, Sequence[Sequence[float | None]]]) -> Any:
    """Means over runs [evaluations, tasks], masked where there is no value."""
    rows = [np.ma.masked_invalid(np.array(at, dtype=np.float64)).mean(axis=0) for at in found.values()]
    return np.ma.stack(rows)


def task_axis(axis: Any, found: Mapping[str, Any], ylabel: str, **limits: Any) -> None:
    axis.set(xticks=range(len(found)), xticklabels=found, xlabel="after task", ylabel=ylabel, **limits)


def task_lines(axis: Any, values: Any, middle: Any, label: str) -> None:
    """A thin line for each task of [evaluations, tasks], and a bold one for `middle`."""
    x = np.arange(len(values))
    for i, colour in enumerate(_ramp(values.shape[1])):
        axis.plot(x, values[:, i], color=colour, lw=1.1, marker="." if len(x) == 1 else "")
    axis.plot(x, middle, color=INK, lw=2, marker="o", ms=4, label=label)


def band(axis: Any, x: NDArray[Any], curves: Sequence[Floats], **look: Any) -> None:
    """The mean of curves and a band of one deviation; a short curve counts up to its end."""
    padded = np.full((len(curves), len(x)), np.nan)
    for row, curve in zip(padded, curves, strict=True):
        row[: len(curve)] = curve
    middle = np.nanmean(padded, axis=0)
    count = (~np.isnan(padded)).sum(0)
    if count.max() > 1:
        spread = np.nanstd(padded, axis=0) * np.sqrt(count / np.maximum(count - 1, 1))
        axis.fill_between(x, middle - spread, middle + spread, color=look["color"], alpha=0.16, lw=0)
    axis.plot(x, middle, **look)


def _ramp(count: int) -> list[str]:
    return [RAMP[round(100 * i / max(1, count - 1))] for i in range(count)]


def legend(axis: Any, columns: int = 2) -> None:
    """Above the axes, so that it covers no curve."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, ncols=columns, handlelength=2.4, loc="lower left", bbox_to_anchor=(-0.02, 1.0))


PANELS: list[Callable[[Group], Markup | None]] = [losses, memory, importance, matching]

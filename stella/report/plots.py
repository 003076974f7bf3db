"""The pictures of the page, each a function of one or more groups of runs; None where there is nothing to show."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from stella.evaluate.forgetting import mean_accuracy
from stella.report.svg import FAINT, GRID, INK, MARKERS, PAPER, RAMP, SERIES, STYLES, new_figure, styled, to_svg
from stella.report.tables import CEILINGS
from stella.runs.record import Group, RunRecord

POINTS = 240  # of a curve, at most
Floats = NDArray[np.float64]


@styled
def comparison(groups: Sequence[Group], ceilings: Mapping[str, float] | None) -> str:
    """A and F of each method: every run a dot, their mean with its deviation."""
    shown = [(i, group) for i, group in enumerate(groups) if group.spread("A").values]
    figure, (left, right) = new_figure(7.6, 0.9 + 0.36 * max(len(shown), 2), columns=2, width_ratios=[1.9, 1])
    for row, (i, group) in enumerate(shown):
        colour = SERIES[i % len(SERIES)]
        for axis, name in ((left, "A"), (right, "F")):
            spread = group.spread(name)
            if not spread.values:
                axis.text(0.02, row, "not defined", transform=axis.get_yaxis_transform(), color=FAINT, va="center")
                continue
            if len(spread.values) > 1:
                axis.plot(spread.values, [row] * len(spread.values), "o", ms=3.5, color=colour, alpha=0.45, mew=0)
            axis.errorbar(spread.mean, row, xerr=spread.deviation, fmt="o", ms=7, color=colour, capsize=3, lw=1.6)
            axis.annotate(
                f"{spread.mean:.1f}", (spread.mean, row), (0, 7), textcoords="offset points", ha="center", color=INK
            )
    _cue_lines(left, ceilings or {})
    left.set(
        yticks=range(len(shown)), yticklabels=[group.label for _, group in shown], xlabel="A, % (higher is better)"
    )
    right.set(yticks=range(len(shown)), yticklabels=[""] * len(shown), xlabel="F, % (lower is better)")
    for axis in (left, right):
        axis.set_ylim(len(shown) - 0.5, -0.75)
        axis.set_xlim(min(0, axis.get_xlim()[0]), axis.get_xlim()[1])
        axis.grid(axis="x")
    return to_svg(figure, "A and F of each method")


def _cue_lines(axis: Any, ceilings: Mapping[str, float]) -> None:
    """What single cues would give, as far as the methods reach: a line further out would squeeze them."""
    reach = axis.get_xlim()[1]
    ends: list[float] = []  # where the last label of each level ends
    for name, value in sorted(ceilings.items(), key=lambda item: item[1]):
        if value > reach:
            return
        axis.axvline(value, color=FAINT, lw=0.9, ls=(0, (2, 2)), zorder=0)
        level = next((i for i, end in enumerate(ends) if end < value), len(ends))
        label = CEILINGS.get(name, name).removesuffix(" alone")
        ends[level : level + 1] = [value + 0.022 * reach * (len(label) + 1)]
        above = {"xytext": (1, 2 + 8 * level), "textcoords": "offset points", "clip_on": False}
        axis.annotate(label, (value, -0.75), **above, color=FAINT, fontsize=7, va="bottom", ha="left")


@styled
def course(groups: Sequence[Group]) -> str:
    """After each task, the mean accuracy on the tasks learnt so far."""
    figure, (axis,) = new_figure(7.6, 3.0)
    names: list[str] = []
    for row, group in enumerate(groups):
        curves = [curve for run in group.runs if len(curve := _learnt_so_far(run)) > 1]
        points = [run for run in group.runs if len(_learnt_so_far(run)) == 1 and run.finished]
        colour, marker = SERIES[row % len(SERIES)], MARKERS[row % len(MARKERS)]
        if curves:
            longest = max(curves, key=len)
            names = max(names, group.tasks[: len(longest)], key=len)
            _band(
                axis,
                np.arange(len(longest)),
                curves,
                colour,
                group.label,
                marker=marker,
                style=STYLES[row % len(STYLES)],
            )
        elif points:  # a method that learns all tasks at once has one figure, at the end
            level = float(np.mean([_learnt_so_far(run)[-1] for run in points]))
            axis.axhline(level, color=colour, lw=1.4, ls=(0, (2, 2)), label=group.label)
            names = max(names, group.tasks, key=len)
    axis.set(xticks=range(len(names)), xticklabels=[f"after {n}" for n in names], ylabel="acc on tasks so far, %")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y")
    _legend(axis, columns=6)
    return to_svg(figure, "Mean accuracy on the tasks learnt so far, after each task")


@styled
def losses(group: Group) -> str | None:
    """The loss and its parts over the steps, mean over runs, with the ends of tasks."""
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
        colour = INK if name == "loss" else SERIES[(i - 1) % len(SERIES)]
        style = "-" if name == "loss" else STYLES[(i - 1) % len(STYLES)]
        _band(axis, width * np.array(bins), values, colour, "total" if name == "loss" else name, style=style)
    _task_ends(axis, max(group.runs, key=lambda run: len(run.evaluations)))
    axis.set(xlabel="step", ylabel="loss")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y")
    _legend(axis, columns=3)
    return to_svg(figure, f"Loss curves of {group.label}")


@styled
def memory(group: Group) -> str | None:
    """How many clips of each task the memory holds after each task: mean over runs."""
    found = _after_tasks(group, "memory_by_task")
    if not found:
        return None
    figure, (axis,) = new_figure(4.1, 2.5)
    held = _per_task(found).T  # [tasks, evaluations]
    x = np.arange(len(found))
    axis.stackplot(x, held, colors=_ramp(len(held)), edgecolor=PAPER, linewidth=0.7)
    top = held[:, -1].cumsum()
    for name, low, high in zip(group.tasks, [0, *top[:-1]], top, strict=True):
        if high - low > 0.035 * top[-1]:  # room for its name
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5}
            axis.annotate(name, (x[-1], (low + high) / 2), **place)
    axis.set(xticks=x, xticklabels=found, xlabel="after task", ylabel="clips in memory")
    axis.set_xlim(0, max(1, x[-1]))
    axis.set_ylim(0, max(1, top[-1] * 1.02))
    return to_svg(figure, f"What the memory of {group.label} holds, by task")


@styled
def importance(group: Group) -> str | None:
    """Median importance inside the sounding object over that outside: a line for each task, their median bold."""
    found = _after_tasks(group, "importance_ratio")
    if not found or (ratio := _per_task(found)).mask.all():
        return None
    figure, (axis,) = new_figure(4.1, 2.5)
    middle = [np.median(row.compressed()) if row.count() else np.nan for row in ratio]
    _task_lines(axis, ratio, middle, "median task")
    axis.axhline(5, color=FAINT, lw=0.9, ls=(0, (2, 2)), label="5×")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set(xticks=range(len(found)), xticklabels=found, xlabel="after task", ylabel="importance in / out")
    axis.grid(axis="y")
    _legend(axis)
    return to_svg(figure, f"Importance inside over outside the sounding object, {group.label}")


@styled
def matching(group: Group) -> str | None:
    """Accuracy of the matching module after each task."""
    found = _after_tasks(group, "avm_accuracy")
    if not found:
        return None
    figure, (axis,) = new_figure(4.1, 2.5)
    x = np.arange(len(found))
    means = [np.mean(at) for at in found.values()]
    deviations = [np.std(at, ddof=1) if len(at) > 1 else 0.0 for at in found.values()]
    axis.errorbar(x, means, yerr=deviations, color=SERIES[0], lw=2, marker="o", ms=5, capsize=3, elinewidth=1)
    axis.axhline(50, color=FAINT, lw=0.9, ls=(0, (2, 2)))
    axis.text(x[-1], 50, "chance ", color=FAINT, fontsize=7, ha="right", va="bottom")
    axis.set(xticks=x, xticklabels=found, xlabel="after task", ylabel="pairs told apart, %")
    axis.set_ylim(min(40, *means), 100)
    axis.grid(axis="y")
    return to_svg(figure, f"Accuracy of the matching module, {group.label}")


@styled
def gap(group: Group) -> str | None:
    """Modality gap after each task: a line for each task, their mean bold."""
    found = _after_tasks(group, "modality_gap")
    if not found:
        return None
    figure, (axis,) = new_figure(4.1, 2.5)
    gaps = _per_task(found)
    _task_lines(axis, gaps, gaps.mean(axis=1), "mean of tasks")
    axis.set(xticks=range(len(found)), xticklabels=found, xlabel="after task", ylabel="distance of centroids")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y")
    _legend(axis)
    return to_svg(figure, f"Modality gap, {group.label}")


def _learnt_so_far(run: RunRecord) -> Floats:
    learnt = [line for line in run.evaluations if line["task"] >= 0]
    if not learnt:
        return np.zeros(0)
    acc = mean_accuracy(learnt)
    return np.array([row[: line["task"] + 1].mean() for line, row in zip(learnt, acc, strict=True)])


def _losses(run: RunRecord, width: int) -> dict[str, dict[int, float]]:
    """`loss` and each part as means over bins of `width` steps, by the bin's number: runs share bins, not lengths."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in run.lines("step"):
        if line.get("loss") is not None:
            for name, value in {"loss": line["loss"], **line["parts"]}.items():
                found.setdefault(name, {}).setdefault(int(line["step"]) // width, []).append(value)
    return {name: {bin: float(np.mean(values)) for bin, values in bins.items()} for name, bins in found.items()}


def _after_tasks(group: Group, key: str) -> dict[str, list[Any]]:
    """By name of each evaluation (`start`, then the number of the task), in order, what the runs measured there."""
    by_task: dict[int, list[Any]] = {}
    for run in group.runs:
        for line in run.evaluations:
            if line.get(key) is not None:
                by_task.setdefault(int(line["task"]), []).append(line[key])
    return {str(task + 1) if task >= 0 else "start": by_task[task] for task in sorted(by_task)}


def _per_task(found: Mapping[str, Sequence[Sequence[float | None]]]) -> Any:
    """Means over runs, [evaluations, tasks]; masked where nothing was measured."""
    rows = [np.ma.masked_invalid(np.array(at, dtype=np.float64)).mean(axis=0) for at in found.values()]
    return np.ma.stack(rows)


def _task_lines(axis: Any, values: Any, middle: Any, label: str) -> None:
    """A thin line for each task of [evaluations, tasks], and a bold one for what they have in common."""
    x = np.arange(len(values))
    for i, colour in enumerate(_ramp(values.shape[1])):
        axis.plot(x, values[:, i], color=colour, lw=1.1, marker="." if len(x) == 1 else "")
    axis.plot(x, middle, color=INK, lw=2, marker="o", ms=4, label=label)


def _band(
    axis: Any, x: NDArray[Any], curves: Sequence[Floats], colour: str, label: str, *, style: Any = "-", marker: str = ""
) -> None:
    """The mean of curves and one deviation to both sides; a curve that ends early counts as far as it goes."""
    padded = np.full((len(curves), len(x)), np.nan)
    for row, curve in zip(padded, curves, strict=True):
        row[: len(curve)] = curve
    middle = np.nanmean(padded, axis=0)
    count = (~np.isnan(padded)).sum(0)
    if count.max() > 1:
        spread = np.nanstd(padded, axis=0) * np.sqrt(count / np.maximum(count - 1, 1))
        axis.fill_between(x, middle - spread, middle + spread, color=colour, alpha=0.16, lw=0)
    axis.plot(x, middle, color=colour, ls=style, lw=1.7, marker=marker, ms=4.5, label=label)


def _task_ends(axis: Any, run: RunRecord) -> None:
    for line in run.evaluations:
        if line["task"] >= 0:
            axis.axvline(line["step"], color=GRID, lw=1, zorder=0)


def _ramp(count: int) -> list[str]:
    return [RAMP[round(100 * i / max(1, count - 1))] for i in range(count)]


def _legend(axis: Any, columns: int = 2) -> None:
    """Above the axes, where it hides nothing."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, ncols=columns, handlelength=2.4, loc="lower left", bbox_to_anchor=(-0.02, 1.0))


PANELS: dict[str, Callable[[Group], str | None]] = {
    "Loss": losses,
    "What the memory holds": memory,
    "Importance on the sounding object": importance,
    "Matching": matching,
    "Modality gap": gap,
}

"""Pictures as inline SVG. Colours are the page's CSS variables, so one picture serves light and dark."""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray

from stella.evaluate.forgetting import mean_accuracy
from stella.report.record import Group, RunRecord
from stella.report.tables import CEILINGS

# matplotlib needs real colours: these stand for variables and are exchanged when the picture is written.
INK, FAINT, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = [f"#05{i:02x}05" for i in range(8)]
RAMP = [f"#06{i:02x}06" for i in range(101)]  # percent of the way from the first task's colour to the last's
STYLES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5))]  # colour is never all that tells lines apart
MARKERS = ["o", "s", "D", "^", "v", "P", "X", "h"]
POINTS = 240  # of a curve, at most
Floats = NDArray[np.float64]
SETTINGS: dict[str, Any] = {
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "stella",
}
P = ParamSpec("P")
T = TypeVar("T")


def _styled(draw: Callable[P, T]) -> Callable[P, T]:
    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> T:
        with matplotlib.rc_context(SETTINGS):
            return draw(*args, **kwargs)

    return styled


@_styled
def comparison(groups: Sequence[Group], ceilings: Mapping[str, float] | None) -> str:
    """A and F of each method: every run a dot, their mean with its deviation."""
    shown = [(i, group) for i, group in enumerate(groups) if group.spread("A").values]
    figure, (left, right) = _figure(7.6, 0.9 + 0.36 * max(len(shown), 2), columns=2, width_ratios=[1.9, 1])
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
    return _svg(figure, "A and F of each method")


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


@_styled
def course(groups: Sequence[Group]) -> str:
    """After each task, the mean accuracy on the tasks learnt so far."""
    figure, (axis,) = _figure(7.6, 3.0)
    names: list[str] = []
    for row, group in enumerate(groups):
        curves = [curve for run in group.runs if len(curve := _learnt_so_far(run)) > 1]
        points = [run for run in group.runs if len(_learnt_so_far(run)) == 1 and run.finished]
        colour, marker = SERIES[row % len(SERIES)], MARKERS[row % len(MARKERS)]
        if curves:
            longest = max(curves, key=len)
            names = max(names, group.runs[0].tasks[: len(longest)], key=len)
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
            names = max(names, points[0].tasks, key=len)
    axis.set(xticks=range(len(names)), xticklabels=[f"after {n}" for n in names], ylabel="acc on tasks so far, %")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y")
    _legend(axis, columns=6)
    return _svg(figure, "Mean accuracy on the tasks learnt so far, after each task")


@_styled
def losses(group: Group) -> str | None:
    """The loss and its parts over the steps, mean over runs, with the ends of tasks."""
    width = max(1, -(-max(run.step for run in group.runs) // POINTS))
    runs = [_losses(run, width) for run in group.runs]
    names = dict.fromkeys(name for curves in runs for name in curves)
    if not names:
        return None
    figure, (axis,) = _figure(4.1, 2.7)
    for i, name in enumerate(names):
        several = [curves[name] for curves in runs if name in curves]
        bins = sorted({bin for curve in several for bin in curve})
        values = [np.array([curve.get(bin, np.nan) for bin in bins]) for curve in several]
        colour = INK if name == "loss" else SERIES[(i - 1) % len(SERIES)]
        style = "-" if name == "loss" else STYLES[(i - 1) % len(STYLES)]
        _band(axis, width * np.array(bins), values, colour, "total" if name == "loss" else name, style=style)
    _task_ends(axis, group.runs[0])
    axis.set(xlabel="step", ylabel="loss")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y")
    _legend(axis, columns=3)
    return _svg(figure, f"Loss curves of {group.label}")


@_styled
def memory(group: Group) -> str | None:
    """How many clips of each task the memory holds after each task: mean over runs."""
    rows = _after_tasks(group, "memory_by_task")
    if not rows:
        return None
    figure, (axis,) = _figure(4.1, 2.5)
    tasks = group.runs[0].tasks
    held = np.array([np.mean(at, axis=0) for at in rows]).T  # [tasks, evaluations]
    x = np.arange(len(rows))
    colours = _ramp(len(tasks))
    axis.stackplot(x, held, colors=colours, edgecolor=PAPER, linewidth=0.7)
    top = held[:, -1].cumsum()
    for name, low, high in zip(tasks, np.concatenate([[0], top[:-1]]), top, strict=True):
        if high - low > 0.035 * top[-1]:
            axis.annotate(
                name, (x[-1], (low + high) / 2), (4, 0), textcoords="offset points", va="center", fontsize=7.5
            )
    axis.set(xticks=x, xticklabels=_short(tasks, len(rows)), xlabel="after task", ylabel="clips in memory")
    axis.set_xlim(x[0], x[-1] if len(x) > 1 else 1)
    axis.set_ylim(bottom=0)
    return _svg(figure, f"What the memory of {group.label} holds, by task")


@_styled
def importance(group: Group) -> str | None:
    """Median importance inside the sounding object over that outside: a line for each task, their median bold."""
    rows = _after_tasks(group, "importance_ratio")
    if not rows or not any(value is not None for at in rows for values in at for value in values):
        return None
    tasks = group.runs[0].tasks
    figure, (axis,) = _figure(4.1, 2.5)
    ratio = np.array(
        [np.nanmean(np.array([[np.nan if v is None else v for v in values] for values in at]), axis=0) for at in rows]
    )  # [evaluations, tasks]
    x = np.arange(len(rows))
    for i, colour in enumerate(_ramp(len(tasks))):
        axis.plot(x, ratio[:, i], color=colour, lw=1.1)
    axis.plot(x, np.nanmedian(ratio, axis=1), color=INK, lw=2, marker="o", ms=4, label="median task")
    axis.axhline(5, color=FAINT, lw=0.9, ls=(0, (2, 2)), label="5×")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axis.yaxis.set_minor_formatter(lambda value, _: "")
    axis.set(xticks=x, xticklabels=_short(tasks, len(rows)), xlabel="after task", ylabel="importance in / out")
    axis.grid(axis="y")
    _legend(axis)
    return _svg(figure, f"Importance inside over outside the sounding object, {group.label}")


@_styled
def matching(group: Group) -> str | None:
    """Accuracy of the matching module after each task."""
    rows = _after_tasks(group, "avm_accuracy")
    if not rows:
        return None
    figure, (axis,) = _figure(4.1, 2.5)
    x = np.arange(len(rows))
    _bars(axis, x, rows, SERIES[0])
    axis.axhline(50, color=FAINT, lw=0.9, ls=(0, (2, 2)))
    axis.text(x[-1], 50, "chance ", color=FAINT, fontsize=7, ha="right", va="bottom")
    axis.set(
        xticks=x, xticklabels=_short(group.runs[0].tasks, len(rows)), xlabel="after task", ylabel="pairs told apart, %"
    )
    axis.set_ylim(40, 100)
    axis.grid(axis="y")
    return _svg(figure, f"Accuracy of the matching module, {group.label}")


@_styled
def gap(group: Group) -> str | None:
    """Modality gap after each task: a line for each task, their mean bold."""
    rows = _after_tasks(group, "modality_gap")
    if not rows:
        return None
    figure, (axis,) = _figure(4.1, 2.5)
    x = np.arange(len(rows))
    gaps = np.array([np.mean(at, axis=0) for at in rows])  # [evaluations, tasks]
    for i, colour in enumerate(_ramp(gaps.shape[1])):
        axis.plot(x, gaps[:, i], color=colour, lw=1.1)
    axis.plot(x, gaps.mean(1), color=INK, lw=2, marker="o", ms=4, label="mean of tasks")
    axis.set(
        xticks=x,
        xticklabels=_short(group.runs[0].tasks, len(rows)),
        xlabel="after task",
        ylabel="distance of centroids",
    )
    axis.set_ylim(bottom=0)
    axis.grid(axis="y")
    _legend(axis)
    return _svg(figure, f"Modality gap, {group.label}")


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


def _after_tasks(group: Group, key: str) -> list[list[Any]]:
    """For each evaluation in order what the runs measured there, the runs that have it; empty if none has."""
    by_task: dict[int, list[Any]] = {}
    for run in group.runs:
        for line in run.evaluations:
            if line.get(key) is not None:
                by_task.setdefault(int(line["task"]), []).append(line[key])
    return [by_task[task] for task in sorted(by_task)]


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


def _bars(axis: Any, x: NDArray[Any], rows: Sequence[Sequence[float]], colour: str) -> None:
    means = [float(np.mean(at)) for at in rows]
    deviations = [float(np.std(at, ddof=1)) if len(at) > 1 else 0.0 for at in rows]
    axis.errorbar(x, means, yerr=deviations, color=colour, lw=2, marker="o", ms=5, capsize=3, elinewidth=1)


def _task_ends(axis: Any, run: RunRecord) -> None:
    for line in run.evaluations:
        if line["task"] >= 0:
            axis.axvline(line["step"], color=GRID, lw=1, zorder=0)


def _short(tasks: Sequence[str], evaluations: int) -> list[str]:
    """Names for evaluations: `start` is before the first task; a run of all tasks at once has only its end."""
    names = ["start", *(name.removeprefix("task") for name in tasks)]
    return names[:evaluations] if evaluations != 2 or len(tasks) == 1 else ["start", "all"]


def _ramp(count: int) -> list[str]:
    return [RAMP[round(100 * i / max(1, count - 1))] for i in range(count)]


def _legend(axis: Any, columns: int = 2) -> None:
    """Above the axes, where it hides nothing."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, ncols=columns, handlelength=2.4, loc="lower left", bbox_to_anchor=(-0.02, 1.0))


def _figure(width: float, height: float, columns: int = 1, **more: Any) -> tuple[Any, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False, gridspec_kw=more or None)[0]


def _svg(figure: Any, label: str) -> str:
    """The picture without the ids and the size matplotlib gives it, colours as variables."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?:[a-z]+[A-Za-z0-9]*_\d+|patch.*?)"', "", text)
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]+)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-label="{_plain(label)}">',
        text,
        count=1,
    )
    for colour, value in _colours():
        text = text.replace(colour, value)
    return text


def _colours() -> Iterable[tuple[str, str]]:
    yield from ((INK, "var(--ink)"), (FAINT, "var(--faint)"), (GRID, "var(--line)"), (PAPER, "var(--card)"))
    yield from ((colour, f"var(--c{i})") for i, colour in enumerate(SERIES))
    yield from ((c, f"color-mix(in oklab, var(--last) {i}%, var(--first))") for i, c in enumerate(RAMP))


def _plain(text: str) -> str:
    return re.sub(r'[<>&"]', " ", text)


PANELS: dict[str, Callable[[Group], str | None]] = {
    "Loss": losses,
    "What the memory holds": memory,
    "Importance on the sounding object": importance,
    "Matching": matching,
    "Modality gap": gap,
}

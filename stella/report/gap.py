"""Figures of the modality gap: methods as lines, its decline, and pairs of one task in two dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from stella.evaluate.forgetting import gap_decline
from stella.files import read_json
from stella.report.colours import colours
from stella.report.plots import DASHED, after_tasks, band, legend, per_task, task_axis, task_lines
from stella.report.svg import FAINT, INK, MARKERS, PAPER, SERIES, new_figure, styled, to_svg
from stella.runs.folder import RunFolder
from stella.runs.record import Group

PAIRS = 4  # pictures of pairs in a row
LEAST = 0.05  # of a distance from 0 to 2: an axis of declines reaches so far on both sides


@dataclass(frozen=True)
class Series:
    """The gap of one method: for each run its mean over tasks after each task, and its decline."""

    label: str
    colour: str
    marker: str
    curves: list[list[float]]
    declines: list[float]
    hollow: bool = False  # and dashed


@styled
def gaps(groups: Sequence[Group]) -> Markup | None:
    """The modality gap after each task, the mean over all tasks, and its decline. Slow weights are dashed."""
    found: list[Series] = []
    names: list[str] = []
    for row, (group, colour) in enumerate(zip(groups, colours([group.method for group in groups]), strict=True)):
        for slow, one in enumerate(group.versions):
            lines = [[line["modality_gap"] for line in run.evaluations if line.get("modality_gap")] for run in one.runs]
            after = [len(run.evaluations) - len(one.tasks) for run in one.runs]  # 1 with one before the first task
            kept = [(run, first) for run, first in zip(lines, after, strict=True) if len(run) > 2]  # not Multitask
            if kept:
                curves = [[float(np.mean(gap)) for gap in run[max(0, first) :]] for run, first in kept]
                declines = [gap_decline(run[max(0, first) :]) for run, first in kept]
                names = max(names, one.tasks, key=len)
                known = [decline for decline in declines if decline is not None]
                marker = MARKERS[row % len(MARKERS)]
                found.append(Series(one.label, SERIES[colour], marker, curves, known, bool(slow)))
    if not found:
        return None
    figure = new_gap_figure(found, names, FAINT, PAPER)
    return to_svg(figure, "Modality gap after each task, and its decline")


def new_gap_figure(found: Sequence[Series], names: Sequence[str], line: str, paper: str) -> Any:
    """Lines of the gap on the left, its decline on the right."""
    rows = -(-len(found) // 6)
    height = 2.9 + 0.2 * rows + 0.15 * max(0, len(found) - 6)  # many lines need room
    figure, (left, right) = new_figure(8.6, height, columns=2, width_ratios=[1.9, 1])
    for each in found:
        look = {"color": each.colour, "marker": each.marker, "ms": 4.5, "label": each.label}
        look |= {"lw": 1.0 if each.hollow else 1.7, "ls": DASHED if each.hollow else "-"}
        curves = [np.array(curve) for curve in each.curves]
        band(left, np.arange(max(map(len, curves))), curves, mfc=paper if each.hollow else None, **look)
    left.set_xticks(range(len(names)), names)
    left.set(xlabel="after", ylabel="distance of the centroids", ylim=(0, 1.06 * left.get_ylim()[1]))
    left.grid(axis="y")
    figure.legend(loc="outside upper left", frameon=False, ncols=6, handlelength=2.2, columnspacing=1.2)
    declines = [each for each in found if each.declines]
    for row, each in enumerate(declines):
        mean, deviation = np.mean(each.declines), np.std(each.declines, ddof=1) if len(each.declines) > 1 else None
        right.plot(each.declines, [row] * len(each.declines), "o", ms=3, color=each.colour, alpha=0.45, mew=0)
        face = paper if each.hollow else each.colour
        right.errorbar(mean, row, xerr=deviation, fmt=each.marker, ms=5, color=each.colour, mfc=face, capsize=3)
    right.set_yticks(range(len(declines)), [each.label for each in declines])
    low, high = right.get_xlim()
    wide = {"xlim": (min(low, -LEAST), max(high, LEAST))}  # noise fills no axis
    right.set(xlabel="decline of earlier tasks' gap", ylim=(len(declines) - 0.5, -0.5), **wide)
    right.axvline(0, lw=0.8, ls=(0, (2, 2)), color=line)
    right.grid(axis="x")
    return figure


@styled
def pairs(groups: Sequence[Group]) -> Markup | None:
    """Audio and video embeddings of the same clips, with a line between them: a picture for each method."""
    found = []
    for group, colour in zip(groups, colours([group.method for group in groups]), strict=True):
        file = next((f for run in group.finished if (f := RunFolder(run.path).pairs).is_file()), None)
        if file is not None:
            found.append((group.label, SERIES[colour], read_json(file)))
    return to_svg(new_pairs_figure(found, FAINT, PAPER), "Pairs in two dimensions") if found else None


def new_pairs_figure(found: Sequence[tuple[str, str, dict[str, Any]]], line: str, paper: str) -> Any:
    """Label, colour and `evaluate.pairs.plane` of each method; video is filled, audio hollow."""
    columns = min(PAIRS, max(3, len(found)))
    rows = -(-len(found) // columns)
    figure, _ = new_figure(8.6, (8.6 / columns + 0.3) * rows + 0.3)
    figure.clear()
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    every = np.concatenate([np.array(plane["pairs"]).reshape(-1, 2) for _, _, plane in found])
    middle, half = (every.max(0) + every.min(0)) / 2, 0.53 * np.ptp(every, axis=0).max()
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    for axis, (label, colour, plane) in zip(axes, found, strict=False):
        points = np.array(plane["pairs"])
        axis.plot(points[:, [0, 2]].T, points[:, [1, 3]].T, color=line, lw=0.5, zorder=1)
        axis.plot(points[:, 0], points[:, 1], "o", ms=3.4, mfc=paper, color=colour, mew=0.9, label="audio")
        axis.plot(points[:, 2], points[:, 3], "o", ms=3.4, color=colour, mew=0.9, label="video")
        axis.set_title(f"{label} ({plane['share']:.0%} of the variance)", fontsize=7.5, loc="left")
        axis.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half), box_aspect=1)
        axis.tick_params(labelsize=6.5)
        axis.locator_params(axis="x", nbins=4)  # so that the labels of neighbours keep apart
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", frameon=False, ncols=2, fontsize=7.5)
    return figure


@styled
def gap(group: Group) -> Markup | None:
    """Modality gap after each task: a line for each task and their mean; the mean of slow weights is dashed."""
    found = after_tasks(group, "modality_gap")
    if not found:
        return None
    figure, (axis,) = new_figure(4.1, 2.5)
    gaps = per_task(found)
    task_lines(axis, gaps, gaps.mean(axis=1), "mean of tasks")
    for slow in group.versions[1:]:
        means = per_task(after_tasks(slow, "modality_gap")).mean(axis=1)
        axis.plot(range(len(means)), means, color=INK, lw=1.0, ls=DASHED, label="slow weights")
    task_axis(axis, found, "distance", ylim=(0, None))
    axis.grid(axis="y")
    legend(axis)
    return to_svg(figure, f"Modality gap, {group.label}")

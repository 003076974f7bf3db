"""Tables for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from stella.data.skipped import in_words
from stella.evaluate.forgetting import mean_accuracy
from stella.runs.record import Group, RunRecord

DIRECTIONS = {"a2v": "audio → video", "v2a": "video → audio"}
CEILINGS = {
    "chance": "chance",
    "timing": "timing alone",
    "class": "class alone",
    "link": "the class's link alone",
    "everything": "everything there is to know",
}


def results_table(groups: Sequence[Group], ceilings: Mapping[str, float] | None = None) -> Table:
    """A and F for each method, mean ± deviation over its finished runs, and below what single cues would give."""
    table = Table(box=box.SIMPLE_HEAD, title="Retrieval after the last task", title_justify="left", title_style="bold")
    table.add_column("method")
    table.add_column("runs", justify="right", style="dim")
    table.add_column("A ↑", justify="right", style="bold")
    table.add_column("F ↓", justify="right")
    for name in DIRECTIONS.values():
        table.add_column(f"{name} A".replace("→ ", "→\n"), justify="right")
        table.add_column("F", justify="right")
    for group in groups:
        done, total = len(group.finished), len(group.runs)
        figures = [group.spread(*keys, figure) for keys in ((), *((d,) for d in DIRECTIONS)) for figure in "AF"]
        table.add_row(group.label, str(done) if done == total else f"{done} of {total}", *map(str, figures))
    if ceilings:
        table.add_section()
        for name, value in spelt(ceilings).items():
            table.add_row(Text(name, style="dim"), "", Text(f"{value:.1f}", style="dim"))
    table.caption = "mean of R@1/5/10 in %, all tasks' clips as gallery; F: how far tasks fell from their best"
    table.caption_justify = "left"
    return table


def accuracy_table(run: RunRecord) -> Table:
    """acc(t, i) of one run: a row after each task, a column for each task; what is not yet learnt is dim."""
    title = f"acc(t, i) of {run.title}, seed {run.seed}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("after")
    for name in run.tasks:
        table.add_column(name, justify="right")
    learnt = [line for line in run.evaluations if line["task"] >= 0]
    for line, row in zip(learnt, mean_accuracy(learnt) if learnt else (), strict=True):
        cells = [Text(f"{value:.1f}", style="" if i <= line["task"] else "dim") for i, value in enumerate(row)]
        table.add_row(run.tasks[line["task"]], *cells)
    return table


def spell_ceilings(ceilings: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in spelt(ceilings).items())


def spelt(ceilings: Mapping[str, float]) -> dict[str, float]:
    """By their names, lowest first."""
    return {name: ceilings[key] for key, name in CEILINGS.items() if key in ceilings}


def recall_table(evaluation: Mapping[str, Any], ceilings: Mapping[str, float] | None = None) -> Table:
    """R@1/5/10 of every task, both ways, and their mean; below, what single cues would give."""
    table = Table(box=box.SIMPLE_HEAD, title="Zero-shot retrieval", title_justify="left", title_style="bold")
    table.add_column("task")
    recall = evaluation["recall"]
    columns = [recall[direction][k] for direction in DIRECTIONS for k in recall[direction]]
    for direction, name in DIRECTIONS.items():
        for k in recall[direction]:
            table.add_column(f"{name} R@{k}", justify="right")
    table.add_column("mean", justify="right", style="bold")
    rows = list(zip(*columns, strict=True))
    for name, row in zip(evaluation["tasks"], rows, strict=True):
        table.add_row(name, *(f"{value:.1f}" for value in row), f"{sum(row) / len(row):.1f}")
    means = [sum(column) / len(column) for column in columns]
    table.add_section()
    table.add_row("all", *(f"{value:.1f}" for value in means), f"{sum(means) / len(means):.1f}")
    table.caption = f"%, all {sum(evaluation['clips'])} clips as gallery"
    if evaluation.get("skipped"):
        table.caption += f", skipped: {in_words(evaluation['skipped'])}"
    if ceilings:
        table.caption += f"; of this mean {spell_ceilings(ceilings)}"
    table.caption_justify = "left"
    return table

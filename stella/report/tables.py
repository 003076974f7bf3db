"""Tables for the terminal. They fit 80 columns: figures stay on one line, names wrap and are never cut."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from stella.data.skipped import in_words
from stella.data.tasks import chance
from stella.errors import number_of, plain
from stella.runs.record import Group, RunRecord, galleries, mean_recall

DIRECTIONS = {"a2v": "a→v", "v2a": "v→a"}
LEGEND = "a→v: sounds find their videos; v→a: the reverse"
CEILINGS = {  # lowest first
    "chance": "chance",
    "timing": "timing alone",
    "class": "class alone",
    "link": "class's link alone",
    "everything": "all cues together",
}


def results_table(groups: Sequence[Group], ceilings: Mapping[str, float] | None = None) -> Table:
    """A and F of each method over its finished runs, its slow weights below it; last, the ceilings."""
    table = new_table("Retrieval after the last task", "method")
    sizes = galleries(run for group in groups for run in group.runs)
    differ = len(sizes) > 1
    styles = {"runs": "dim", **({"gallery\n(chance)": ""} if differ else {}), "A ↑": "bold", "F ↓": ""}
    for heading in (*styles, *(f"{direction} {figure}" for direction in DIRECTIONS.values() for figure in "AF")):
        table.add_column(heading, justify="right", style=styles.get(heading, ""), no_wrap=True)
    for one in (version for group in groups for version in group.versions):
        by_direction = (one.spread(direction, figure).short for direction in DIRECTIONS for figure in "AF")
        gallery = [", ".join(f"{n:,} ({chance([n])['chance']:.1f})" for n in galleries(one.runs))] if differ else []
        figures = (str(one.spread("A")), str(one.spread("F")), *by_direction)
        table.add_row(Text(plain(one.label)), one.progress, *gallery, *figures)
    if ceilings:
        table.add_section()
        for name, value in named_ceilings(ceilings).items():
            table.add_row(name, "", Text(f"{value:.1f}", style="not bold"), style="dim")
    clips = f"the {sizes[0]:,} evaluation clips of all tasks" if len(sizes) == 1 else "the clips of all tasks"
    table.caption = (
        f"A: mean of R@1/5/10 over all tasks in %, {clips} as gallery. F: how far tasks fell from their "
        f"best before the end, negative where they gained. {LEGEND}. ±: deviation over runs. {below_the_line(ceilings)}"
    ).strip()
    return table


def accuracy_table(run: RunRecord) -> Table:
    """acc(t, i), the A of task i after task t, of one run and of its slow weights: a row after each task, a column for
    each task."""
    table = new_table(f"A of each task: {run.title}, seed {run.seed}", "after")
    for name in run.tasks:
        table.add_column(Text(plain(name)), justify="right", overflow="fold")
    for version in filter(None, (run, run.slow)):
        if version is not run:
            table.add_section()
            table.add_row(Text("slow weights", style="italic"))
        for line in version.evaluations:
            if line["task"] >= 0:
                cells = [(f"{value:z.1f}", i <= line["task"]) for i, value in enumerate(mean_recall(line))]
                learnt = [Text(value, style="" if seen else "dim") for value, seen in cells]
                table.add_row(Text(plain(run.tasks[line["task"]])), *learnt)
    table.caption = "A of a task: mean of its R@1/5/10 in %. Dim: not learnt yet."
    return table


def recall_table(evaluation: Mapping[str, Any], ceilings: Mapping[str, float] | None = None) -> Table:
    """R@1/5/10 of every task in both directions, and, of several tasks, their mean."""
    table = new_table("Zero-shot retrieval", "task")
    recall = evaluation["recall"]
    columns = [recall[direction][k] for direction in DIRECTIONS for k in recall[direction]]
    for direction, name in DIRECTIONS.items():
        for k in recall[direction]:
            table.add_column(f"{name} R@{k}", justify="right", no_wrap=True)
    table.add_column("mean", justify="right", style="bold")
    for name, row in zip(evaluation["tasks"], zip(*columns, strict=True), strict=True):
        table.add_row(Text(plain(name)), *(f"{value:.1f}" for value in row), f"{sum(row) / len(row):.1f}")
    if len(evaluation["tasks"]) > 1:
        means = [sum(column) / len(column) for column in columns]
        table.add_section()
        table.add_row("all", *(f"{value:.1f}" for value in means), f"{sum(means) / len(means):.1f}")
    table.caption = f"%, in a gallery of {number_of(sum(evaluation['clips']), 'clip')}; {LEGEND}"
    if evaluation.get("skipped"):
        table.caption += escape(f"; skipped: {in_words(evaluation['skipped'])}")
    if ceilings:
        table.caption += f"; mean by {ceilings_line(ceilings)}"
    return table


class Matching(NamedTuple):
    """A column of the matching table."""

    key: str  # of its figures, one a task; None where a task's clips have no mask
    written: Callable[[float], str]
    meaning: str


def matching_table(evaluation: Mapping[str, Any]) -> Table | None:
    """What the matching module knows of each task: pairs, and where the sound comes from. None without a module."""
    if evaluation.get("avm_accuracy") is None:
        return None
    table = new_table("Matching module", "task")
    columns = {name: column for name, column in MATCHING.items() if any(x is not None for x in evaluation[column.key])}
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for i, task in enumerate(evaluation["tasks"]):
        values = [(evaluation[column.key][i], column.written) for column in columns.values()]
        table.add_row(Text(plain(task)), *("–" if value is None else written(value) for value, written in values))
    table.caption = " ".join(column.meaning for column in columns.values() if column.meaning)
    return table


def times(ratio: float, digits: int = 1) -> str:
    """A ratio of importance; how far it lies above 1,000 says nothing, as it is then by a median next to 0."""
    return "> 1,000" if ratio > 1000 else f"{ratio:.{digits}f}"


MATCHING = {
    "pairs told apart %": Matching("avm_accuracy_by_task", "{:.1f}".format, ""),  # matched from mismatched ones
    "AUC": Matching(
        "auc", "{:.2f}".format, "AUC: a patch of the sounding object is more important than another (chance 0.5)."
    ),
    "points %": Matching("pointing", "{:.1f}".format, "Points: the most important patch lies on the object."),
    "by chance %": Matching("pointing_chance", "{:.1f}".format, ""),
    "importance ×": Matching("importance_ratio", times, "Importance: median on the object over median elsewhere."),
}


def classes_line(measures: Mapping[str, Any]) -> str:
    """Class-level retrieval and nearest neighbours in a sentence or two."""
    recall, knn = measures["recall"], measures["knn"]
    found = ", ".join(f"{name} {recall[direction]['1']:.1f}%" for direction, name in DIRECTIONS.items())
    return (
        f"{number_of(measures['classes'], 'class')}. The first clip found is of the right class: {found} (its own pair "
        f"left out). Class by the vote of nearest neighbours: by sound {knn['a']:.1f}%, by picture {knn['v']:.1f}%, "
        f"by both {knn['av']:.1f}%; the largest class has {measures['majority']:.1f}%."
    )


def ceilings_line(ceilings: Mapping[str, float]) -> str:
    """The ceilings in one line: `chance 0.4, timing alone 2.2`."""
    return ", ".join(f"{name} {value:.1f}" for name, value in named_ceilings(ceilings).items())


def below_the_line(ceilings: Mapping[str, float] | None) -> str:
    """What the last rows of a table of results are; empty without any."""
    named = named_ceilings(ceilings or {})
    what = "guessing, perfect knowledge of one cue alone, and all cues together" if len(named) > 1 else "guessing"
    return f"Below the line: what {what} would reach." if named else ""


def named_ceilings(ceilings: Mapping[str, float]) -> dict[str, float]:
    """The ceilings by the names that a reader sees, lowest first."""
    return {name: ceilings[key] for key, name in CEILINGS.items() if key in ceilings}


def new_table(title: str, first: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text(f"\n{plain(title)}", "bold"),
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.title_justify = table.caption_justify = "left"
    table.add_column(first, overflow="fold")
    return table

"""Our results beside the paper's, for the terminal and as Markdown; every heading says whose a column is."""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from stella.experiments import paper
from stella.experiments.paper import Row, format_figure
from stella.experiments.ranks import kendall, mean_ranks, shared_seeds
from stella.experiments.recipe import Recipe
from stella.experiments.results import Rows, spread
from stella.experiments.room import room
from stella.report.tables import named_ceilings, new_table

SCALE = (
    "Columns headed “paper ({dataset})” are the paper's own: another model, on {clips}. Scenes and {dataset} "
    "differ in scale: compare the order of the methods, not the figures."
)
OWN = "Columns headed “paper ({dataset})” are the paper's own: other clips of {clips}, other initial weights."
ROOM = "Room won: 0% is DER++, 100% is DER++ with unlimited memory."
WEIGHTS = {"A": "working", "slow_A": "slow"}
BOUNDS = ("finetune", "multitask")  # below and above all others, here as in the paper
MEASURED = ("clips_per_second", "peak_gib", "hardware", "model", "clips", "precision")  # columns of a speed sheet
CLIPS = {"Continual-VS": "VGGSound", "Continual-AS": "AudioSet"}


@dataclass(frozen=True)
class Sheet:
    """A table to print: the first column is text, the others are figures."""

    title: str
    about: str  # printed below the title; may be empty
    head: list[str]
    rows: list[list[str]]
    below: list[list[str]]  # printed below a line: reference values, not results
    notes: list[str]


def learning_sheet(
    recipe: Recipe,
    order: str,
    found: Mapping[str, Rows],
    ceilings: Mapping[str, float] | None,
    overrides: Sequence[str] = (),
) -> Sheet:
    """A and F of every variant in one order of tasks; `found` holds the CSV lines of each `ORDER/VARIANT`."""
    table = recipe.orders[order]
    ours = {name: found[f"{order}/{name}"] for name in recipe.variants}
    printed = {name: paper.row(table.paper, name, recipe.dataset) for name in recipe.variants}
    theirs = {name: row for name, row in printed.items() if row}
    columns = [f"paper ({recipe.dataset}) {of}: a→v, v→a" for of in ("A ↑", "F ↓")] if table.paper else []
    slow = any(line.get("slow_A") for lines in ours.values() for line in lines)
    slow_f = any(line.get("slow_F") for lines in ours.values() for line in lines)
    figures = ["A", "F", *(["slow_A"] if slow else []), *(["slow_F"] if slow_f else [])]
    rooms = {figure: each for figure in ("A", "slow_A") if figure in figures and (each := room(ours, figure))}
    rows = []
    for name, variant in recipe.variants.items():
        spreads = {figure: spread(ours[name], figure) for figure in figures}
        won = [f"{each.share(spreads[of].mean):z.0f}%" if spreads[of].values else "–" for of, each in rooms.items()]
        beside = [theirs[name].show(of) for of in "AF"] if name in theirs else ["–" for _ in columns]
        fine = [_fine(ours[name], column) for column in recipe.columns]
        rows.append([variant.label, str(len(ours[name])), *map(str, spreads.values()), *won, *fine, *beside])
    below = ["" for _ in (*figures[1:], *rooms, *recipe.columns, *columns)]
    further = [f"ours {name.replace('_', ' ')}" for name in recipe.columns]
    cues = [[name, "", f"{value:.1f}", *below] for name, value in named_ceilings(ceilings or {}).items()]
    tasks = recipe.tree(overrides, table.tasks).get("data", {}).get("tasks", ())
    sequence = f": {' → '.join(tasks)}" if tasks else ""
    scale = (SCALE if ceilings else OWN).format(dataset=recipe.dataset, clips=CLIPS[recipe.dataset])
    both = {name: (spread(ours[name], "A").mean, row.mean("A")) for name, row in theirs.items() if ours[name]}
    of_slow = ["slow weights A ↑"] * slow + ["F ↓"] * slow_f
    head = ["", "runs", "ours A ↑", "ours F ↓", *of_slow]
    return Sheet(
        f"{recipe.title}. Tasks in {order} order{sequence}",
        recipe.about(overrides),
        [*head, *(f"room won, {WEIGHTS[of]}" for of in rooms), *further, *columns],
        rows,
        cues,
        [
            "Ours: mean of R@1/5/10 over both directions in %, mean ± standard deviation over runs.",
            *(["Below the line: A of a model that knows one cue alone, in our gallery."] if cues else []),
            *([ROOM] if rooms else []),
            *(f"Room by {WEIGHTS[of]} weights: {each}." for of, each in rooms.items()),
            *recipe.shadowed(overrides, [name for name in recipe.variants if ours[name]], [order]),
            *_sources(list(theirs.values()), scale),
            *_order(both),
        ],
    )


def rank_sheets(recipe: Recipe, order: str, found: Mapping[str, Rows]) -> list[Sheet]:
    """Mean ranks of the variants that have most runs, and of the paper's rows alone; none if too few share seeds."""
    ours = {name: found[f"{order}/{name}"] for name in recipe.variants}
    most = max(map(len, ours.values()))
    every = {name: rows for name, rows in ours.items() if len(rows) == most}
    papers = {name: rows for name, rows in every.items() if paper.row(recipe.orders[order].paper, name, recipe.dataset)}
    compared = {"": every} | ({"the paper's rows, ": papers} if len(papers) < len(every) else {})
    columns = {
        f"{of}{weights}": ranks
        for of, rows in compared.items()
        for figure, weights in WEIGHTS.items()
        if (ranks := mean_ranks(rows, figure))
    }
    if not columns:
        return []
    first = next(iter(columns.values()))
    rows = [
        [recipe.variants[name].label, *(str(ranks.get(name, "–")) for ranks in columns.values())]
        for name in sorted(first, key=lambda name: first[name].mean)
    ]
    notes = [
        f"1 is the best; ± half of the 95% interval of the mean, over seeds {', '.join(shared_seeds(every, 'A'))}."
    ]
    if fewer := [recipe.variants[name].label for name, rows in ours.items() if 0 < len(rows) < most]:
        notes.append(f"Not ranked, with fewer runs: {', '.join(fewer)}.")
    return [Sheet(f"Mean ranks of A in {order} order", "", ["", *columns], rows, [], notes)]


def _fine(rows: Rows, column: str) -> str:
    """A small figure: three digits."""
    found = spread(rows, column)
    deviation = "" if found.deviation is None else f" ± {found.deviation:.3f}"
    return f"{found.mean:z.3f}{deviation}" if found.values else "–"


def speed_sheet(recipe: Recipe, order: str, found: Mapping[str, Rows]) -> Sheet:
    """Clips per second and peak memory of every variant, and both relative to the first variant."""
    ours: dict[str, tuple[float, float]] = {}
    theirs: dict[str, tuple[float, float]] = {}
    printed = {name: row for name in recipe.variants if (row := paper.row(recipe.orders[order].paper, name))}
    for name in recipe.variants:
        lines = found[f"{order}/{name}"]
        speeds, peaks = ([float(line[column]) for line in lines] for column in ("clips_per_second", "peak_gib"))
        ours[name] = (speeds[0], peaks[0] * 2**30 / 1e9) if lines else (np.nan, np.nan)
        theirs[name] = (printed[name].speed, printed[name].gb) if name in printed else (np.nan, np.nan)
    first = next(iter(recipe.variants))
    rows = []
    for name, variant in recipe.variants.items():
        cells = []
        for side in (ours, theirs):
            for value, of in zip(side[name], side[first], strict=True):
                cells += [format_figure(value, 2), format_figure(value / of, 2)]
        rows.append([variant.label, *cells])
    label = recipe.variants[first].label
    columns = ["clips/s ↑", f"× {label}", "GB ↓", f"× {label}"]
    places = {
        f"{line['hardware']}, {line['model']} on {line['clips']}, {line['precision']}"
        for lines in found.values()
        for line in lines
    }
    return Sheet(
        recipe.title,
        "",
        ["", *(f"ours {column}" for column in columns), *(f"paper (V100) {column}" for column in columns)],
        rows,
        [],
        [
            f"Ours: {'; '.join(sorted(places))}. GB: the GPU's peak, or that of the whole process on a CPU.",
            *_sources(list(printed.values()), "Other hardware, other sizes: compare methods within each side."),
        ],
    )


def terminal(sheets: Sequence[Sheet]) -> RenderableType:
    return Group(*(part for sheet in sheets for part in (_Fitted(sheet), Text("\n".join(sheet.notes), "dim"), "")))


@dataclass(frozen=True)
class _Fitted:
    """A sheet as one table, or as several with the names in each: names wrap between words, figures stay whole."""

    sheet: Sheet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble((self.sheet.title, "bold"), (f"\n{self.sheet.about}" if self.sheet.about else "", "dim"))
        left = list(range(1, len(self.sheet.head)))
        while left:
            tables = {count: _rich(self.sheet, left[:count]) for count in range(len(left), 0, -1)}
            wide = options.update_width(sys.maxsize)
            fit = [n for n, each in tables.items() if Measurement.get(console, wide, each).minimum <= options.max_width]
            shown = max(fit, default=1)
            yield tables[shown]
            left = left[shown:]
        yield ""


def _rich(sheet: Sheet, columns: Sequence[int]) -> Table:
    """A table of the names and these columns."""
    table = new_table("further columns", sheet.head[0])
    if columns[0] == 1:
        table.title = None
    for i in columns:
        widest = max(len(row[i]) for row in (*sheet.rows, *sheet.below))
        lines = _wrapped(sheet.head[i], widest)
        dim = "dim" if sheet.head[i].startswith("paper") else ""
        look: Any = {"style": dim, "header_style": f"bold {dim}".strip(), "justify": "right", "no_wrap": True}
        table.add_column("\n".join(lines), min_width=max([widest, *map(len, lines)]), **look)
    for row in sheet.rows:
        table.add_row(*(Text(row[i]) for i in (0, *columns)))
    if below := [row for row in sheet.below if any(row[i] for i in columns)]:
        table.add_section()
        for row in below:
            table.add_row(*(Text(row[i]) for i in (0, *columns)), style="dim")
    return table


def _wrapped(heading: str, width: int) -> list[str]:
    """Lines of whole words, of this width where its words allow; an arrow stays with its word."""
    bound = heading.replace(" ↑", "\u00a0↑").replace(" ↓", "\u00a0↓")
    lines = textwrap.wrap(bound, width or 1, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


def markdown(name: str, sheets: Sequence[Sheet]) -> str:
    text = f"# {name}\n"
    for sheet in sheets:
        lines = [sheet.head, ["---", *["---:"] * (len(sheet.head) - 1)], *sheet.rows]
        lines += [[f"*{cell}*" if cell else "" for cell in row] for row in sheet.below]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        about = f"{sheet.about}\n\n" if sheet.about else ""
        text += f"\n## {sheet.title}\n{about}{table}\n\n" + "".join(f"- {note}\n" for note in sheet.notes)
    return text


def _sources(rows: Sequence[Row], warning: str) -> list[str]:
    """Which of the paper's tables these rows are from, and a warning."""
    labels = list(dict.fromkeys(row.table for row in rows))
    if not labels:
        return ["The paper prints no numbers for this."]
    return [f"Paper: Lee et al., ICML 2024, {', '.join(labels)}. {warning}"]


def _order(both: Mapping[str, tuple[float, float]]) -> list[str]:
    """Agreement of pairs (ours, the paper's) in rank, if there are at least five."""
    if len(both) < 5:
        return []
    pairs, inner = list(both.values()), [pair for name, pair in both.items() if name not in BOUNDS]
    ranks = np.argsort(np.argsort(np.array(pairs), axis=0), axis=0)
    spearman, tau = np.corrcoef(*ranks.T).flat[1], kendall(pairs)
    without = f", {kendall(inner):z.2f} without Finetune and Multitask" if 3 < len(inner) < len(pairs) else ""
    agreement = f"Kendall's τ: {tau:z.2f} over {len(pairs)} rows{without}"
    return [f"Rank correlation of our A with the paper's: {spearman:z.2f}. {agreement}."]

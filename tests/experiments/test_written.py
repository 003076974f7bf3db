"""Figures of Table 1 in prose are those of its CSV."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from stella.experiments.recipe import load
from stella.experiments.results import Rows, spread

ROOT = Path(__file__).parents[2]
VARIANTS = load("table1").variants
CELLS = {"A": 2, "F": 3, "slow_A": 4, "slow_F": 5}


def results() -> dict[str, Rows]:
    found: dict[str, Rows] = defaultdict(list)
    with (ROOT / "results" / "table1" / "results.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            found[line["name"]].append(line)
    return found


def cells(line: str) -> list[str]:
    return [cell.strip(" *") for cell in line.strip("|\n").split("|")]


def written(rows: Rows, figure: str) -> str:
    """As the page writes it: F without its deviation."""
    found = spread(rows, figure)
    return (str(found) if figure.endswith("A") else f"{found.mean:.1f}".replace("-0.0", "0.0")) if found.values else "–"


@pytest.mark.parametrize(("order", "heading"), [("original", "## First order"), ("shuffled", "## Shuffled order")])
def test_the_page_has_every_row_of_the_results(order: str, heading: str) -> None:
    text = (ROOT / "results" / "table1" / "README.md").read_text(encoding="utf-8")
    table = text.split(heading)[1].split("\n\n")[0].splitlines()[3:]
    named = {name: rows for name, rows in results().items() if name.startswith(order)}
    shown = {cells(line)[0]: cells(line)[1:] for line in table}
    assert set(shown) == {VARIANTS[name.split("/")[1]].label for name in named}
    for name, rows in named.items():
        row = shown[VARIANTS[name.split("/")[1]].label]
        capacity = int(rows[0]["capacity"])
        assert row[:2] == [str(len(rows)), f"{capacity:,}" if capacity else "–"], name
        assert {figure: row[at] for figure, at in CELLS.items()} == {f: written(rows, f) for f in CELLS}, name


PLAIN = {"Finetune": "finetune", "ER": "er", "CLS-ER": "cls_er", "DER++": "derpp", "STELLA": "stella"}
PLAIN |= {"STELLA+": "stella_plus", "DER++ with unlimited memory": "derpp-unlimited"}
PLAIN |= {"Multitask (all tasks at once)": "multitask"}
CODED = {"ER with three past clips for each current one": "er-dct-3", "Chorus** (three too)": "chorus"}


def test_the_readme_has_the_same_figures() -> None:
    found = results()
    rows = {cells(line)[0]: cells(line)[1:] for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()}
    for label, name in PLAIN.items():
        plain, coded = found[f"original/{name}"], found.get(f"original/{name}-dct", [])
        expected = [written(plain, "A"), written(plain, "F")]
        expected += [written(coded, "A"), written(coded, "F")] if coded else ["", ""]
        assert rows[label] == expected, label
    for label, name in CODED.items():
        assert rows[label] == ["", "", *(written(found[f"original/{name}"], figure) for figure in "AF")], label

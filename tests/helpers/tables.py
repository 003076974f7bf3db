"""The tables under results/."""

import csv
import re
from collections import defaultdict
from pathlib import Path

from stella.experiments.results import Rows

ROOT = Path(__file__).parents[2]


def lines(file: str) -> Rows:
    with (ROOT / "results" / file).open(encoding="utf-8") as rows:
        return list(csv.DictReader(rows))


def grouped(file: str, *columns: str) -> dict[tuple[str, ...], Rows]:
    """The rows of a CSV by what they have in these columns."""
    found: dict[tuple[str, ...], Rows] = defaultdict(list)
    for line in lines(file):
        found[tuple(line[column] for column in columns)].append(line)
    return found


def results(table: str = "table1") -> dict[str, Rows]:
    """Its rows by ORDER/VARIANT."""
    return {name: rows for (name,), rows in grouped(f"{table}/results.csv", "name").items()}


def read(file: str) -> dict[str, Rows]:
    """The rows of a CSV by variant."""
    return {name.split("/")[-1]: rows for (name,), rows in grouped(file, "name").items()}


def cells(line: str) -> list[str]:
    return [cell.strip(" *") for cell in line.strip("|\n").split("|")]


def table(page: str, first: str) -> dict[str, list[str]]:
    """The rows of the table whose heading begins so, by their first cell."""
    text = (ROOT / "results" / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(text) if line.startswith(first)) + 2
    rows: dict[str, list[str]] = {}
    for line in text[start:]:
        if not line.startswith("|"):
            break
        rows[cells(line)[0]] = cells(line)[1:]
    return rows


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "").replace("−", "-")) for number in re.findall(r"−?\d[\d,]*(?:\.\d+)?", text)]

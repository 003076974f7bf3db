"""The tables under results/."""

import csv
from collections import defaultdict
from pathlib import Path

from stella.experiments.results import Rows

ROOT = Path(__file__).parents[2]


def results(table: str = "table1") -> dict[str, Rows]:
    """Its rows by ORDER/VARIANT."""
    found: dict[str, Rows] = defaultdict(list)
    with (ROOT / "results" / table / "results.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            found[line["name"]].append(line)
    return found

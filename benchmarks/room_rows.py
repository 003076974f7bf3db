"""Results of `room.py` as rows of a table's results.csv, added to those that are there.

    python benchmarks/room_rows.py OUT.jsonl results/table1/results.csv --commit 0123456789 --hardware "NVIDIA H200"

A run that is there already stays as it is: every run of a table is made once. Runs of a study that were evaluated on a
share of the patches, or on those that each rule selects, have a column for each.
"""

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any

from stella.files import write_text

FIGURES = ("A", "F", "slow_A", "slow_F")
ON_SOME = {"A_of": "A on {}", "slow_A_of": "slow_A on {}", "A_by": "A by {}"}  # patches: a share, what a rule selects


def row(result: dict[str, Any], commit: str, hardware: str) -> dict[str, str]:
    values = dict(each.split("=", 1) for each in result["set"])
    given = {figure: result.get(figure) for figure in FIGURES}
    given |= {column.format(at): a for of, column in ON_SOME.items() for at, a in result.get(of, {}).items()}
    figures = {name: "" if value is None else f"{value:.3f}".rstrip("0").rstrip(".") for name, value in given.items()}
    counts = {"capacity": str(result["capacity"]), "steps": str(result["steps"] - result["skipped"])}
    about = {"commit": commit, "hardware": hardware}
    return {"name": result["label"], "method": values["method"], "seed": values["seed"], **figures, **counts, **about}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--hardware", required=True)
    given = parser.parse_args()
    rows = list(csv.DictReader(given.table.open(encoding="utf-8"))) if given.table.exists() else []
    made = [row(json.loads(line), given.commit, given.hardware) for line in given.results.read_text().splitlines()]
    if not made:
        parser.error(f"{given.results} has no results")
    fields = list(made[0])
    if other := next((each for each in (*rows, *made) if list(each) != fields), None):
        parser.error(f"{given.table} or a result has other columns: {', '.join(other)}")
    every: dict[tuple[str, int], dict[str, str]] = {}
    for each in (*rows, *made):
        every.setdefault((each["name"], int(each["seed"])), each)
    text = io.StringIO()
    table = csv.DictWriter(text, fields, lineterminator="\n")
    table.writeheader()
    table.writerows(every[key] for key in sorted(every))
    given.table.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.table, text.getvalue())
    print(f"{len(every) - len(rows)} of {len(made)} runs are new; {given.table} has {len(every)}")


if __name__ == "__main__":
    main()

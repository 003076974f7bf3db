"""Results of `room.py` as rows of a table's results.csv, added to those that are there.

    python benchmarks/room_rows.py OUT.jsonl results/table1/results.csv --commit 0123456789 --hardware "NVIDIA H200"

A run that is there already stays as it is: every run of a table is made once.
"""

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any

from stella.files import write_text

FIELDS = ("name", "method", "seed", "A", "F", "slow_A", "slow_F", "capacity", "steps", "commit", "hardware")


def row(result: dict[str, Any], commit: str, hardware: str) -> dict[str, str]:
    values = dict(each.split("=", 1) for each in result["set"])
    given = {figure: result.get(figure) for figure in ("A", "F", "slow_A", "slow_F")}
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
    if rows and tuple(rows[0]) != FIELDS:
        parser.error(f"{given.table} has other columns: {', '.join(rows[0])}")
    made = [row(json.loads(line), given.commit, given.hardware) for line in given.results.read_text().splitlines()]
    every: dict[tuple[str, int], dict[str, str]] = {}
    for each in (*rows, *made):
        every.setdefault((each["name"], int(each["seed"])), each)
    text = io.StringIO()
    table = csv.DictWriter(text, FIELDS, lineterminator="\n")
    table.writeheader()
    table.writerows(every[key] for key in sorted(every))
    given.table.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.table, text.getvalue())
    print(f"{len(every) - len(rows)} of {len(made)} runs are new; {given.table} has {len(every)}")


if __name__ == "__main__":
    main()

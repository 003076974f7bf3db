"""Results of `benchmarks/room.py` become rows that `stella reproduce --from` reads; a run that is there stays."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stella.experiments.results import read_results

TOOL = Path(__file__).parents[2] / "benchmarks" / "room_rows.py"


def result(seed: int, a: float) -> str:
    values = ["method=multitask", f"seed={seed}", 'data.tasks=["task2","task1"]']
    figures = {"A": a, "F": None, "slow_A": 2.5, "slow_F": None}
    return json.dumps(
        {"label": "original/multitask", "set": values, "steps": 9, "skipped": 1, "capacity": 0, **figures}
    )


def joined(tmp_path: Path, *lines: str) -> str:
    (tmp_path / "out.jsonl").write_text("\n".join(lines))
    given = [str(tmp_path / "out.jsonl"), str(tmp_path / "results.csv"), "--commit", "c0ffee", "--hardware", "a GPU"]
    return subprocess.run([sys.executable, str(TOOL), *given], check=True, capture_output=True, text=True).stdout


def test_a_table_of_other_columns_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("name,seed,A,clips\na,1,2,3\n")
    with pytest.raises(subprocess.CalledProcessError) as error:
        joined(tmp_path, result(1, 2.0))
    assert "has other columns: name, seed, A, clips" in error.value.stderr
    assert (tmp_path / "results.csv").read_text() == "name,seed,A,clips\na,1,2,3\n"


def test_rows_are_added_once_and_in_order(tmp_path: Path) -> None:
    assert joined(tmp_path, result(10, 1.23456), result(10, 9.0)).startswith("1 of 2 runs are new")
    assert joined(tmp_path, result(2, 3.0), result(10, 7.0)).startswith("1 of 2 runs are new")
    found, _ = read_results(tmp_path / "results.csv", ["original/multitask"])
    rows = found["original/multitask"]
    assert [(row["seed"], row["A"], row["F"], row["slow_A"]) for row in rows] == [
        ("2", "3", "", "2.5"),
        ("10", "1.235", "", "2.5"),
    ]
    assert {(row["name"], row["method"], row["steps"], row["commit"]) for row in rows} == {
        ("original/multitask", "multitask", "8", "c0ffee")
    }

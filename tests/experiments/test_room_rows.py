"""Results of `benchmarks/room.py` become rows that `stella reproduce --from` reads; a run that is there stays."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from stella.experiments.results import read_results

TOOL = Path(__file__).parents[2] / "benchmarks" / "room_rows.py"


def result(seed: int, a: float, **more: dict[str, float]) -> str:
    values = ["method=multitask", f"seed={seed}", 'data.tasks=["task2","task1"]']
    figures = {"A": a, "F": None, "slow_A": 2.5, "slow_F": None}
    run = {"label": "original/multitask", "set": values, "steps": 9, "skipped": 1, "capacity": 0}
    return json.dumps({**run, **figures, **more})


def joined(tmp_path: Path, *lines: str) -> str:
    (tmp_path / "out.jsonl").write_text("\n".join(lines))
    given = [str(tmp_path / "out.jsonl"), str(tmp_path / "results.csv"), "--commit", "c0ffee", "--hardware", "a GPU"]
    return subprocess.run([sys.executable, str(TOOL), *given], check=True, capture_output=True, text=True).stdout


def test_a_table_of_other_columns_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("name,seed,A,clips\na,1,2,3\n")
    with pytest.raises(subprocess.CalledProcessError) as error:
        joined(tmp_path, result(1, 2.0))
    assert "other columns: name, seed, A, clips" in error.value.stderr
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


def test_runs_that_were_evaluated_on_some_patches_have_a_column_for_each(tmp_path: Path) -> None:
    on = {"A_of": {"0.5": 2.125}, "slow_A_of": {"0.5": 3.0}, "A_by": {"STELLA": 1.5, "no pruning": 1.75}}
    joined(tmp_path, result(1, 2.0, **on))
    [row] = csv.DictReader((tmp_path / "results.csv").open())
    found = row["A on 0.5"], row["slow_A on 0.5"], row["A by STELLA"], row["A by no pruning"]
    assert found == ("2.125", "3", "1.5", "1.75") and row["A"] == "2"
    with pytest.raises(subprocess.CalledProcessError):
        joined(tmp_path, result(2, 2.0))

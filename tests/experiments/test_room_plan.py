"""Plans for `benchmarks/room.py` have the runs of a reproduction, and only those that are still to be made."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stella.experiments import recipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def planned(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *given: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["room_plan.py", *given])
    importlib.import_module("room_plan").main()
    made: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return made


def test_a_plan_has_every_run_of_a_reproduction(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as the reproduction configures it, whatever is given for all of them."""
    values = ["train.lr=1e-3", "stream.batch_size=32", 'data.tasks=["task1","task4"]']
    runs = planned(capsys, monkeypatch, "table1", "--seeds", "2", *values)
    expected = {
        (key, seed): replace(config, seed=seed)
        for key, config in recipe.runs("table1", values).items()
        for seed in (0, 1)
    }
    assert len(runs) == len(expected) == 2 * 2 * len(recipe.load("table1").variants)
    for run in runs:
        found = recipe.run_config(run["recipe"], run["set"])
        config = expected[run["label"], found.seed]
        assert run["set"][0] == f"method={config.method}"
        assert found == config
    assert [run["label"] for run in runs[: len(runs) // 2]] == list(dict.fromkeys(run["label"] for run in runs))


def test_development_keeps_its_seeds_and_slow_weights_may_wait(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = planned(capsys, monkeypatch, "room", "--slow-at-the-end")
    assert {recipe.run_config(run["recipe"], run["set"]).seed for run in runs} == {100, 101, 102, 103, 104}
    assert {run["slow"] for run in runs} == {"end"}


def test_a_plan_may_have_some_rows_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    every = planned(capsys, monkeypatch, "table1")
    some = planned(capsys, monkeypatch, "table1", "--only", "esmer,esmer-dct")
    assert some == [run for run in every if run["set"][0] == "method=esmer"] and len(some) == 20
    with pytest.raises(SystemExit):
        planned(capsys, monkeypatch, "table1", "--only", "esmer,none")
    assert "table1 has no none" in capsys.readouterr().err


def test_runs_that_are_in_a_table_are_left_out(tmp_path: Path) -> None:
    room = importlib.import_module("room")
    plan = [{"label": label, "set": ["method=er", f"seed={seed}"]} for label in ("a", "b") for seed in (1, 10)]
    table = tmp_path / "results.csv"
    assert room.missing(plan, [table]) == plan  # not there yet
    table.write_text("name,method,seed\na,er,10\nb,er,1\n")
    assert room.missing(plan, [table]) == [plan[0], plan[3]]


def test_a_run_that_is_out_of_time_may_be_made_by_another_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = importlib.import_module("room")

    class Endless:
        def __init__(self, run: dict[str, Any], *_: object) -> None:
            self.run = run

        def tick(self) -> bool:
            assert len(list((tmp_path / "out.jsonl.claims").iterdir())) == 1
            return True

    monkeypatch.setattr(room, "Job", Endless)
    run = planned(capsys, monkeypatch, "table1", "--seeds", "1")[0]
    key = room.key_of(room.config_of(run))
    empty = torch.empty(0)
    worker = room.Worker([run], {key: ((empty, empty), (empty, empty))}, tmp_path / "out.jsonl", 0.2, None)
    worker.work(1)
    assert len(worker.jobs) == 1 and not list((tmp_path / "out.jsonl.claims").iterdir())


def test_a_run_of_a_plan_has_the_figures_of_pretrain() -> None:
    """Tables are made of such runs. Two tasks in another order than they are numbered, slow weights too."""
    importlib.import_module("room").check([["er", 'data.tasks=["task4","task1"]']])

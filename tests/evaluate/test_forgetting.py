"""A and F against the paper's formulas, written out."""

from typing import Any

import numpy as np
import pytest

from stella.evaluate.forgetting import (
    accuracy,
    average_accuracy,
    average_forgetting,
    mean_accuracy,
    summary,
)

ACC = np.array([[50.0, 1.0, 0.0], [30.0, 60.0, 2.0], [20.0, 40.0, 70.0]])


def evaluations(rng: np.random.Generator, tasks: int, rows: int) -> list[dict[str, Any]]:
    """One before the first task and `rows` after, in a shuffled order."""
    lines = [
        {
            "task": task,
            "recall": {d: {k: rng.uniform(0, 100, tasks).tolist() for k in ("1", "5", "10")} for d in ("a2v", "v2a")},
        }
        for task in range(-1, rows)
    ]
    return [lines[i] for i in rng.permutation(len(lines))]


def test_a_small_case_by_hand() -> None:
    assert average_accuracy(ACC) == pytest.approx((20 + 40 + 70) / 3)
    assert average_forgetting(ACC) == pytest.approx(((50 - 20) + (60 - 40)) / 2)


def test_the_best_accuracy_may_be_from_before_a_task_was_learnt() -> None:
    acc = np.array([[50.0, 60.0, 0.0], [50.0, 50.0, 0.0], [50.0, 50.0, 50.0]])
    assert average_forgetting(acc) == ((50 - 50) + (60 - 50)) / 2


def test_forgetting_is_negative_where_later_tasks_help() -> None:
    assert average_forgetting(np.array([[10.0, 0.0], [30.0, 50.0]])) == -20


def test_forgetting_is_not_defined_for_one_task_or_without_an_evaluation_after_each() -> None:
    assert average_forgetting(np.array([[10.0]])) is None
    assert average_forgetting(ACC[-1:]) is None
    assert average_forgetting(ACC[:2]) is None


def test_summary_follows_the_formulas_in_loops() -> None:
    rng = np.random.default_rng(0)
    tasks = 5
    lines = evaluations(rng, tasks, tasks)
    by_task = {line["task"]: line for line in lines}
    expected: dict[str, list[float]] = {"A": [], "F": []}
    table = summary(lines)
    for direction in ("a2v", "v2a"):
        for k in ("1", "5", "10"):
            acc = [by_task[t]["recall"][direction][k] for t in range(tasks)]
            a = sum(acc[tasks - 1][i] for i in range(tasks)) / tasks
            f = sum(max(acc[t][i] - acc[tasks - 1][i] for t in range(tasks - 1)) for i in range(tasks - 1))
            f /= tasks - 1
            expected["A"].append(a)
            expected["F"].append(f)
            assert table[direction][k] == {"A": pytest.approx(a), "F": pytest.approx(f)}
            assert accuracy(lines, direction, k).tolist() == acc
        assert table[direction]["F"] == pytest.approx(np.mean(expected["F"][-3:]))
    assert table["A"] == pytest.approx(np.mean(expected["A"]))
    assert table["F"] == pytest.approx(np.mean(expected["F"]))
    assert mean_accuracy(lines)[-1].mean() == pytest.approx(table["A"])


def test_a_run_of_one_shuffled_task_has_an_average_and_no_forgetting() -> None:
    lines = evaluations(np.random.default_rng(1), tasks=4, rows=1)
    table = summary(lines)
    assert table["F"] is None and table["a2v"]["F"] is None and table["a2v"]["1"]["F"] is None
    assert table["A"] == pytest.approx(mean_accuracy(lines).mean())


def test_what_comes_before_the_first_task_counts_for_nothing() -> None:
    rng = np.random.default_rng(2)
    lines = evaluations(rng, 3, 3)
    without = [line for line in lines if line["task"] >= 0]
    assert summary(lines) == summary(without)
    assert summary([line for line in lines if line["task"] < 0]) == {"A": None, "F": None}
    assert summary([]) == {"A": None, "F": None}

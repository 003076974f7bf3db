"""Lines of results: what they take from a run's evaluations."""

from typing import Any

import pytest

from stella.experiments.recipe import load
from stella.experiments.results import _gap, _matching
from stella.experiments.tables import speed_sheet

EVALUATIONS: list[dict[str, Any]] = [
    {"task": -1, "modality_gap": [9.0, 9.0], "avm_accuracy": 50.0, "importance_ratio": [7.0, None]},
    {"task": 0, "modality_gap": [0.6, 0.4], "avm_accuracy": 60.0, "importance_ratio": [5.0, 4.0]},
    {"task": 1, "modality_gap": [0.5, 0.2], "avm_accuracy": 70.0, "avm_accuracy_by_task": [65.0, 75.0]},
]


def test_the_gap_is_that_after_each_task_and_not_before_the_first() -> None:
    found = _gap(EVALUATIONS)
    assert found["gaps"] == "0.5000 0.3500" and found["gap"] == pytest.approx(0.35)
    assert _gap([]) == {"gap": None, "gap_decline": None, "gaps": ""}


def test_matching_is_that_of_the_end_and_the_least_ratio_of_any_moment() -> None:
    expected = {"avm_accuracy": 70.0, "avm_accuracy_last_task": 75.0, "least_importance_ratio": 4.0}
    assert _matching(EVALUATIONS) == expected


def test_speed_is_told_relative_to_the_first_variant() -> None:
    recipe = load("efficiency")
    first, second, *_ = recipe.variants
    about = {"hardware": "H", "model": "tiny", "clips": "scenes", "precision": "float32"}
    speeds = {first: (200.0, 4.0), second: (100.0, 6.0)}
    found: dict[str, list[dict[str, Any]]] = {f"original/{name}": [] for name in recipe.variants}
    for name, (speed, peak) in speeds.items():
        found[f"original/{name}"] = [{"clips_per_second": speed, "peak_gib": peak, **about}]
    rows = {row[0]: row[1:5] for row in speed_sheet(recipe, "original", found).rows}
    assert rows[recipe.variants[first].label] == ["200.00", "1.00", "4.29", "1.00"]
    assert rows[recipe.variants[second].label] == ["100.00", "0.50", "6.44", "1.50"]

from pathlib import Path

import pytest
from helpers import kill
from helpers.dying import killed
from helpers.kill import PLACES


@pytest.mark.parametrize("moments", [len(PLACES), pytest.param(24, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_ends_as_if_it_had_not_been(moments: int, tmp_path: Path) -> None:
    results = killed(kill, tmp_path, moments, 1)
    assert len(results) == moments
    assert all(any(place in result["where"] for result in results) for place in PLACES)
    assert all(result["same"] for result in results), results
    assert sum(result["killed"] for result in results) >= 0.75 * moments, results

from pathlib import Path

import pytest
from helpers import kill_index
from helpers.dying import killed


@pytest.mark.parametrize("moments", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_an_index_killed_at_any_moment_ends_as_one_that_was_not(moments: int, tmp_path: Path) -> None:
    results = killed(kill_index, tmp_path, moments, 1)
    assert len(results) == moments and all(result["same"] for result in results), results
    assert sum(result["killed"] for result in results) >= 0.6 * moments, results

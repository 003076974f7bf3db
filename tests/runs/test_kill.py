import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import kill
from helpers.kill import PLACES

KILL = Path(kill.__file__)


@pytest.mark.parametrize("moments", [7, pytest.param(24, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_ends_as_if_it_had_not_been(moments: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(KILL), str(tmp_path), str(moments), "1"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == moments
    assert all(any(place in result["where"] for result in results) for place in PLACES)
    assert all(result["same"] for result in results), results
    assert sum(result["killed"] for result in results) >= 0.75 * moments, results

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import kill_index


@pytest.mark.parametrize("moments", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_an_index_killed_at_any_moment_ends_as_one_that_was_not(moments: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, kill_index.__file__, str(tmp_path), str(moments), "1"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == moments and all(result["same"] for result in results), results
    assert sum(result["killed"] for result in results) >= 0.6 * moments, results

"""Files embedded by a cluster: the vectors of one machine."""

from pathlib import Path

import numpy as np
import pytest
from helpers.in_turn import InTurn
from helpers.media_files import write_video
from typer.testing import CliRunner

from stella.cli import app
from stella.data import cluster
from stella.embed import cluster as spread


def test_a_cluster_gives_the_vectors_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = InTurn()
    for module in (cluster, spread):
        monkeypatch.setattr(module, "require", lambda name, extra: ray)
    monkeypatch.setattr(spread, "FILES", 2)
    for n in range(2):
        write_video(tmp_path / "in" / f"{n}.mp4", 1.0, seed=n)
    (tmp_path / "in" / "1b.mp4").write_text("hello")
    told = []
    for name, more in (("one", []), ("many", ["--ray", "x"])):
        out = tmp_path / f"{name}.npz"
        done = CliRunner().invoke(
            app, ["embed", str(tmp_path / "in"), "--out", str(out), "--model", "base-tiny", *more]
        )
        assert done.exit_code == 1, done.output  # one is skipped
        told.append("".join(done.output.split()).partition(".npz")[2])
    one, many = (np.load(tmp_path / f"{name}.npz") for name in ("one", "many"))
    assert told[0] == told[1] and set(one.files) == set(many.files) and len(one["files"]) == 2
    assert all(np.array_equal(one[key], many[key]) for key in one.files)

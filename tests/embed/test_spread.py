"""Files embedded by a cluster: the vectors of one machine."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.in_turn import InTurn
from helpers.media_files import write_video
from helpers.rays import kill_one, ray_of
from typer.testing import CliRunner

from stella.cli import app
from stella.data import cluster
from stella.embed import cluster as spread
from stella.embed.load import load
from stella.embed.vectors import Both, embed_each
from stella.errors import ClipError


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


def test_a_device_is_none_of_a_cluster() -> None:
    done = CliRunner().invoke(app, ["embed", "a.mp4", "--ray", "x", "--device", "cpu"])
    assert done.exit_code != 0 and "leave it out with --ray" in " ".join(str(done.exception or done.output).split())


def equal(one: Both | ClipError, other: Both | ClipError) -> bool:
    if isinstance(one, ClipError) or isinstance(other, ClipError):
        return str(one) == str(other)
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return len(pairs) == 2 and all(
        torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in ("vectors", "start", "end")
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", [False, True])
def test_ray_gives_the_vectors_of_one_machine(killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers; with `killed` one of them is, and its files are embedded again."""
    monkeypatch.setattr(spread, "FILES", 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    files = [write_video(tmp_path / f"{n:02d}.mp4", 20.0 if killed else 1.0, seed=n) for n in range(12)]
    files[5].write_text("hello")
    expected = list(embed_each(load("base-tiny"), files))
    with ray_of(tmp_path):
        thread = threading.Thread(target=kill_one, args=("embed_all", tmp_path))
        if killed:
            thread.start()
        found = list(spread.embed_on_ray("local", "base-tiny", files, 2))
        if killed:
            thread.join()
    assert [file for file, _ in found] == files
    assert all(equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))
    assert isinstance(found[5][1], ClipError)

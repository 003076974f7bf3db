"""The command line as a person meets it: what it writes, and how it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stella.cli import app
from stella.data.scenes import Scenes
from stella.data.scenes.export import export
from stella.media.decode import probe
from stella.model.cav import CAV, preset
from stella.model.weights import save

run = CliRunner()


def stella(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from stella.cli import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


def test_help_names_every_command() -> None:
    shown = run.invoke(app, ["--help"]).output
    assert all(name in shown for name in ("scenes", "prepare", "look", "weights"))
    assert all(name in run.invoke(app, ["scenes", "--help"]).output for name in ("preview", "audit", "render"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["scenes", "preview", "--task", "task9"], "task9"),
        (["scenes", "audit", "--size", "vast"], "choose one of scenes"),
        (["look", "nowhere"], "is not a folder"),
        (["prepare", "nowhere", "out"], "is not a folder"),
        (["weights", "none.safetensors"], "none.safetensors"),
    ],
)
def test_an_error_is_one_sentence_and_status_2(args: list[str], said: str, tmp_path: Path) -> None:
    done = stella(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_brackets_in_a_path_are_shown_as_they_are(tmp_path: Path) -> None:
    assert "[red]lost[/]" in stella("look", "[red]lost[/]", cwd=tmp_path).stderr


def test_preview_writes_a_sheet_and_a_film(tmp_path: Path) -> None:
    result = run.invoke(app, ["scenes", "preview", "--out", str(tmp_path), "--clips", "2"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "scenes-task1.png").read_bytes().startswith(b"\x89PNG")
    assert probe(tmp_path / "scenes-task1.mp4").duration == pytest.approx(2 * 2.56, abs=0.1)


def test_audit_prints_every_gallery() -> None:
    shown = run.invoke(app, ["scenes", "audit", "--clips", "24"]).output
    assert all(word in shown for word in ("task1", "task6", "mixed", "timing", "everything"))


def test_own_videos_end_to_end(tmp_path: Path) -> None:
    """Render files, look at them, prepare them, look at the shards: a broken file is named, not fatal."""
    videos, shards = tmp_path / "videos", tmp_path / "shards"
    assert run.invoke(app, ["scenes", "render", str(videos), "--clips", "3"]).exit_code == 0
    (videos / "broken.mp4").write_text("not a video")
    looked = run.invoke(app, ["look", str(videos), "--out", str(tmp_path / "a.png")])
    assert looked.exit_code == 0 and "broken.mp4" in looked.output and (tmp_path / "a.png").exists()
    done = run.invoke(app, ["prepare", str(videos), str(shards), "--seconds", "2.56", "--workers", "1"])
    assert done.exit_code == 0 and "3 clips" in done.output and "1 not a media file" in done.output
    looked = run.invoke(app, ["look", str(shards), "--out", str(tmp_path / "b.png")])
    assert looked.exit_code == 0 and "3 of 3" in looked.output


def test_rendering_again_adds_nothing(tmp_path: Path) -> None:
    scenes = Scenes("task1", "train", 1)
    first = [path.stat().st_mtime_ns for path in export(scenes, tmp_path)]
    assert [path.stat().st_mtime_ns for path in export(scenes, tmp_path)] == first


def test_weights_tells_what_a_file_is(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", CAV(preset("tiny")), extra={"recipe": "none", "scores": {"A": 1.5}})
    shown = run.invoke(app, ["weights", str(tmp_path / "m.safetensors")]).output
    assert "1,0" in shown and "recipe" in shown and "96" in shown

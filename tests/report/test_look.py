"""`stella look`: what is odd about clips is told, from folders, shards, arrays and single files, under any name."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers.media_files import tone, write, write_video
from typer.testing import CliRunner

from stella.cli import app
from stella.data import workers as pool
from stella.data.pack import pack
from stella.data.prepare import prepare
from stella.errors import plain
from stella.report import fonts, look, sheet

STRANGE = "会议 встреча नमस्ते $x_1$ \x1b[31m\n\udcff.mp4"


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    write_video(root / "talk.mp4", 1.0)
    write(root / "dull.mp4", [np.full((48, 64, 3), 90, np.uint8)] * 25, np.zeros((1, 16000), np.float32))
    write_video(root / "plain.mp4", 1.0).rename(root / STRANGE)
    moving = [np.full((48, 64, 3), i, np.uint8) for i in range(64)]
    write(root / "meeting.mp4", moving, tone(32, 16000), fps=2, options={"g": "4"})
    (root / "zero.mp4").write_text("not a video")
    return root


def seen(source: Path, clips: int = 8) -> tuple[list[str], str]:
    """The titles of the sheet, and what is told."""
    opened = look.open_any(source, clips)
    found = [each for each in look.look(opened, clips) if isinstance(each, look.Seen)]
    return [plain(each.title) for each in found], "\n".join(look.told(found, opened))


def test_silence_still_pictures_long_files_and_bad_ones_are_told(videos: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "a.png"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Glyph")  # of fonts that lack a letter
        done = CliRunner().invoke(app, ["look", str(videos), "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "1 of 4 silent: dull.mp4" in done.output and "1 of 4 still picture: dull.mp4" in done.output
    assert "longer than the 10.24 s of a clip: 1 of 4 files (meeting.mp4: 32 s); stella prepare --split" in done.output
    assert "skipped" in done.output and "4 of 5 clips shown; skipped: 1 not a media file" in done.output
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_sheet_says_what_it_is_of(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(sheet, "save", lambda figure, path: drawn.append(figure.get_suptitle()))
    for place, what in ((videos, f"folder {videos.name}: 4 of 5"), (videos / "meeting.mp4", "meeting.mp4: 3 of 3")):
        done = CliRunner().invoke(app, ["look", str(place), "--out", str(tmp_path / "a.png")])
        assert done.exit_code == 0 and drawn[-1] == f"{what} clips shown", done.output


def test_names_and_lengths_stand_in_the_sheet(videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles, _ = seen(videos)
    assert titles[:3] == ["dull.mp4 · 1.0 s · silent · still picture", "meeting.mp4 · 32.0 s", "talk.mp4 · 1.0 s"]
    assert titles[3] == r"会议 встреча नमस्ते $x_1$ \x1b[31m\n\udcff.mp4 · 1.0 s"
    only = {"DejaVu Sans": fonts._fonts()["DejaVu Sans"]}  # ships with matplotlib
    monkeypatch.setattr(fonts, "_fonts", lambda: only)
    fonts.family_of.cache_clear()
    assert fonts.drawable(titles[3]).startswith(r"\u4f1a\u8bae встреча \u0928\u092e")
    assert fonts.families(fonts.drawable(titles[3])) == ["DejaVu Sans"]
    fonts.family_of.cache_clear()


def test_one_file_is_shown_in_pieces(videos: Path) -> None:
    titles, told = seen(videos / "meeting.mp4", 2)
    assert titles == ["meeting.mp4@0.000 · 32.0 s", "meeting.mp4@10.240 · 32.0 s"] and "a clip: 1 of 1 file (" in told
    first, second = (look.open_any(videos / "meeting.mp4", 2)[i].video.float().mean() for i in (0, 1))
    assert second - first == pytest.approx(20.5, abs=3)
    assert seen(videos / "talk.mp4") == (["talk.mp4 · 1.0 s"], "")


def test_shards_and_arrays_are_looked_at(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_METHOD", "fork")
    prepare(videos, tmp_path / "shards", seconds=1.0, size=48, workers=1, progress=False)
    pack(look.open_any(videos, 1), tmp_path / "packed", pixels=16, spec_frames=96, workers=0, progress=False)
    for folder in ("shards", "packed"):
        titles, told = seen(tmp_path / folder)
        assert len(titles) == 4 and "1 of 4 silent: dull.mp4" in told and "--split" not in told

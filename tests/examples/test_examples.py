"""Each example is short and does what its first lines say."""

import runpy
import sys
from pathlib import Path

import pytest
from helpers.media_files import tone, write, write_video

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_examples_are_short() -> None:
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES.glob("*.py"))


def test_a_folder_is_embedded_and_a_sound_finds_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        write_video(tmp_path / "videos" / f"{number}.mp4", 3.0, seed=number)
    (tmp_path / "videos" / "notes.txt").write_text("no video")
    sound = write(tmp_path / "sound.wav", None, tone(2.0, 16000), audio_codec="pcm_s16le")
    monkeypatch.setattr(sys, "argv", ["embed_folder.py", str(tmp_path / "videos"), str(sound), "base-tiny"])
    runpy.run_path(str(EXAMPLES / "embed_folder.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "notes.txt: not a media file" in lines[0]
    assert len(lines) == 5 and all(".mp4 at " in line for line in lines[1:])
    assert [float(line.split()[0]) for line in lines[1:]] == sorted(
        (float(x.split()[0]) for x in lines[1:]), reverse=True
    )

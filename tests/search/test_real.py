"""With a real model and real files: what is found is what `stella.load` embeds."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers.indexes import content
from helpers.media_files import CLIPS, level_frame, tone, write

import stella
from stella.data.scenes import Scenes
from stella.data.scenes.export import export
from stella.data.shards import sample
from stella.data.writer import ShardWriter
from stella.errors import ClipError, StellaError
from stella.media.decode import Plan, decode, decode_track, read_cut
from stella.media.encode import encode

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_folder.py"


@pytest.fixture(scope="module")
def model() -> "stella.Model":
    return stella.load("base-tiny", device="cpu")


def test_the_example_finds_a_sound_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: "stella.Model"
) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    first, *_ = export(Scenes("task1", "eval", 3), tmp_path / "videos")
    monkeypatch.setattr(sys, "argv", ["search_folder.py", str(tmp_path / "videos"), str(first), "base-tiny"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown = capsys.readouterr().out
    assert "3 added" in shown and first.name in shown and "alike" in shown
    index = stella.Index(f"{tmp_path / 'videos'}.index")
    found = index.search(first, 3, by="audio", model=model)
    for hit in found.hits:
        score = float(model.embed_video(hit.file).vectors[0] @ model.embed_audio(first).vectors[0])
        assert hit.score == pytest.approx(score, abs=2e-3)


def test_shipped_weights_find_smaller_copies_of_real_videos(tmp_path: Path) -> None:
    model, right = stella.load("base-small", device="cpu"), {"video": 0, "audio": 0}
    index = stella.Index(tmp_path / "index")
    index.update(CLIPS, model=model)
    clips = sorted(CLIPS.glob("*.mpg"))
    for clip in clips:
        frames, waveform = read_cut(clip, 0.0, 2.96, 12.5, 160)  # half the rate, encoded again
        encode(tmp_path / "copy.mp4", frames, waveform, 12.5)
        for modality in right:
            hit = index.search(tmp_path / "copy.mp4", 1, by=modality, to=modality, model=model).hits[0]
            right[modality] += hit.path == clip.name
    assert right["video"] == len(clips) == 10 and right["audio"] >= 7  # 8 here


def test_shards_are_indexed_by_the_times_of_their_videos(tmp_path: Path, model: "stella.Model") -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    writer = ShardWriter(shards)
    writer.turn("shard-000000")
    for name in ("bbaf2n.mpg", "lbax4n.mpg"):
        frames, waveform = read_cut(CLIPS / name, 0.0, 2.56, 8.0, 128)
        meta = {"id": f"{name}@5.120", "source": name, "start": 5.12, "duration": 2.56, "label": "people", "task": None}
        writer.append(sample(meta, frames, waveform, 8.0))
    writer.close()
    index = stella.Index(tmp_path / "index")
    assert index.update(shards, model=model).counts.added == 2
    rows = content(index.path)
    assert {row[3:5] for row in rows} == {(5.12, 5.12 + 2.56)} and len(rows) == 4
    assert index.update(model=model).counts.added == 0 and content(index.path) == rows
    hit = index.search(CLIPS / "lbax4n.mpg", 1, to="video", model=model).hits[0]
    assert (hit.path, hit.label) == ("lbax4n.mpg@5.120", "people") and hit.score > 0.9


@pytest.mark.parametrize("start", [0.0, 7.5])
def test_one_track_is_decoded_as_both_are(tmp_path: Path, start: float) -> None:
    frames = [level_frame(20 * (i // 8)) for i in range(96)]
    both = write(tmp_path / "both.mp4", frames, tone(12, 16_000), fps=8)
    plan = Plan(start=start, duration=2.0, frames=3, size=32, span=None)
    clip = decode(both, plan)
    assert torch.equal(decode_track(both, plan, "video"), clip.video)
    assert torch.equal(decode_track(both, plan, "audio"), clip.audio)
    mute = write(tmp_path / "mute.mp4", frames, None, fps=8)
    assert torch.equal(decode_track(mute, plan, "video"), clip.video)
    with pytest.raises(ClipError, match="no audio track"):
        decode_track(mute, plan, "audio")
    sound = write(tmp_path / "sound.flac", None, tone(12, 16_000), audio_codec="flac")
    heard = decode_track(sound, plan, "audio")
    assert torch.allclose(
        heard, torch.from_numpy(tone(12, 16_000)[0])[round(16_000 * start) :][: len(heard)], atol=1e-4
    )
    assert len(heard) == 32_000


def test_a_moment_is_the_window_around_it(tmp_path: Path, model: "stella.Model") -> None:
    frames = [level_frame(2 * i) for i in range(96)]
    path = write(tmp_path / "a.mp4", frames, tone(12, 16_000), fps=8)
    for kind, whole in (("video", model.embed_video(path)), ("audio", model.embed_audio(path))):
        middle = float(whole.start[2] + whole.end[2]) / 2
        found = model.embed_moment(path, middle, kind)
        assert float(found.start[0]) == pytest.approx(float(whole.start[2])) and len(found) == 1
        assert float(found.vectors[0] @ whole.vectors[2]) > 0.9999
        last = model.embed_moment(path, 12.0, kind)
        assert float(last.end[0]) == pytest.approx(12, abs=0.1) and model.embed_moment(path, 0, kind).start[0] == 0
    with pytest.raises(StellaError, match=r"a.mp4@13 is beyond the end of the file, at 12.0\d s"):
        model.embed_moment(path, 13, "audio")

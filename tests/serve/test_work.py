"""What is made of moments: tracks of different lengths, and shards that change while a worker runs."""

import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from helpers.disk import fill, own_disk
from helpers.media_files import level_frame, tone, write

import stella
from stella.data.prepare import prepare
from stella.errors import BeyondEndError, StellaError
from stella.media.codecs import decode_jpegs
from stella.search.sources import ShardClips
from stella.serve import work as jobs
from stella.serve.versions import Weights
from stella.serve.work import Clip, Embed, Heat, Picture, Refusal, work

UNKNOWN = (0, 0)  # of a file, whose stamp the server compares


def levels(clip: bytes) -> list[float]:
    """The grey level of each picture of an mp4."""
    with av.open(io.BytesIO(clip)) as file:
        return [float(frame.to_ndarray(format="gray").mean()) for frame in file.decode(video=0)]


def samples(clip: bytes) -> np.ndarray:
    with av.open(io.BytesIO(clip)) as file:
        return np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])


@pytest.mark.parametrize("kind", ["mp4", "mkv"])  # mkv states no lengths of tracks
def test_where_a_track_has_ended_the_moment_has_the_other_one(tmp_path: Path, kind: str) -> None:
    frames = [level_frame(20 + 4 * i) for i in range(50)]  # 2 s
    write(tmp_path / f"seen.{kind}", frames, tone(0.8, 16_000))
    write(tmp_path / f"heard.{kind}", frames[:20], tone(2, 16_000))
    seen = Clip(None, tmp_path, f"seen.{kind}", 1.0, 2.0, UNKNOWN).do(None)
    assert len(levels(seen)) == 15 and np.abs(samples(seen)).max() < 1e-3
    assert Clip(None, tmp_path, f"heard.{kind}", 1.0, 2.0, UNKNOWN).do(None).startswith(b"fLaC")
    picture = decode_jpegs([Picture(None, tmp_path, f"heard.{kind}", 1.0, 2.0, UNKNOWN).do(None)])
    assert picture.float().std() > 10  # a spectrogram
    assert len(samples(Clip(None, tmp_path, f"seen.{kind}", 0.6, 1.6, UNKNOWN).do(None))) < 8_000


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_a_video_that_ends_inside_the_moment_keeps_its_pace(tmp_path: Path, kind: str) -> None:
    write(tmp_path / f"a.{kind}", [level_frame(20 + 4 * i) for i in range(25)], tone(3, 16_000))
    clip = Clip(None, tmp_path, f"a.{kind}", 0.6, 2.6, UNKNOWN).do(None)
    found, rate = levels(clip), 15
    assert len(found) == 6 and len(samples(clip)) >= 31_000
    assert found == pytest.approx([20 + 4 * int((0.6 + i / rate) * 25 + 1e-6) for i in range(6)], abs=3)


def test_a_heat_map_begins_with_a_picture_that_begins_late(tmp_path: Path) -> None:
    """The sound is there from 0 s on."""
    model, times = stella.load("base-tiny", "cpu"), [2 + i / 25 for i in range(25)]
    path = write(tmp_path / "late.mp4", [level_frame(20 + 4 * i) for i in range(25)], tone(3, 16_000), times=times)
    heat = json.loads(Heat(None, tmp_path, "late.mp4", 0.0, 2.56, UNKNOWN).do(model))
    assert heat["times"] == pytest.approx([2.07, 2.21, 2.35, 2.49], abs=0.01)
    assert heat["times"] == pytest.approx(model.localise(path).times[0].tolist(), abs=1e-3)


def test_clips_that_come_into_shards_are_shown_without_a_restart(tmp_path: Path) -> None:
    source, shards = tmp_path / "source", tmp_path / "shards"
    source.mkdir()
    known: dict[str, Any] = {}
    for name, level in (("b", 60), ("a", 180)):  # the later one comes first
        write(source / f"{name}.mp4", [level_frame(level)] * 25, tone(1, 16_000))
        prepare(source, shards, seconds=1, workers=1, progress=False)
        for item in ShardClips(shards).items():
            job = Picture(None, shards, item.path, 0.0, 0.5, (item.size, item.mtime))
            known[item.path] = work(job, lambda _: None)
    assert all(isinstance(data, bytes) for data in known.values())
    shown = {path: float(decode_jpegs([data]).float().mean()) for path, data in known.items()}
    assert shown == pytest.approx({"a.mp4": 180, "b.mp4": 60}, abs=3)
    stamp = ShardClips(shards).stamp("a.mp4")
    for shard in shards.glob("shard-*.tar"):
        os.utime(shard, (1, 1))
    for path, words in (("c.mp4", "missing clip; "), ("a.mp4", "changed since it was indexed; ")):
        refused = work(Picture(None, shards, path, 0.0, 0.5, stamp), lambda _: None)
        assert isinstance(refused, Refusal) and refused.sentence.startswith(words)


def test_only_a_moment_beyond_the_end_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is wrong is for the one who runs the server."""

    def asked(error: StellaError) -> Refusal:
        def embed_query(*_: object) -> None:
            raise error

        monkeypatch.setattr(jobs, "embed_query", embed_query)
        monkeypatch.setattr(jobs, "_model", lambda weights: object())
        refusal = work(Embed(Weights("base-tiny", ""), "a.mp4", None, 3.0), lambda _: None)
        assert isinstance(refusal, Refusal)
        return refusal

    assert asked(BeyondEndError("a.mp4@3 is beyond")).sentence.startswith("there is no second 3 in it")
    missing = asked(StellaError("PyAV is missing"))
    assert missing.log == "PyAV is missing" and "its log says why" in missing.sentence and missing.status == 500


def test_a_full_disk_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as a file that cannot be used."""
    write(tmp_path / "a.mp4", [level_frame(i) for i in range(50)], tone(2, 16_000))
    job = Clip(None, tmp_path, "a.mp4", 0.0, 2.0, UNKNOWN)
    with own_disk(tmp_path / "disk") as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        full = fill(disk)
        for room in (0, 2_000):
            os.truncate(full, full.stat().st_size - room)
            refused = work(job, lambda _: None)
            assert isinstance(refused, Refusal) and (refused.status, refused.retry) == (507, 30), refused
            assert "no room" in refused.sentence and str(tmp_path) not in refused.sentence
        full.unlink()
        assert isinstance(work(job, lambda _: None), bytes)

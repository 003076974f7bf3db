"""Bad files in a stream: each is skipped, counted by its reason and listed; the good ones all arrive."""

import json
from pathlib import Path

import numpy as np
import torch
from helpers.media_files import level_frame, tone, write

from stella.data.folder import Folder
from stella.data.skipped import Skipped
from stella.data.stream import Stream, StreamConfig
from stella.media.decode import Plan

RNG = np.random.default_rng(0)


def picture() -> np.ndarray:
    return RNG.integers(0, 255, (48, 64, 3), dtype=np.uint8)


def test_real_bad_files_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    videos.mkdir()
    for i in range(9):
        write(videos / f"good{i}.mp4", [picture() for _ in range(25)], tone(1.0, 16_000, hertz=200 + 50 * i))
    write(videos / "mute.mp4", [level_frame(9)] * 25, None)
    write(videos / "blind.mp4", None, tone(1.0, 16_000))
    (videos / "empty.mp4").touch()
    (videos / "text.mp4").write_text("this is no video")
    (videos / "lost.mp4").symlink_to(tmp_path / "nowhere.mp4")
    cut = (videos / "good0.mp4").read_bytes()
    (videos / "cut.mp4").write_bytes(cut[: len(cut) // 3])
    skipped = Skipped(tmp_path / "skipped.jsonl")
    folder = Folder(videos, Plan(duration=1.0, frames=2, size=40, span=None))
    config = StreamConfig(batch_size=4, size=32, spec_frames=64, most_bad=0.5)
    batches = list(Stream([("all", folder)], config, skipped=skipped))
    seen = torch.cat([batch.ids for batch in batches]).tolist()
    assert sorted(folder.files[i] for i in seen) == [f"good{i}.mp4" for i in range(9)]
    assert [len(batch) for batch in batches] == [4, 4, 1]  # a skipped clip shortens no batch but the last
    listed = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    reasons = {Path(record["path"]).name: record["reason"] for record in listed}
    assert reasons.keys() == {"mute.mp4", "blind.mp4", "empty.mp4", "text.mp4", "lost.mp4", "cut.mp4"}
    assert reasons["mute.mp4"] == "no audio track" and reasons["blind.mp4"] == "no video track"
    assert reasons["empty.mp4"] == "empty file" and reasons["text.mp4"] == "not a media file"
    assert reasons["lost.mp4"] == "broken link" and sum(skipped.counts.values()) == 6
    for batch in batches:  # nothing became a constant in silence
        assert (batch.video.float().flatten(1).std(1) > 1).all() and (batch.audio.flatten(1).std(1) > 0.1).all()

"""Every kind of bad file is decoded correctly or is one clear `ClipError`; nothing becomes a constant in silence."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from helpers.media_files import level_frame, tone, write

from stella.errors import ClipError, MissingExtraError
from stella.media.decode import Plan, decode, read_duration
from stella.media.encode import encode

PLAN = Plan(0, 2.0, 4, 48, None)


def refused(path: Path, plan: Plan = PLAN, **options: float) -> ClipError:
    with pytest.raises(ClipError) as caught:
        decode(path, plan, **options)
    error = caught.value
    assert str(path) in str(error) and error.reason in str(error) and error.remedy
    assert "\n" not in str(error)
    assert pickle.loads(pickle.dumps(error)).reason == error.reason  # travels from loader workers
    return error


def moving(count: int = 50) -> list[np.ndarray]:
    return [level_frame(20 + 3 * i) for i in range(count)]


def whole(path: Path) -> Path:
    return write(path, moving(), tone(2, 16000))


def playlist(path: Path) -> None:
    """It opens nothing else."""
    path.write_text(f"ffconcat version 1.0\nfile {whole(path.with_name('real.mp4')).name}\n")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: write(path, moving(), None), "no audio track"),
        (lambda path: write(path, None, tone(2, 16000)), "no video track"),
        (Path.touch, "empty file"),
        (lambda path: path.write_text("This video is no longer available.\n" * 100), "not a media file"),
        (playlist, "not a media file"),
        (lambda path: None, "missing file"),
        (lambda path: path.symlink_to(path.with_name("gone.mp4")), "broken link"),
        (lambda path: path.symlink_to(path), "unreadable file"),
        (os.mkfifo, "not a regular file"),  # and does not wait for a writer
        (Path.mkdir, "not a regular file"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(tmp_path: Path, make: Callable[[Path], object], reason: str) -> None:
    make(tmp_path / "a.mp4")
    begin = time.monotonic()
    assert refused(tmp_path / "a.mp4").reason == reason
    assert time.monotonic() - begin < 1


def test_the_cover_of_a_song_is_no_video(tmp_path: Path) -> None:
    path = tmp_path / "song.mp3"
    with av.open(str(path), "w") as out:
        sound = out.add_stream("mp3", rate=44100, layout="mono")
        cover = out.add_stream("mjpeg")
        cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
        cover.disposition = 1 << 10
        picture = av.VideoFrame.from_ndarray(level_frame(100), format="rgb24").reformat(format="yuvj420p")
        picture.pts = 0
        out.mux(cover.encode(picture))
        out.mux(cover.encode())
        raw = av.AudioFrame.from_ndarray(tone(2, 44100), format="fltp", layout="mono")
        raw.sample_rate = 44100
        out.mux(sound.encode(raw))
        out.mux(sound.encode())
    with av.open(str(path)) as container:
        assert container.streams.video  # FFmpeg calls it one
    assert refused(path).reason == "no video track"


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.97])
def test_truncated_mp4_without_its_index(tmp_path: Path, share: float) -> None:
    path = whole(tmp_path / "a.mp4")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert refused(path).reason in ("not a media file", "truncated file")


@pytest.mark.parametrize(("suffix", "codec"), [("avi", "mpeg4"), ("wmv", "wmv2")])
def test_a_cut_file_of_a_format_that_states_its_bytes_is_not_taken_for_a_short_one(
    tmp_path: Path, suffix: str, codec: str
) -> None:
    """FFmpeg takes what is left of a cut AVI for its length, and says of a cut ASF that its length is unknown."""
    noise = np.random.default_rng(0).integers(0, 256, (50, 48, 64, 3), dtype=np.uint8)
    path = write(tmp_path / f"a.{suffix}", list(noise), tone(2, 16000), codec=codec, audio_codec="libmp3lame")
    assert decode(path, PLAN).video.shape[0] == 4
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert refused(path).reason == "truncated file"
    assert len(decode(path, Plan(0, 0.2, 2, 48, None)).audio) == 3200  # what it still holds


def faststart(path: Path) -> Path:
    """A file whose index lies in front, of evenly filled seconds: what a broken download leaves is playable."""
    noise = torch.randint(0, 40, (3, 48, 64), generator=torch.Generator().manual_seed(0))
    frames = torch.stack([noise.roll(i, 2) + 2 * i for i in range(100)]).to(torch.uint8)
    encode(path, frames, torch.from_numpy(tone(4, 16000)[0]), 25)
    return path


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.8])
def test_truncated_mp4_is_decoded_rightly_or_refused(tmp_path: Path, share: float) -> None:
    path = faststart(tmp_path / "a.mp4")
    early, late = Plan(0.0, 0.4, 3, 48, None), Plan(0.0, 4.0, 4, 48, None)
    whole = decode(path, early)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert refused(path, late).reason == "truncated file"
    clip = decode(path, early)  # what it still holds is what it held
    assert clip.video.equal(whole.video) and clip.audio.equal(whole.audio)


def test_damage_in_the_middle_is_refused_or_seen_right(tmp_path: Path) -> None:
    path = faststart(tmp_path / "a.mp4")
    plan = Plan(0.0, 0.4, 3, 48, None)
    whole = decode(path, plan)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 3000] = bytes(3000)
    path.write_bytes(content)
    assert refused(path, Plan(0.0, 4.0, 40, 48, None)).reason in ("damaged video", "damaged audio")
    assert decode(path, plan).video.equal(whole.video)


@pytest.mark.parametrize(("codec", "pix_fmt"), [("mpeg4", "yuv420p"), ("libx264", "yuv444p")])
def test_one_pixel_wide(tmp_path: Path, codec: str, pix_fmt: str) -> None:
    for width, height, shape in ((1, 100, (96, 48)), (100, 1, (48, 96)), (1, 1, (48, 48))):
        picture = np.full((height, width, 3), 120, np.uint8)
        path = write(tmp_path / f"{width}x{height}.mkv", [picture] * 25, tone(1, 16000), codec=codec, pix_fmt=pix_fmt)
        video = decode(path, PLAN).video
        assert tuple(video.shape[-2:]) == shape
        assert video.float().mean() == pytest.approx(120, abs=3) and video.float().std() < 3


def test_names_that_ffmpeg_would_read_as_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole(tmp_path / "plain.mp4").rename("concat:a|b.mp4")
    assert len(decode("concat:a|b.mp4", PLAN).video) == 4


def test_unreadable_permission() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.mp4", moving(5), tone(1, 16000))
        Path(folder).chmod(0o755)
        path.chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may read anything
        try:
            assert refused(path).reason == "no permission"
        finally:
            os.seteuid(user)


def endless(path: Path, hours: float, fps: int = 1, keyframe_every: int | None = 10, sound_until: float = 1e9) -> Path:
    """A long film made by writing a few packets over and over with new times; the sound is an 8 s tone, repeated."""
    film, music = path.with_suffix(".avi"), path.with_suffix(".flac")
    write(film, [level_frame(60)] * 2, None, fps=fps, codec="mpeg4", options={"g": "300", "bf": "0"})
    write(music, None, tone(8, 8000), rate=8000, audio_codec="flac", audio_options={"frame_size": "64000"})
    with av.open(str(film)) as one, av.open(str(music)) as two, av.open(str(path), "w") as out:
        key, delta = (bytes(p) for p in one.demux() if p.size)
        [note] = (bytes(p) for p in two.demux() if p.size)
        video = out.add_stream_from_template(one.streams.video[0])
        sound = out.add_stream_from_template(two.streams.audio[0])
        for second in range(int(hours * 3600)):
            if second % 8 == 0 and second < sound_until:
                mux(out, sound, note, second * 8000, 64000, Fraction(1, 8000), True)
            for i in range(second * fps, second * fps + fps):
                is_key = i == 0 or (keyframe_every is not None and i % keyframe_every == 0)
                mux(out, video, key if is_key else delta, i, 1, Fraction(1, fps), is_key)
    return path


def mux(out: Any, stream: Any, data: bytes, pts: int, duration: int, base: Fraction, is_key: bool) -> None:
    packet = av.Packet(data)
    packet.stream, packet.time_base, packet.is_keyframe = stream, base, is_key
    packet.pts = packet.dts = pts
    packet.duration = duration
    out.mux(packet)


MEASURE = """
import resource, sys, time
from stella.media.decode import Plan, decode
def measure(path, start):
    begin = time.perf_counter()
    clip = decode(path, Plan(float(start), 10.24, 4, 48))
    assert clip.video.float().mean().sub(60).abs() < 3 and len(clip.audio) == 163840 and clip.audio.std() > 0.3
    return time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
measure(sys.argv[1], 5)
print(*measure(sys.argv[1], 7), *measure(sys.argv[2], 3500))
"""


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_an_hour_costs_what_a_minute_costs(tmp_path: Path, suffix: str) -> None:
    short = endless(tmp_path / f"short.{suffix}", 1 / 60)
    long = endless(tmp_path / f"long.{suffix}", 1.0)
    assert read_duration(long) == pytest.approx(3600, rel=0.01)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(short), str(long)], capture_output=True, text=True, check=True
    )
    short_s, short_mib, long_s, long_mib = map(float, run.stdout.split())
    assert long_mib < short_mib + 16
    assert long_s < short_s + 0.25


def test_a_track_that_ended_hours_ago_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = endless(tmp_path / "a.mkv", 1.0, sound_until=8)
    read = []
    monkeypatch.setattr("stella.media.decode.check_time", lambda *_: read.append(1))
    assert len(decode(path, Plan(0, 10.24, 4, 48)).audio) == 8 * 16000
    assert len(read) < 100  # packets, of 3600
    assert refused(path, Plan(3000, 10.24, 4, 48)).reason == "no audio in the clip"


def test_a_decode_that_takes_for_ever_meets_the_limit(tmp_path: Path) -> None:
    path = endless(tmp_path / "a.mkv", 0.5, fps=25, keyframe_every=None)  # one keyframe, half an hour before the window
    begin = time.monotonic()
    assert refused(path, Plan(1790.0, 5.0), time_limit=0.1).reason == "time limit"
    assert time.monotonic() - begin < 1.3
    assert refused(path, time_limit=-1.0).reason == "time limit"


def test_without_av_the_package_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = whole(tmp_path / "a.mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match="pip install av"):
        decode(path, PLAN)

"""How media files are opened: odd but healthy ones are read, and none of them reaches outside itself."""

import gc
import os
import random
import resource
import time
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from helpers.hostile import HOSTILE, watched
from helpers.media_files import CLIPS, level_frame, tone, write

from stella.errors import ClipError
from stella.media.codecs import decode_flac, encode_flac
from stella.media.decode import Plan, decode
from stella.media.files import Limits

PLAN = Plan(0, 2.0, 4, 48, None)


def levels(count: int) -> list:
    return [level_frame(20 + 3 * (i % 70)) for i in range(count)]


def test_narrow_band_opus_is_read_to_its_end(tmp_path: Path) -> None:
    """The decoder holds samples back; frames that it gives up at the end have no time base."""
    low = {"b": "6000", "application": "voip"}
    sound = tone(2, 48000)
    path = write(tmp_path / "a.mkv", levels(50), sound, rate=48000, audio_codec="libopus", audio_options=low)
    audio = decode(path, PLAN).audio
    assert len(audio) == 32000 and audio[-8000:].std() > 0.2


def test_a_track_that_appears_in_mid_file_is_no_end(tmp_path: Path) -> None:
    seconds, frames, sound = 6, levels(150), tone(6, 48000)
    first = write(tmp_path / "first.ts", frames, sound, rate=48000).read_bytes()
    times = [seconds + i / 25 for i in range(150)]
    last = write(tmp_path / "last.ts", frames, sound, rate=48000, times=times, audio_start=seconds).read_bytes()
    with av.open(str(tmp_path / "more.ts"), "w") as out:  # more tracks than at the start
        for stream in [out.add_stream("aac", rate=48000, layout="mono") for _ in range(4)]:
            raw = av.AudioFrame.from_ndarray(tone(1, 48000), format="fltp", layout="mono")
            raw.sample_rate, raw.pts = 48000, 48000 * seconds
            out.mux([*stream.encode(raw), *stream.encode()])
    empty = (bytes([0x47, 0x1F, 0xFF, 0x10]) + bytes(184)) * 3000  # the end of a file is read when it is opened
    path = tmp_path / "a.ts"
    path.write_bytes(first + (tmp_path / "more.ts").read_bytes() + empty + last)
    with av.open(str(path)) as container:
        assert len(container.streams) == 2
    clip = decode(path, Plan(0, 30.0, 4, 48, None))
    assert len(clip.audio) > 16000 * (2 * seconds - 1) and clip.video.float().std() > 5


# ---- files that reach outside


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_second_file_is_opened(tmp_path: Path, kind: str) -> None:
    """A list of other places is refused before anything that it names is touched."""
    path, fifo, other = tmp_path / "a.mp4", tmp_path / "fifo.mp4", tmp_path / "other.mpg"
    os.mkfifo(fifo)
    other.symlink_to(CLIPS / "bbaf2n.mpg")
    path.write_text(HOSTILE[kind].format(other=other.name, self=path.name, fifo=fifo.name))
    began = time.monotonic()
    with watched(tmp_path) as opened, pytest.raises(ClipError) as caught:
        decode(path, PLAN, time_limit=3)
    assert caught.value.reason == "not a media file" and time.monotonic() - began < 1
    assert set(opened) <= {str(path)}


def test_a_flac_in_memory_is_flac_and_nothing_else(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.wav", None, tone(1, 16000), audio_codec="pcm_s16le")
    for hostile in (f"ffconcat version 1.0\nfile 'file:{secret}'\n", HOSTILE["SDP"]):
        with pytest.raises(ValueError, match="no sound"):
            decode_flac(hostile.encode())
    with pytest.raises(ValueError, match="no sound"):
        decode_flac(secret.read_bytes())
    assert len(decode_flac(encode_flac(torch.zeros(16000)))) == 16000


# ---- bombs, and what is left behind


def test_a_picture_that_is_too_large_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """A few kilobytes of 8000 × 6000: decoded they would take hundreds of megabytes."""
    large = np.zeros((6000, 8000, 3), np.uint8)
    path = write(tmp_path / "a.mov", [large], tone(1, 16000), codec="png", pix_fmt="gray")
    assert path.stat().st_size < 1e6
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ClipError, match="1 to 40,000,000 pixels"):
        decode(path, PLAN)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000 and time.monotonic() - began < 1
    small = write(tmp_path / "b.mp4", levels(50), tone(2, 16000))
    assert len(decode(small, PLAN, limits=Limits(pixels=64 * 48)).video) == 4
    with pytest.raises(ClipError, match="picture too large"):
        decode(small, PLAN, limits=Limits(pixels=64 * 48 - 1))


def test_a_clip_leaves_no_decoder_and_no_frame_behind() -> None:
    """Large pictures must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        for name in ("bbaf2n", "lrwp9a"):
            decode(CLIPS / f"{name}.mpg", PLAN)
        kinds = (av.VideoFrame, av.AudioFrame, av.CodecContext, av.stream.Stream, av.container.Container)
        assert not [item for item in gc.get_objects() if issubclass(type(item), kinds)]
    finally:
        gc.enable()


# ---- damage that FFmpeg would conceal


def real_frames() -> list[np.ndarray]:
    with av.open(str(CLIPS / "bbaf2n.mpg")) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)][:50]


def wrong(path: Path, whole: torch.Tensor, limits: Limits) -> bool:
    """Whether a damaged file gives other pictures than the whole one, without a word."""
    try:
        found = decode(path, PLAN, limits=limits).video
    except ClipError:
        return False
    return float((found.float() - whole.float()).abs().mean((1, 2, 3)).max()) > 20


def moving_frames() -> list[np.ndarray]:
    """A texture that moves: what FFmpeg puts in the place of lost blocks is seen."""
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    picture = coarse.repeat(32, 0).repeat(32, 1)
    return [np.roll(picture, 9 * i, 1) for i in range(50)]


@pytest.mark.parametrize(("kind", "most"), [("h264", 0), ("real mpeg1", 1)])
def test_damage_does_not_become_other_pictures(tmp_path: Path, kind: str, most: int) -> None:
    """H.264 notices nearly all damage, if FFmpeg is asked not to conceal it; MPEG-1 has less to notice it by."""
    path = CLIPS / "bbaf2n.mpg"
    if kind == "h264":
        path = write(tmp_path / "whole.mp4", moving_frames(), tone(2, 16000))
    whole, data = decode(path, PLAN).video, path.read_bytes()
    rng, damaged = random.Random(0), tmp_path / f"damaged{path.suffix}"
    count = {True: 0, False: 0}
    for _ in range(20):
        at = rng.randrange(len(data) // 50, len(data) * 3 // 5)
        damaged.write_bytes(data[:at] + rng.randbytes(40) + data[at + 40 :])
        for strict in count:
            count[strict] += wrong(damaged, whole, Limits(strict))
    assert count[True] <= most and count[False] >= 1


def test_keyframes_in_name_only_are_decoded_from_the_real_one(tmp_path: Path) -> None:
    refresh = {"x264-params": "intra-refresh=1:keyint=20"}
    frames = real_frames()
    path = write(tmp_path / "a.mp4", frames, tone(2, 16000), options=refresh)
    shown = decode(path, Plan(0, 2.0, 4, 288, None)).video.permute(0, 2, 3, 1).numpy().astype(int)
    off = [np.abs(shown[i] - frames[n]).mean() for i, n in enumerate((6, 18, 31, 43))]
    assert max(off) < 6

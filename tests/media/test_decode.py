"""`decode` takes the right moments, the right way up, in sync, and no more of a file than it needs."""

import contextlib
import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import Interpolation
from helpers.media_files import level_frame, tone, write

from stella.clip import SAMPLE_RATE
from stella.errors import ClipError, ConfigError
from stella.media.decode import Cut, Plan, decode, decode_track, read_cut

ALL = Plan(0.0, 10.0, 4, 48, None)


def levels(video: torch.Tensor) -> list[float]:
    return video.float().mean((1, 2, 3)).tolist()


def counting(count: int, step: int = 2) -> list[np.ndarray]:
    """Frame i has grey level 20 + step · i, beginning anew at 220. Video keeps levels to ±1."""
    return [level_frame(level(i, step)) for i in range(count)]


def level(i: int, step: int = 2) -> int:
    return 20 + step * i % 200


@pytest.mark.parametrize(
    ("plan", "window", "expected"),
    [
        (Plan(0, 10.24, 4, 48, 4.0), 0.5, [3.62, 4.62, 5.62, 6.62]),
        (Plan(0, 10.24, 2, 48, None), 0.5, [2.56, 7.68]),
        (Plan(5, 2, 2, 48, 1.0), 0.5, [5.75, 6.25]),
        (Plan(0, 2, 4, 48, 4.0), 0.25, [0.25, 0.75, 1.25, 1.75]),  # a clip shorter than the span
        (Plan(1, 10, 4, 48, 4.0), 0.0, [1.5, 2.5, 3.5, 4.5]),
        (Plan(1, 10, 4, 48, 4.0), 0.25, [3.0, 4.0, 5.0, 6.0]),
        (Plan(1, 10, 4, 48, 4.0), 1.0, [7.5, 8.5, 9.5, 10.5]),
    ],
)
def test_wanted_times_are_centres_of_equal_parts_of_a_window(plan: Plan, window: float, expected: list[float]) -> None:
    assert plan.times(plan.start, plan.start + plan.duration, window) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [{"frames": 0}, {"size": 0}, {"duration": 0}, {"start": -1}, {"span": 0.0}])
def test_plan_refuses_nonsense(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Plan(**bad)


@pytest.mark.parametrize("gop", [1, 10, 250])
@pytest.mark.parametrize("start", [0.0, 1.3, 4.0])
def test_each_time_gets_the_frame_shown_then(tmp_path: Path, gop: int, start: float) -> None:
    path = write(tmp_path / "a.mp4", counting(150), tone(6, 16000), options={"g": str(gop), "crf": "10"})
    plan = Plan(start, 2.0, 5, 48, None)
    shown = [level(math.floor(t * 25 + 1e-6)) for t in plan.times(start, start + 2)]
    assert levels(decode(path, plan).video) == pytest.approx(shown, abs=1.0)


@pytest.mark.parametrize(
    ("name", "audio_codec", "rate", "more"),
    [
        ("a.mkv", "aac", 16000, {}),
        ("a.webm", "libopus", 48000, {"codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}}),
        ("a.avi", "mp3", 44100, {"codec": "mpeg4", "options": {"bf": "2"}}),
        ("a.mpg", "mp2", 44100, {"codec": "mpeg1video"}),
        ("a.ts", "mp2", 48000, {}),
        ("a.mov", "pcm_s16le", 22050, {"codec": "mjpeg", "pix_fmt": "yuvj420p"}),
        ("a.mp4", "aac", 44100, {"codec": "libx265", "options": {"x265-params": "log-level=none"}}),
    ],
)
def test_formats_agree_after_a_seek(tmp_path: Path, name: str, audio_codec: str, rate: int, more: Any) -> None:
    audio = tone(4, rate)
    audio[:, : rate * 3] *= 0.1  # the last second is loud
    path = write(tmp_path / name, counting(100), audio, audio_codec=audio_codec, rate=rate, **more)
    clip = decode(path, Plan(2.5, 1.0, 2, 48, None))
    start = 0.04 if name == "a.ts" else 0.0  # the muxer lets the sound begin before the picture
    assert levels(clip.video) == pytest.approx([20 + 2 * 68, 20 + 2 * 81], abs=4 + 100 * start)
    loud = (clip.audio.abs() > 0.2).nonzero()[0].item() / SAMPLE_RATE
    assert loud == pytest.approx(0.5, abs=0.03 + start)
    assert len(clip.audio) == SAMPLE_RATE


@pytest.mark.parametrize("start", [2.5, 4.4, 5.9])
def test_a_seek_that_lands_behind_the_keyframe_is_made_good(tmp_path: Path, start: float) -> None:
    """Transport streams have no index: a seek lands anywhere, here in groups of three seconds."""
    options = {"g": "75", "keyint_min": "75", "sc_threshold": "0"}
    path = write(tmp_path / "a.ts", counting(200), tone(8, 48000), options=options, audio_codec="mp2", rate=48000)
    offset = min(s.start_time * s.time_base for s in av.open(str(path)).streams)
    late = float(av.open(str(path)).streams.video[0].start_time * Fraction(1, 90000) - offset)  # sound begins first
    shown = [level(math.floor((t - late) * 25 + 1e-6)) for t in Plan(start, 0.4, 2, 48, None).times(start, start + 0.4)]
    assert levels(decode(path, Plan(start, 0.4, 2, 48, None)).video) == pytest.approx(shown, abs=1)


def test_skipping_unreferenced_frames_changes_no_pixel(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    field = rng.integers(0, 255, (80, 120, 3), dtype=np.uint8)
    frames = [np.ascontiguousarray(field[i % 32 : i % 32 + 48, i % 50 : i % 50 + 64]) for i in range(75)]
    path = write(tmp_path / "a.mp4", frames, tone(3, 16000), options={"bf": "3", "g": "250"})
    with av.open(str(path)) as container:
        kinds = {frame.pict_type for frame in container.decode(video=0)}
    assert len(kinds) == 3  # I, P and B, so there is something to skip
    flags = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
    with av.open(str(path)) as container:
        every = [f.reformat(format="rgb24", interpolation=flags).to_ndarray() for f in container.decode(video=0)]
    video = decode(path, Plan(0, 3, 7, 48, None)).video
    wanted = [math.floor(t * 25 + 1e-6) for t in Plan(0, 3, 7, 48, None).times(0, 3)]
    assert torch.equal(video, torch.stack([torch.from_numpy(every[i]).permute(2, 0, 1) for i in wanted]))


def test_variable_frame_rate(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.2, 2.0, 2.05, 3.9]
    path = write(tmp_path / "a.mp4", counting(6, 30), tone(4, 16000), times=times, options={"bf": "0"})
    for moment, index in [(0.05, 0), (0.25, 2), (1.9, 2), (2.02, 3), (3.0, 4), (3.92, 5)]:
        clip = decode(path, Plan(moment, 0.04, 1, 48, None))
        assert levels(clip.video) == pytest.approx([20 + 30 * index], abs=2), moment


def test_one_frame_video_is_that_frame_repeated(tmp_path: Path) -> None:
    for name in ("a.mp4", "a.mkv", "a.avi"):
        codec = "mpeg4" if name == "a.avi" else "libx264"
        path = write(tmp_path / name, [level_frame(90)], tone(4, 16000), codec=codec)
        assert levels(decode(path, Plan(size=48)).video) == pytest.approx([90] * 4, abs=2)


def test_video_shorter_than_audio_spreads_over_the_video(tmp_path: Path) -> None:
    for name in ("a.mp4", "a.mkv"):
        path = write(tmp_path / name, counting(50, 4), tone(8, 16000))
        clip = decode(path, Plan(0, 10.24, 4, 48, None))
        assert levels(clip.video) == pytest.approx([20 + 4 * i for i in (6, 18, 31, 43)], abs=3)
        assert len(clip.audio) == pytest.approx(8 * SAMPLE_RATE, abs=2100)


def test_window_behind_the_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", counting(50), tone(2, 16000))
    with pytest.raises(ClipError) as caught:
        decode(path, Plan(start=7.0))
    assert caught.value.reason in ("no audio in the clip", "no video in the clip")


def test_read_cut_gives_a_fixed_rate(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", counting(75, 2), tone(3, 16000))
    frames, waveform = read_cut(path, 1.0, 10.0, 8, 48)
    assert levels(frames) == pytest.approx([20 + 2 * math.floor((1 + i / 8) * 25 + 1e-6) for i in range(16)], abs=2)
    assert len(waveform) == pytest.approx(2 * SAMPLE_RATE, abs=1100)
    assert len(read_cut(path, 0.0, 1.0, 8, 48)[0]) == 8


def test_a_recording_that_begins_inside_a_group_of_pictures(tmp_path: Path) -> None:
    """The B frames before its first keyframe lean on frames that were never recorded: they are not shown."""
    options = {"bf": "2", "g": "12", "qmin": "1", "qmax": "2", "sc_threshold": "1000000000"}
    path = tmp_path / "a.ts"
    write(path, counting(100, 2), tone(4, 48000), codec="mpeg2video", options=options, audio_codec="mp2", rate=48000)
    content = path.read_bytes()
    for share in (0.2, 0.37, 0.5):
        cut = tmp_path / "cut.ts"
        cut.write_bytes(content[int(share * len(content)) // 188 * 188 :])
        seen = levels(read_cut(cut, 0, 1.2, 25, 48)[0])
        assert len(seen) >= 6
        steps = np.trim_zeros(np.diff(seen), "f")  # the first that can be shown stands until then
        assert len(steps) >= 6 and steps == pytest.approx(2 * np.ones(len(steps)), abs=1.0)


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_of_a_cut_keep_their_places_beside_the_sound(tmp_path: Path, suffix: str) -> None:
    """Frame i is what is shown at i/fps, also where the picture begins a second after the sound: the first waits."""
    times = [1 + i / 25 for i in range(50)]
    path = write(tmp_path / f"a.{suffix}", counting(50, 2), tone(3, 16000), times=times)
    frames, waveform = read_cut(path, 0.0, 3.0, 10, 48)
    expected = [20 + 2 * math.floor(max(0.0, i / 10 - 1) * 25 + 1e-6) for i in range(30)]
    assert levels(frames) == pytest.approx(expected, abs=2.5) and len(waveform) == pytest.approx(48_000, abs=1100)


def test_edit_list_hides_the_first_frames(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", counting(50, 3), tone(2, 16000), options={"bf": "0"})
    content = bytearray(path.read_bytes())
    place = content.index(b"elst") + 16  # version and flags, count, duration, then where the media begins
    assert content[place : place + 4] == bytes(4)
    content[place : place + 4] = (10 * 512).to_bytes(4, "big")
    path.write_bytes(content)
    assert levels(decode(path, Plan(0.0, 0.4, 2, 48, None)).video) == pytest.approx([20 + 3 * 12, 20 + 3 * 17], abs=2)


def corners() -> np.ndarray:
    """64 × 48, red top left, green top right, blue bottom left, white bottom right."""
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:24, :32, 0] = picture[:24, 32:, 1] = picture[24:, :32, 2] = 255
    picture[24:, 32:] = 255
    return picture


def read_corners(video: torch.Tensor) -> str:
    _, height, width = video[0].shape
    names = {(1, 0, 0): "R", (0, 1, 0): "G", (0, 0, 1): "B", (1, 1, 1): "W"}
    spots = itertools.product((height // 4, 3 * height // 4), (width // 4, 3 * width // 4))
    return "".join(names[tuple((video[0, :, y, x] > 127).int().tolist())] for y, x in spots)


@pytest.mark.parametrize(
    ("matrix", "seen"),  # a, b, c, d of x' = a x + c y, y' = b x + d y, as the mp4 standard writes it
    [
        ((1, 0, 0, 1), "RGBW"),
        ((0, 1, -1, 0), "BRWG"),  # a telephone held upright: a quarter turn clockwise
        ((-1, 0, 0, -1), "WBGR"),
        ((0, -1, 1, 0), "GWRB"),
        ((-1, 0, 0, 1), "GRWB"),  # mirrored
    ],
)
def test_display_matrix_is_applied(tmp_path: Path, matrix: tuple[int, int, int, int], seen: str) -> None:
    path = write(tmp_path / "a.mp4", [corners()] * 10, tone(1, 16000), options={"crf": "5"})
    content = bytearray(path.read_bytes())
    unit = b"".join(v.to_bytes(4, "big") for v in (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30))
    place = content.index(unit, content.index(b"tkhd"))  # the first track is the video
    a, b, c, d = ((v * (1 << 16)) for v in matrix)
    turned = b"".join(v.to_bytes(4, "big", signed=True) for v in (a, b, 0, c, d, 0, 0, 0, 1 << 30))
    content[place : place + len(turned)] = turned
    path.write_bytes(content)
    clip = decode(path, Plan(size=48))
    assert tuple(clip.video.shape[-2:]) == ((64, 48) if matrix[0] == 0 else (48, 64))
    assert read_corners(clip.video) == seen


@pytest.mark.parametrize(
    ("width", "height", "size", "shape"),
    [(64, 48, 96, (96, 128)), (48, 64, 24, (32, 24)), (400, 40, 32, (32, 64)), (40, 400, 32, (64, 32))],
)
def test_short_side_is_the_size_and_panoramas_are_cropped(
    tmp_path: Path, width: int, height: int, size: int, shape: tuple[int, int]
) -> None:
    picture = np.zeros((height, width, 3), np.uint8)
    picture[height // 2 - 20 : height // 2 + 20, width // 2 - 20 : width // 2 + 20] = 200  # what a centre crop keeps
    path = write(tmp_path / "a.mp4", [picture] * 5, tone(1, 16000))
    video = decode(path, Plan(size=size)).video
    assert tuple(video.shape) == (4, 3, *shape)
    h, w = shape
    assert video[:, :, h // 2 - 3 : h // 2 + 3, w // 2 - 3 : w // 2 + 3].float().mean() == pytest.approx(200, abs=3)


def test_pixels_that_are_not_square(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    write(path, [level_frame(80)] * 5, tone(1, 16000), options={"aspect": "2:1"})
    with av.open(str(path)) as container:
        assert container.streams.video[0].sample_aspect_ratio == 2
    assert tuple(decode(path, Plan(size=48)).video.shape[-2:]) == (48, 96)  # 2.67 to 1, cropped to 2 to 1


@pytest.mark.parametrize(
    ("name", "codec", "rate", "layout", "channels"),
    [
        ("a.avi", "pcm_u8", 8000, "mono", 1),
        ("a.mov", "pcm_s16le", 44100, "stereo", 2),
        ("a.mp4", "aac", 48000, "5.1", 6),
        ("a.mkv", "flac", 96000, "stereo", 2),
        ("a.mkv", "pcm_f32le", 16000, "mono", 1),
    ],
)
def test_a_tone_keeps_pitch_and_level(
    tmp_path: Path, name: str, codec: str, rate: int, layout: str, channels: int
) -> None:
    sound = tone(2, rate, channels)
    path = write(tmp_path / name, counting(50), sound, rate=rate, audio_codec=codec, layout=layout)
    audio = decode(path, ALL).audio
    assert audio.dtype == torch.float32 and len(audio) == pytest.approx(2 * SAMPLE_RATE, abs=2100)
    middle = audio[8000:24000]
    spectrum = torch.fft.rfft(middle).abs()
    assert spectrum.argmax().item() == 440
    level = 2 * spectrum[440].item() / len(middle)
    # All channels alike: the mix of any layout is the same tone; 5.1 loses its low-frequency channel, as it should.
    assert level == pytest.approx(0.5, rel=0.03)
    assert (middle - 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(8000, 24000) / 16000)).abs().max() < 0.04


def test_channels_are_mixed_not_picked(tmp_path: Path) -> None:
    rate = 48000
    five_one = np.zeros((6, 2 * rate), np.float32)
    for channel, hertz in enumerate((300, 500, 700, 900, 1100, 1300)):  # L R C LFE SL SR
        five_one[channel] = tone(2, rate, 1, hertz, 0.5)[0]
    path = write(tmp_path / "a.mkv", counting(50), five_one, rate=rate, audio_codec="flac", layout="5.1")
    audio = decode(path, ALL).audio[:SAMPLE_RATE]
    heard = 2 * torch.fft.rfft(audio).abs()[[300, 500, 700, 900, 1100, 1300]] / SAMPLE_RATE
    left, right, centre, low, surround_l, surround_r = heard.tolist()
    assert left == pytest.approx(right, rel=0.02) and surround_l == pytest.approx(surround_r, rel=0.02)
    assert centre / left == pytest.approx(2**0.5, rel=0.02) and left / surround_l == pytest.approx(2**0.5, rel=0.02)
    assert low < 0.01
    assert audio.abs().max() <= 1


def test_sound_that_begins_late_stays_in_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mkv", counting(75), tone(2, 16000), audio_codec="flac", audio_start=0.8)
    audio = decode(path, ALL).audio
    assert (audio.abs() > 0.1).nonzero()[0].item() == pytest.approx(0.8 * SAMPLE_RATE, abs=40)
    assert audio[: int(0.75 * SAMPLE_RATE)].abs().max() == 0


def test_a_gap_in_the_sound_stays_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as out:
        video, sound = out.add_stream("libx264", rate=25), out.add_stream("pcm_s16le", rate=16000, layout="mono")
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        for pixels in counting(75):
            out.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(video.encode())
        for begin in (0, 32000):
            samples = (tone(1, 16000) * 32767).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 16000, begin, Fraction(1, 16000)
            for packet in sound.encode(frame):
                packet.pts = packet.dts = begin
                out.mux(packet)
    audio = decode(path, ALL).audio
    assert len(audio) == 48000
    assert audio[16100:31900].abs().max() == 0
    torch.testing.assert_close(audio[32000:], audio[:16000], atol=1e-4, rtol=0)


def test_sound_shorter_than_the_window_is_shorter(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", counting(250, 0), tone(3, 16000))
    clip = decode(path, Plan(size=48))
    assert len(clip.audio) == pytest.approx(3 * SAMPLE_RATE, abs=1100)
    assert clip.audio[-4000:-2000].abs().max() > 0.4  # tone to its end, no padding


def test_silence_is_silence_and_not_refused(tmp_path: Path) -> None:
    audio = decode(write(tmp_path / "a.mp4", counting(50), np.zeros((1, 32000), np.float32)), Plan(0, 2, 1)).audio
    assert len(audio) == 32000 and audio.abs().max() < 1e-4


def test_sound_after_a_seek_is_the_sound_of_the_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    noise = np.cumsum(rng.standard_normal((1, 44100 * 6)), 1)
    noise = (0.3 * (noise - noise.mean()) / np.abs(noise).max()).astype(np.float32)
    for codec in ("aac", "mp3"):
        path = write(tmp_path / f"{codec}.mp4", counting(150), noise, rate=44100, audio_codec=codec)
        whole = decode(path, Plan(0, 6, 1, 48, None)).audio
        part = decode(path, Plan(3.3, 1.5, 1, 48, None)).audio
        expected = whole[round(3.3 * SAMPLE_RATE) :][: len(part)]
        assert len(part) == 1.5 * SAMPLE_RATE
        assert (part - expected).square().mean().sqrt() < 0.02 * expected.std()


def test_real_clip(speech: Path) -> None:
    clip = decode(speech, Plan(0, 2.56))
    assert tuple(clip.video.shape) == (4, 3, 256, 320) and clip.video.float().std() > 20
    assert len(clip.audio) == round(2.56 * SAMPLE_RATE) and 0.01 < clip.audio.std() < 0.5
    with av.open(str(speech)) as container:
        every = np.stack([f.reformat(320, 256, "rgb24").to_ndarray()[::4, ::4] for f in container.decode(video=0)])
    for picture, moment in zip(clip.video, Plan(0, 2.56).times(0, 2.56), strict=True):
        errors = np.abs(every - picture.permute(1, 2, 0).numpy()[::4, ::4].astype(int)).mean((1, 2, 3))
        assert errors.argmin() == math.floor(moment * 25 + 1e-6)


def test_only_what_the_window_needs_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.mp4", counting(150), tone(6, 16000), options={"g": "25"})
    packets: list[Any] = []
    plain = Cut._decoded
    monkeypatch.setattr(Cut, "_decoded", lambda self, packet: (packets.append(packet), plain(self, packet))[1])
    decode(path, Plan(0, 6, 4, 48, 0.5))
    assert 12 <= len(packets) <= 55  # of 150: the window lies in two groups of pictures


def test_nothing_is_said_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.mp4", counting(50), tone(2, 16000))
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    path.write_bytes(content)
    capfd.readouterr()
    with contextlib.suppress(ClipError):
        decode(path, ALL)
    assert capfd.readouterr() == ("", "")


def test_sound_that_is_damaged_before_the_clip_does_not_spoil_it(tmp_path: Path) -> None:
    """Packets before a clip are decoded for what they leave behind; the first may depend on unread ones."""
    path = write(tmp_path / "a.mka", None, tone(3, 48000), rate=48000, audio_codec="flac")
    with av.open(str(path)) as container:
        early = next(p for p in container.demux(audio=0) if p.pts and p.pts * p.time_base > 0.7)
    path.write_bytes(path.read_bytes().replace(bytes(early), bytes(early)[:9] + bytes(early.size - 9)))
    sound = decode_track(path, Plan(1.0, 1.0), "audio")
    assert len(sound) == SAMPLE_RATE and sound.abs().max() > 0.4
    with pytest.raises(ClipError, match="damaged audio"):
        decode_track(path, Plan(0.5, 1.0), "audio")


def test_a_file_whose_sound_is_all_stored_first_is_read_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a seek there is no sound at all, as where a muxer wrote one track after the other."""
    path = write(tmp_path / "a.mkv", counting(350), tone(14, 16000), options={"g": "10"})
    plan, plain, reads = Plan(12.0, 1.0, 3, 48, None), Cut._demux, itertools.count()
    whole = decode(path, plan)

    def demux(self: Cut) -> Any:
        sought = next(reads) < 2
        return (packet for packet in plain(self) if not (sought and packet.stream is self.audio))

    monkeypatch.setattr(Cut, "_demux", demux)
    clip = decode(path, plan)
    assert next(reads) == 3 and clip.audio.equal(whole.audio) and clip.video.equal(whole.video)

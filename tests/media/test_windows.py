"""Windows of whole files are what `decode` cuts out of them, bit for bit, and cover all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.media_files import CLIPS, tone, write
from helpers.phone import SOUNDS, hour, moving, noisy, phone_files, with_cover

from stella.clip import SAMPLE_RATE
from stella.errors import ClipError, StellaError
from stella.media import windows as module
from stella.media.arrays import frame_windows, sound_windows
from stella.media.decode import decode
from stella.media.fbank import MEAN, STD, fbank
from stella.media.inputs import Inputs, derived
from stella.media.windows import Window, starts, windows

INPUTS = Inputs(1.0, 32, 40, 3, 0.6, 100)


def of(found: Any, kind: str) -> list[Window]:
    return [window for window in found if window.kind == kind]


@pytest.mark.parametrize(
    ("length", "duration", "hop", "expected"),
    [
        (3.0, 1.0, 1.0, [0, 1, 2]),
        (3.5, 1.0, 1.0, [0, 1, 2, 2.5]),  # the last one ends with the file
        (3.05, 1.0, 1.0, [0, 1, 2]),  # an encoder's padding gets no window
        (0.4, 1.0, 1.0, [0]),  # shorter than a window
        (1.0, 1.0, 0.5, [0]),
        (2.3, 1.0, 0.5, [0, 0.5, 1.0, 1.3]),
    ],
)
def test_windows_cover_a_file_and_the_last_ends_with_it(
    length: float, duration: float, hop: float, expected: list[float]
) -> None:
    assert starts(length, duration, hop) == pytest.approx(expected)


@pytest.fixture(scope="module")
def phones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return phone_files(tmp_path_factory.mktemp("phones"))


@pytest.mark.parametrize("name", ["vertical", "rotated", "uneven", "mkv", "webm", "mov", "avi", "ts", "grid"])
@pytest.mark.parametrize("overlap", [0.0, 0.6])
def test_a_window_is_the_clip_that_decode_cuts_out(phones: dict[str, Path], name: str, overlap: float) -> None:
    path = sorted(CLIPS.glob("*.mpg"))[0] if name == "grid" else phones[name]
    found = list(windows(path, INPUTS, overlap=overlap))
    for kind in ("video", "audio"):
        some = of(found, kind)
        assert [w.start for w in some] == sorted(w.start for w in some) and len(some) >= round(1 + 2 / (1 - overlap))
        assert some[0].start == 0 and some[-1].end == pytest.approx(3.0, abs=0.12)
        for window in some[:: 2 if overlap else 1]:
            clip = decode(path, INPUTS.plan(window.start))
            assert torch.equal(window.data, clip.video if kind == "video" else clip.audio), (kind, window.start)
    assert all(w.start <= w.times[0] < w.times[-1] < w.end for w in of(found, "video"))


@pytest.mark.parametrize(("suffix", "lead"), [("mkv", 0.8), ("mkv", 2.0), ("mkv", 6.0), ("ts", 0.8), ("ts", 2.0)])
def test_sound_that_is_stored_ahead_of_the_pictures_is_not_lost(tmp_path: Path, suffix: str, lead: float) -> None:
    path, options = tmp_path / f"a.{suffix}", {"g": "10", "preset": "ultrafast"}
    write(path, moving(300), tone(12, 48000), options=options, rate=48000, audio_lead=lead)
    found = of(windows(path, INPUTS), "audio")
    assert [w.start for w in found][:12] == list(range(12))
    for window in found:
        audio = decode(path, INPUTS.plan(window.start)).audio
        assert torch.equal(window.data, audio) and audio[: SAMPLE_RATE // 10].abs().max() > 0.4, window.start


def test_one_kind_alone_gives_the_same_windows(phones: dict[str, Path]) -> None:
    both = list(windows(phones["mkv"], INPUTS))
    for kind in ("video", "audio"):
        alone = list(windows(phones["mkv"], INPUTS, [kind]))
        assert [w.start for w in alone] == [w.start for w in of(both, kind)]
        assert all(torch.equal(a.data, b.data) for a, b in zip(alone, of(both, kind), strict=True))


def test_a_turned_and_a_vertical_video_stand_upright(phones: dict[str, Path]) -> None:
    for name in ("vertical", "rotated"):
        [first, *_] = of(windows(phones[name], INPUTS, ["video"]), "video")
        assert first.data.shape[-2] > first.data.shape[-1] == INPUTS.size


def test_aligned_windows_end_with_the_video_in_both_kinds(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mkv", moving(60), tone(4.0, 16000), audio_codec="flac")  # 2.4 s of video
    apart, together = (list(windows(path, INPUTS, aligned=aligned)) for aligned in (False, True))
    assert [w.start for w in of(apart, "video")] == pytest.approx([0, 1, 1.4])
    assert [w.start for w in of(apart, "audio")] == pytest.approx([0, 1, 2, 3])
    assert {w.start for w in of(together, "video")} <= {w.start for w in of(together, "audio")}


def test_the_last_aligned_window_has_sound_also_if_the_sound_went_ahead(tmp_path: Path) -> None:
    sound = noisy(20.0, 16000, 1)
    path = write(tmp_path / "a.mkv", moving(265), sound, audio_codec="flac", options={"g": "25"})  # 10.6 s of video
    found = list(windows(path, INPUTS, aligned=True))
    assert of(found, "video")[-1].start == pytest.approx(9.6)
    assert {w.start for w in of(found, "video")} <= {w.start for w in of(found, "audio")}


@pytest.mark.parametrize("name", SOUNDS)
def test_sound_files_of_any_format(tmp_path: Path, name: str) -> None:
    path = SOUNDS[name](tmp_path / name, tone(2.5, 48000, 2))
    found = list(windows(path, INPUTS, ["audio"]))
    assert [w.start for w in found][:2] == [0, 1] and found[-1].end == pytest.approx(2.5, abs=0.1)
    assert found[1].data.shape == (SAMPLE_RATE,)
    spectrum = torch.fft.rfft(found[1].data).abs()
    assert spectrum.argmax() == 440 and found[1].data.abs().max() == pytest.approx(0.5, abs=0.1)
    with pytest.raises(ClipError, match=r"no video track; it has no picture to embed"):
        list(windows(path, INPUTS, ["video"]))


def test_a_cover_picture_is_no_video(tmp_path: Path) -> None:
    path = with_cover(tmp_path / "song.mp3", tone(2.2, 44100, 2), 44100)
    assert len(list(windows(path, INPUTS))) == len(list(windows(path, INPUTS, ["audio"]))) == 3
    with pytest.raises(ClipError, match="no video track"):
        list(windows(path, INPUTS, ["video"]))


def test_a_video_that_begins_late_has_no_windows_before_it(tmp_path: Path) -> None:
    times = [5 + i / 25 for i in range(50)]
    path = write(tmp_path / "late.mkv", moving(50), noisy(7.0, 48000), times=times, rate=48000, layout="stereo")
    found = list(windows(path, INPUTS))
    assert min(w.start for w in of(found, "video")) >= 4 and min(w.start for w in of(found, "audio")) == 0


@pytest.mark.parametrize("suffix", ["mkv", "ts", "mp4"])
def test_a_picture_that_ends_before_the_sound_is_not_taken_for_a_truncated_file(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", moving(50), noisy(7.0, 48000), rate=48000, layout="stereo")
    for kinds in (("video",), ("video", "audio")):
        found = list(windows(path, INPUTS, kinds))
        assert max(w.end for w in of(found, "video")) <= 4 and bool(of(found, "audio")) == (len(kinds) == 2)


@pytest.mark.parametrize(("name", "codec"), [("a.flac", "flac"), ("a.mka", "aac")])
def test_a_truncated_file_is_refused_and_not_taken_for_a_short_one(tmp_path: Path, name: str, codec: str) -> None:
    path = write(tmp_path / name, None, noisy(4.0, 16000), audio_codec=codec, layout="stereo")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ClipError, match="truncated file"):
        list(windows(path, INPUTS, ["audio"]))


def test_timestamps_that_jump_are_refused(tmp_path: Path) -> None:
    times = [i / 25 for i in range(25)] + [1e6 + i / 25 for i in range(25)]
    path = write(tmp_path / "jump.mkv", moving(50), None, times=times)
    with pytest.raises(ClipError, match="damaged timestamps"):
        list(windows(path, INPUTS, ["video"]))


def test_few_packets_are_held_however_long_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"g": "25", "preset": "ultrafast"}
    path = write(tmp_path / "a.mkv", moving(25 * 40), noisy(40.0, 16000), layout="stereo", options=options)
    held, plain = [], module._Reader._add

    def counted(self: Any, kind: str, track: Any, packet: Any, keep: bool) -> None:
        plain(self, kind, track, packet, keep)
        held.append(sum(len(t.packets) for t in self.by_kind.values()))

    monkeypatch.setattr(module._Reader, "_add", counted)
    count = len(list(windows(path, INPUTS)))
    assert count == 80
    seconds = module.TOGETHER + 3  # of windows, of the last one, of a group of pictures
    assert max(held) < seconds * (25 + 16) < len(held) / 3


@pytest.mark.slow
def test_an_hour_is_read_in_one_pass(tmp_path: Path) -> None:
    path = hour(tmp_path / "hour.mkv")
    found = list(windows(path, Inputs(2.56, 32, 32, 4, None, 256)))
    assert len(of(found, "audio")) == len(of(found, "video")) == 1407
    for window in found[::400]:
        clip = decode(path, Inputs(2.56, 32, 32, 4, None, 256).plan(window.start))
        assert torch.equal(window.data, clip.video if window.kind == "video" else clip.audio)


# ---- arrays


@pytest.mark.parametrize(("rate", "channels"), [(16000, 1), (48000, 2), (44100, 1), (8000, 2)])
def test_a_waveform_gives_what_a_file_of_it_gives(tmp_path: Path, rate: int, channels: int) -> None:
    audio = noisy(2.4, rate, channels)
    layout = "mono" if channels == 1 else "stereo"
    path = write(tmp_path / "a.wav", None, audio, audio_codec="pcm_f32le", rate=rate, layout=layout)
    files, arrays = list(windows(path, INPUTS, ["audio"])), list(sound_windows(audio, rate, INPUTS))
    assert [w.start for w in arrays] == pytest.approx([w.start for w in files])
    assert torch.equal(files[0].data, arrays[0].data)  # later ones may be resampled from another sample on
    for a, b in zip(files, arrays, strict=True):
        assert len(a.data) == len(b.data) and (a.data - b.data).abs().mean() < 0.03
    for same in (audio.T, torch.from_numpy(audio), audio.astype(np.float64)):
        again = list(sound_windows(same, rate, INPUTS))
        assert all(torch.equal(a.data, b.data) for a, b in zip(arrays, again, strict=True))


@pytest.mark.parametrize("channels", [3, 6, 8])
def test_every_channel_of_an_array_is_heard(channels: int) -> None:
    for channel in range(channels):
        audio = np.zeros((channels, 16000), np.float32)
        audio[channel] = tone(1.0, 16000)[0]
        [window] = sound_windows(audio, 16000, INPUTS)
        assert window.data.abs().max() == pytest.approx(0.5 / channels, rel=0.01)


def test_integers_are_waveforms_too() -> None:
    audio = np.array([0, 16384, -32768, 32767] * 4000, np.int16)
    [window] = sound_windows(audio, 16000, INPUTS)
    assert window.data[:4].tolist() == pytest.approx([0, 0.5, -1, 1], abs=1e-4)
    [unsigned] = sound_windows((audio.astype(np.int32) // 256 + 128).astype(np.uint8), 16000, INPUTS)
    assert (unsigned.data - window.data).abs().max() < 0.01


def test_frames_give_what_a_file_of_them_gives(tmp_path: Path) -> None:
    frames = moving(60)
    path = write(tmp_path / "a.mov", frames, None, codec="png", pix_fmt="rgb24")
    files, arrays = list(windows(path, INPUTS)), list(frame_windows(np.stack(frames), 25, INPUTS))
    assert [w.times for w in files] == [pytest.approx(w.times, abs=2e-3) for w in arrays]
    for a, b in zip(files, arrays, strict=True):
        assert a.data.shape == b.data.shape and (a.data.int() - b.data.int()).abs().max() <= 1
    first = list(frame_windows(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2), 25, INPUTS))
    assert all(torch.equal(a.data, b.data) for a, b in zip(arrays, first, strict=True))


SOUND = np.zeros(16000, np.float32)


@pytest.mark.parametrize(
    ("waveform", "rate", "told"),
    [
        (SOUND, 0, "rate=0 must be"),
        (SOUND, -5, "rate=-5 must be"),
        (SOUND, 44100.5, "rate=44100.5 must be"),
        (SOUND[:0], 16000, "0 samples at 16000 Hz is under 25 ms"),
        (np.full(16000, np.nan), 16000, "not finite"),
        (np.full(16000, np.inf), 16000, "not finite"),
        (np.zeros((2, 3, 4)), 16000, r"\[S\], \[C, S\] or \[S, C\], not float64 \[2, 3, 4\]"),
        (np.array(["a"]), 16000, "must be numbers"),
        (np.zeros((9, 16000)), 16000, "9 channels is more than 8"),
    ],
)
def test_a_waveform_that_cannot_be_is_refused(waveform: Any, rate: float, told: str) -> None:
    with pytest.raises(StellaError, match=told):
        list(sound_windows(waveform, rate, INPUTS))


@pytest.mark.parametrize(
    ("frames", "fps", "told"),
    [
        (np.zeros((4, 8, 8, 3), np.uint8), 0, "fps=0 must lie in"),
        (np.zeros((0, 8, 8, 3), np.uint8), 25, "hold no picture"),
        (np.zeros((4, 8, 8, 3)), 25, r"must be uint8 .* not float64 \[4, 8, 8, 3\]"),
        (np.zeros((4, 8, 8), np.uint8), 25, r"not uint8 \[4, 8, 8\]"),
    ],
)
def test_frames_that_cannot_be_are_refused(frames: Any, fps: float, told: str) -> None:
    with pytest.raises(StellaError, match=told):
        list(frame_windows(frames, fps, INPUTS))


@pytest.mark.parametrize("overlap", [-0.1, 1.0, float("nan")])
def test_an_overlap_out_of_range_is_refused(overlap: float) -> None:
    with pytest.raises(StellaError, match="is the share of a window"):
        list(sound_windows(SOUND, 16000, INPUTS, overlap))


# ---- inputs


def test_inputs_normalise_as_training_does() -> None:
    waveforms = torch.randn(2, 16000, generator=torch.Generator().manual_seed(0)) * 0.1
    lengths = torch.tensor([16000, 9000])
    assert torch.equal(INPUTS.spectrogram(waveforms, lengths), fbank(waveforms, lengths, frames=100))
    other = Inputs(1.0, 32, 40, 3, 0.6, 100, mean=0.0, std=1.0)
    assert torch.allclose((other.spectrogram(waveforms) - MEAN) / STD, INPUTS.spectrogram(waveforms), atol=1e-6)


def test_inputs_of_known_sizes_are_the_papers() -> None:
    assert derived(224, 1024, 4) == Inputs()
    for wrong in ({"duration": 0.0}, {"pixels": 0}, {"span": -1.0}, {"std": 0.0}):
        with pytest.raises(StellaError):
            Inputs(**wrong)  # type: ignore[arg-type]

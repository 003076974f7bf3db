"""Files like those of phones and recorders: every container, turned, uneven, with and without a track."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from helpers.media_files import tone, write

X264 = {"preset": "ultrafast", "g": "30"}


def moving(count: int, width: int = 64, height: int = 48, seed: int = 0) -> list[np.ndarray]:
    """A field of blocks that moves, so that every frame differs."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8 + 8, 3), dtype=np.uint8)
    field = blocks.repeat(8, 0).repeat(8, 1)
    return [np.ascontiguousarray(field[:, i % 64 : i % 64 + width]) for i in range(count)]


def noisy(seconds: float, rate: int, channels: int = 2) -> np.ndarray:
    noise = np.random.default_rng(1).standard_normal((channels, round(seconds * rate))).astype(np.float32)
    return (tone(seconds, rate, channels, hertz=330) + 0.05 * noise).clip(-1, 1)


def rotated(path: Path, seconds: float = 3.0) -> Path:
    """Recorded upright: stored on its side with a display matrix that turns it by 90 degrees."""
    made = write(path, moving(round(25 * seconds)), noisy(seconds, 48000), rate=48000, layout="stereo", options=X264)
    data, one = bytearray(made.read_bytes()), 1 << 16
    plain = np.array([one, 0, 0, 0, one, 0, 0, 0, 1 << 30], ">i4").tobytes()
    turned = np.array([0, one, 0, -one, 0, 0, 0, 0, 1 << 30], ">i4").tobytes()
    at = data.index(plain, data.index(b"tkhd"))  # that of the first track
    data[at : at + len(plain)] = turned
    made.write_bytes(bytes(data))
    return made


def phone_files(folder: Path, seconds: float = 3.0) -> dict[str, Path]:
    count, stereo = round(25 * seconds), {"rate": 48000, "layout": "stereo"}
    sound = noisy(seconds, 48000)
    uneven = np.cumsum(np.random.default_rng(2).uniform(0.01, 0.11, count))
    times = [0.0, *uneven[uneven < seconds - 0.1].tolist()]
    vp9 = {"codec": "libvpx-vp9", "audio_codec": "libopus", "options": {"deadline": "realtime", "cpu-used": "8"}}
    return {
        "vertical": write(folder / "v.mp4", moving(count, 48, 96), sound, options=X264, **stereo),
        "rotated": rotated(folder / "r.mp4", seconds),
        "uneven": write(folder / "u.mp4", moving(len(times)), sound, times=times, options=X264, **stereo),
        "mkv": write(folder / "k.mkv", moving(count), sound, audio_codec="ac3", options=X264, **stereo),
        "webm": write(folder / "w.webm", moving(count), sound, **vp9, **stereo),
        "mov": write(folder / "m.mov", moving(count), sound, audio_codec="pcm_s16le", options=X264, **stereo),
        "avi": write(folder / "a.avi", moving(count), sound, codec="mpeg4", audio_codec="mp3", **stereo),
        "ts": write(folder / "t.ts", moving(count), sound, options=X264, **stereo),
    }


def hour(path: Path, seconds: int = 3600) -> Path:
    """An hour at one frame in two seconds, with sound at 16 kHz."""
    frames = moving(seconds // 2, 32, 32)
    sound = np.resize(noisy(8.0, 16000, 1), (1, seconds * 16000))
    return write(path, frames, sound, fps=0.5, options={"preset": "ultrafast", "g": "60"}, audio_codec="mp2")


def with_cover(path: Path, audio: np.ndarray, rate: int) -> Path:
    """A sound file with a cover picture, as music has it."""
    with av.open(str(path), "w") as out:
        sound = out.add_stream("mp3", rate=rate, layout="stereo")
        cover = out.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        frame = av.VideoFrame.from_ndarray(moving(1)[0], format="rgb24").reformat(format="yuvj420p")
        frame.pts = 0
        for packet in [*cover.encode(frame), *cover.encode()]:
            out.mux(packet)
        raw = av.AudioFrame.from_ndarray(audio, format="fltp", layout="stereo")
        raw.sample_rate, raw.pts, raw.time_base = rate, 0, Fraction(1, rate)
        resampler = av.AudioResampler("s16p", "stereo", rate)
        for piece in [*resampler.resample(raw), *resampler.resample(None)]:
            if piece is not None:
                out.mux(sound.encode(piece))
        out.mux(sound.encode())
    return path


SOUNDS: dict[str, Callable[[Path, np.ndarray], Path]] = {
    name: lambda path, audio, codec=codec: write(
        path, None, audio, audio_codec=codec, rate=48000, layout="stereo", audio_options={"strict": "-2"}
    )
    for name, codec in {
        "a.wav": "pcm_s16le",
        "a.flac": "flac",
        "a.mp3": "mp3",
        "a.ogg": "vorbis",
        "a.opus": "libopus",
        "a.m4a": "aac",
        "a.aac": "aac",
        "a.aiff": "pcm_s16be",
    }.items()
}

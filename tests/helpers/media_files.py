"""Real media files, written by the tests that read them."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

CLIPS = Path(__file__).parents[1] / "data" / "clips"


def level_frame(level: int, width: int = 64, height: int = 48) -> np.ndarray:
    """One grey picture, uint8 [H, W, 3]: its level tells a test which frame it sees."""
    return np.full((height, width, 3), level, np.uint8)


def tone(seconds: float, rate: int, channels: int = 1, hertz: float = 440.0, level: float = 0.5) -> np.ndarray:
    """float32 [channels, S]."""
    t = np.arange(round(seconds * rate)) / rate
    return np.repeat(level * np.sin(2 * np.pi * hertz * t)[None], channels, 0).astype(np.float32)


def write(
    path: Path,
    frames: Sequence[np.ndarray] | None,
    audio: np.ndarray | None,
    *,
    fps: float = 25,
    times: Sequence[float] | None = None,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    rate: int = 16_000,
    audio_codec: str = "aac",
    audio_options: dict[str, str] | None = None,
    layout: str = "mono",
    audio_start: float = 0.0,
    audio_lead: float = 0.0,
) -> Path:
    """Pictures [H, W, 3] at `times` (or at a fixed rate) and audio float32 [channels, S] into a file of any kind.

    Audio packets stand `audio_lead` seconds before the pictures of their time.
    """
    packets: list[Any] = []
    with av.open(str(path), "w", options={"max_interleave_delta": "1"} if audio_lead else {}) as out:
        if frames is not None:
            video = out.add_stream(codec, rate=Fraction(fps).limit_denominator(1000), options=options or {})
            video.height, video.width = frames[0].shape[:2]
            video.pix_fmt = pix_fmt
            video.codec_context.time_base = Fraction(1, 1000) if times is not None else 1 / Fraction(fps)
        if audio is not None:
            sound = out.add_stream(audio_codec, rate=rate, layout=layout, options=audio_options or {})
        if frames is not None:
            for i, pixels in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=pix_fmt)
                frame.pts = i if times is None else round(times[i] * 1000)
                frame.time_base = video.codec_context.time_base
                packets += video.encode(frame)
            packets += video.encode()
        if audio is not None:
            sample_format = sound.codec_context.format.name
            resampler = av.AudioResampler(sample_format, layout, rate)
            raw = av.AudioFrame.from_ndarray(audio, format="fltp", layout=layout)
            raw.sample_rate = rate
            for frame in [*resampler.resample(raw), *resampler.resample(None)]:
                if frame is not None:
                    frame.pts, frame.time_base = round(audio_start * rate), Fraction(1, rate)
                    packets += sound.encode(frame)
            packets += sound.encode()

        def place(packet: Any) -> float:
            return float(packet.dts * packet.time_base) - audio_lead * (packet.stream.type == "audio")

        for packet in sorted(packets, key=place):  # tracks interleaved
            out.mux(packet)
    return path


def write_video(path: Path, seconds: float = 1.0, *, sound: bool = True, seed: int = 0) -> Path:
    """At 8 frames a second, red rises by 10 a frame, over a pattern of its own, with a tone of 300 + 10·seed Hz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pattern = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1)
    frames = [pattern.copy() for _ in range(round(8 * seconds))]
    for number, frame in enumerate(frames):
        frame[..., 0] = min(255, 10 * number)
    audio = tone(seconds, 16_000, hertz=300 + 10 * seed) if sound else None
    return write(path, frames, audio, fps=8, options={"preset": "ultrafast", "crf": "8"})

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

WriteVideo = Callable[..., Path]


@pytest.fixture(scope="session")
def write_video() -> WriteVideo:
    return _write_video


def _write_video(
    path: Path,
    seconds: float = 1.0,
    *,
    fps: int = 8,
    width: int = 64,
    height: int = 48,
    sound: bool = True,
    seed: int = 0,
) -> Path:
    """An H.264 file whose red rises by 10 a frame, over a pattern of its own, with a tone of 300 + 10·seed Hz."""
    av = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    pattern = np.random.default_rng(seed).integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    pattern = pattern.repeat(16, 0).repeat(16, 1)[:height, :width]
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast", "crf": "8"})
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        audio = container.add_stream("aac", rate=16_000, layout="mono") if sound else None
        for number in range(round(seconds * fps)):
            picture = pattern.copy()
            picture[..., 0] = min(255, 10 * number)
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode(None))
        if audio:
            times = np.arange(round(seconds * 16_000), dtype=np.float32) / 16_000
            tone = 0.5 * np.sin(2 * np.pi * (300 + 10 * seed) * times)
            for begin in range(0, len(tone), 1024):
                frame = av.AudioFrame.from_ndarray(tone[None, begin : begin + 1024], format="fltp", layout="mono")
                frame.sample_rate, frame.pts, frame.time_base = 16_000, begin, Fraction(1, 16_000)
                container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
    return path

"""Writes frames and a waveform as an mp4 (H.264 and AAC) that any player plays and `decode` reads back in sync."""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stella.clip import SAMPLE_RATE
from stella.errors import StellaError, require
from stella.files import whole
from stella.media.codecs import make_scaler

CRF = "18"  # quality of H.264: 0 (lossless) to 51
BT601 = 6  # FFmpeg's number for the colour space that its scaler assumes for untagged video


def encode(path: Path | str, frames: Tensor, waveform: Tensor, fps: float) -> None:
    """Write frames uint8 [N, 3, H, W] and a waveform float32 [S] at 16 kHz; frame i is shown from i / fps on.

    The file appears under its name only when it is whole. AAC's priming samples go into the mp4's edit list, so that
    sample 0 plays at time 0.
    """
    path = Path(path)
    _check(path, frames, waveform, fps)
    codec = "libx264" if "libx264" in require("av").codecs_available else "mpeg4"  # wheels without x264; larger files
    quality = {"crf": CRF, "preset": "veryfast"} if codec == "libx264" else {"qscale": "3"}
    with new_mp4(path) as container:
        rate = Fraction(fps).limit_denominator(1001)
        keyframes = {"g": str(max(1, round(fps)))}  # one a second, for fast seeks
        video = container.add_stream(codec, rate=rate, options=quality | keyframes)
        video.height, video.width = frames.shape[-2:]
        video.pix_fmt = "yuv420p"
        context = video.codec_context
        context.thread_count = 1  # clips are written in parallel, not their frames
        context.colorspace = context.color_primaries = context.color_trc = BT601
        context.color_range = 1
        audio = container.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
        audio.bit_rate = 96_000
        _write(container, video, audio, frames, waveform)


@contextmanager
def new_mp4(path: Path) -> Iterator[Any]:
    """A PyAV container to write to, which becomes `path` when it is whole. The block reads media in generators alone:
    FFmpeg's errors in it are told as those of writing `path`."""
    av = require("av")
    try:
        with (
            whole(path) as fresh,
            av.open(f"file:{fresh}", "w", format="mp4", options={"movflags": "+faststart"}) as container,
        ):
            yield container
    except (OSError, av.error.FFmpegError) as error:
        why = f"cannot be written ({error.strerror}); check the folder and its space"
        raise StellaError(f"{path} {why}") from error


def _write(container: Any, video: Any, audio: Any, frames: Tensor, waveform: Tensor) -> None:
    av = require("av")
    pixels = frames.permute(0, 2, 3, 1).contiguous().cpu().numpy()  # [N, H, W, 3]
    own, how = make_scaler(), {"format": "yuv420p", "dst_colorspace": "ITU601", "dst_color_range": "MPEG", "threads": 1}
    for i, picture in enumerate(pixels):
        frame = own.reformat(av.VideoFrame.from_ndarray(picture, format="rgb24"), **how)
        frame.pts, frame.time_base = i, 1 / video.codec_context.framerate
        container.mux(video.encode(frame))
    container.mux(video.encode())
    samples = waveform.detach().to("cpu", torch.float32).clamp(-1, 1).numpy()[None]
    sound = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout="mono")
    sound.sample_rate, sound.pts, sound.time_base = SAMPLE_RATE, 0, Fraction(1, SAMPLE_RATE)
    container.mux(audio.encode(sound))
    container.mux(audio.encode())


def _check(path: Path, frames: Tensor, waveform: Tensor, fps: float) -> None:
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[1] != 3 or not len(frames):
        raise StellaError(f"{path}: frames must be uint8 [N, 3, H, W], not {frames.dtype} {list(frames.shape)}")
    if waveform.dim() != 1 or not waveform.is_floating_point() or not len(waveform):
        raise StellaError(f"{path}: the waveform must be float [S], not {waveform.dtype} {list(waveform.shape)}")
    if not bool(waveform.isfinite().all()):
        raise StellaError(f"{path}: the waveform has values that are not finite; correct their source")
    if not 0 < fps <= 1000:
        raise StellaError(f"{path}: fps must lie in 0…1000, not {fps}")
    height, width = frames.shape[-2:]
    if height % 2 or width % 2:
        raise StellaError(f"{path}: H.264 takes even sizes, not {width}×{height}; crop or pad by one pixel")

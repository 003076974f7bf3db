"""Windows of frames and waveforms in memory, made as `windows` makes those of files."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stella.clip import SAMPLE_RATE
from stella.errors import StellaError, require
from stella.media.codecs import make_scaler
from stella.media.convert import RING, Sound, picture
from stella.media.inputs import Inputs
from stella.media.windows import Window, hop_of, starts


def frame_windows(frames: Any, fps: float, inputs: Inputs, overlap: float = 0.0) -> Iterator[Window]:
    """Windows of frames uint8 [N, H, W, 3] or [N, 3, H, W]; frame i is shown from i / fps on."""
    pixels, hop = _checked_frames(frames, fps), hop_of(inputs, overlap)
    length = len(pixels) / fps
    for start in starts(length, inputs.duration, hop):
        end = min(start + inputs.duration, length)
        times = inputs.plan().times(start, end)
        shown = [min(len(pixels) - 1, math.floor((moment + 1e-6) * fps)) for moment in times]
        data = torch.stack([_scaled(pixels[i], inputs.size) for i in shown])
        yield Window("video", start, end, data, times)


def sound_windows(waveform: Any, rate: float, inputs: Inputs, overlap: float = 0.0) -> Iterator[Window]:
    """Windows of a waveform [S], [C, S] or [S, C] at any rate; channels, at most 8, are averaged."""
    samples, hop = _checked_samples(waveform, rate), hop_of(inputs, overlap)
    length = samples.shape[1] / rate
    for start in starts(length, inputs.duration, hop):
        end = min(start + inputs.duration, length)
        yield Window("audio", start, end, torch.from_numpy(_at_16_khz(samples, int(rate), start, end)))


def _checked_frames(frames: Any, fps: float) -> Tensor:
    """uint8 [N, 3, H, W]."""
    pixels = torch.as_tensor(np.asarray(frames) if not isinstance(frames, Tensor) else frames).cpu()
    if pixels.dim() != 4 or pixels.dtype != torch.uint8 or 3 not in (pixels.shape[1], pixels.shape[3]):
        shape = f"{str(pixels.dtype).removeprefix('torch.')} {list(pixels.shape)}"
        raise StellaError(f"frames must be uint8 [N, H, W, 3] or [N, 3, H, W] with a value of 0…255, not {shape}")
    if not pixels.numel():
        raise StellaError(f"frames of shape {list(pixels.shape)} hold no picture; give at least one frame")
    if not 0 < fps <= 1000:
        raise StellaError(f"fps={fps} must lie in 0…1000: give the frames' rate, as (frames, 25)")
    return pixels if pixels.shape[1] == 3 else pixels.permute(0, 3, 1, 2)


def _checked_samples(waveform: Any, rate: float) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """float32 [C, S]."""
    samples = waveform.detach().cpu().numpy() if isinstance(waveform, Tensor) else np.asarray(waveform)
    if samples.dtype.kind not in "fiu" or samples.ndim not in (1, 2):
        raise StellaError(
            f"a waveform must be numbers [S], [C, S] or [S, C], not {samples.dtype} {list(samples.shape)}"
        )
    if rate != int(rate) or not 1000 <= rate <= 768_000:
        raise StellaError(f"rate={rate} must be a whole number of samples per second, 1,000 to 768,000")
    if (kind := samples.dtype.kind) in "iu":  # unsigned samples are silent at their middle
        half = 2 ** (8 * samples.itemsize - 1)
        samples = (samples.astype(np.float64) - half * (kind == "u")) / half
    samples = samples[None] if samples.ndim == 1 else samples if samples.shape[0] <= samples.shape[1] else samples.T
    if len(samples) > 8:
        raise StellaError(f"a waveform of {len(samples)} channels is more than 8; mix it down first")
    if samples.shape[1] < rate / 40:
        raise StellaError(f"a waveform of {samples.shape[1]} samples at {rate} Hz is under 25 ms; give a longer one")
    if not np.isfinite(samples).all():
        raise StellaError("the waveform has values that are not finite (NaN or infinity); correct their source")
    return np.ascontiguousarray(samples, dtype=np.float32)


def _at_16_khz(samples: "np.ndarray[Any, np.dtype[np.float32]]", rate: int, start: float, end: float) -> Any:
    """float32 [S] from `start` to `end`, by the resampler that files go through."""
    if rate == SAMPLE_RATE and len(samples) == 1:  # nothing to do, and nothing to install
        return samples[0, round(start * rate) : round(end * rate)].copy()
    first = max(0, math.floor((start - RING) * 100)) * rate // 100
    piece = np.ascontiguousarray(samples[:, first : math.ceil((end + RING) * rate)])
    if len(piece) > 2:  # which channel is which loudspeaker is unknown
        piece = piece.mean(0, keepdims=True)
    layout = "mono" if len(piece) == 1 else "stereo"
    frame = require("av").AudioFrame.from_ndarray(piece, format="fltp", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = rate, first, Fraction(1, rate)
    sound = Sound(start, end)
    sound.add(frame, 1 / rate)
    return sound.waveform()


def _scaled(pixels: Tensor, size: int) -> Tensor:
    """uint8 [3, H, W] with a short side of `size`."""
    if min(pixels.shape[1:]) == size and max(pixels.shape[1:]) <= 2 * size:
        return pixels
    image = np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())
    frame = require("av").VideoFrame.from_ndarray(image, format="rgb24")
    return picture(frame, make_scaler(), None, size)

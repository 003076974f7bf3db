"""Converts what FFmpeg decodes: audio frames to a waveform at 16 kHz, a video frame to a small upright picture."""

import math
from contextlib import suppress
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stella.clip import SAMPLE_RATE
from stella.errors import require
from stella.media.codecs import exact

JITTER = 0.05  # seconds of timestamp error below which audio counts as continuous
RING = 0.05  # seconds of audio around the clip that the resampling filter needs
ASPECT_MOST = 2  # wider or taller pictures are centre-cropped to this aspect ratio before scaling


class Sound:
    """Collects decoded audio frames; each continuous run is resampled once and placed by its timestamps."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, end
        self.runs: list[tuple[float, Any, list[Any]]] = []  # time of the first sample, resampler, frames at 16 kHz
        self.kind: object = None
        self.due = -math.inf  # when the next frame of this run begins

    def add(self, frame: Any, tick: float) -> None:
        """`tick` is the stream's time base in seconds: frames of a flushed decoder have none of their own."""
        begin = self.due if frame.pts is None else frame.pts * tick
        end = begin + frame.samples / frame.sample_rate
        if end < self.begin - RING or begin > self.end + RING:
            return
        kind = (frame.format.name, frame.layout.name, frame.sample_rate)
        if kind != self.kind or abs(begin - self.due) > JITTER:
            # keeps a float mix below 1: stereo becomes the mean, as for integer samples
            options = {"rematrix_maxval": "1.0"}
            resampler = require("av").AudioResampler("fltp", "mono", SAMPLE_RATE, options=options)
            self.runs.append((begin, resampler, []))
            self.kind, self.due = kind, begin
        frame.pts = None
        _, resampler, out = self.runs[-1]
        out += resampler.resample(frame)
        self.due += frame.samples / frame.sample_rate

    def waveform(self) -> Any:
        """float32 [S] from the beginning of the clip to the last sample in it; empty if there is none."""
        wave = np.zeros(round((self.end - self.begin) * SAMPLE_RATE), np.float32)
        last = 0
        for time_0, resampler, out in self.runs:
            frames = [f for f in (*out, *resampler.resample(None)) if f is not None]
            samples = np.concatenate([wave[:0], *(f.to_ndarray()[0] for f in frames)])
            at = round((time_0 - self.begin) * SAMPLE_RATE)
            samples = samples[max(0, -at) : max(0, len(wave) - at)]
            wave[max(0, at) : max(0, at) + len(samples)] = samples
            last = max(last, max(0, at) + len(samples) if len(samples) else 0)
        return wave[:last]


def picture(frame: Any, scaler: Any, pixel_aspect: Fraction | None, size: int) -> Tensor:
    """uint8 [3, H, W] as a player shows it: square pixels, upright, with a short side of `size`."""
    matrix = _display_matrix(frame)
    how = {"format": "rgb24", "interpolation": exact(), "threads": 1}
    width, height = frame.width * float(pixel_aspect or 1), float(frame.height)
    if max(width, height) > ASPECT_MOST * min(width, height):
        keep_w = max(1, round(frame.width * min(1, ASPECT_MOST * height / width)))
        keep_h = max(1, round(frame.height * min(1, ASPECT_MOST * width / height)))
        x, y = (frame.width - keep_w) // 2, (frame.height - keep_h) // 2
        pixels = scaler.reformat(frame, **how).to_ndarray()[y : y + keep_h, x : x + keep_w]
        frame = type(frame).from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
        width, height = min(width, ASPECT_MOST * height), min(height, ASPECT_MOST * width)
    scale = size / min(width, height)
    small = scaler.reformat(frame, round(width * scale), round(height * scale), **how)
    return _upright(torch.from_numpy(small.to_ndarray()).permute(2, 0, 1), matrix)


def _display_matrix(frame: Any) -> Any:
    """Nine integers, or None. `frame.side_data` would keep a frame until the garbage collector runs: it refers back."""
    container = require("av.sidedata.sidedata").SideDataContainer
    with suppress(KeyError, ValueError):  # there is none, or PyAV 18 does not know all of the frame's data
        return np.frombuffer(container(frame)["DISPLAYMATRIX"], np.int32)
    return None


def _upright(image: Tensor, matrix: Any) -> Tensor:
    """Rotate and flip [3, H, W] by the file's display matrix: x' = a x + c y, y' = b x + d y."""
    if matrix is None:
        return image
    a, b, c, d = (int(matrix[i]) for i in (0, 1, 3, 4))
    if abs(b) > abs(a):
        image, a, d = image.transpose(1, 2), c, b
    return image.flip([axis for axis, sign in ((2, a), (1, d)) if sign < 0])

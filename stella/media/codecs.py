"""JPEG and FLAC in memory: how shards store frames and sound."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stella.clip import SAMPLE_RATE
from stella.errors import require
from stella.media.files import LIMITS, open_bytes

JPEG_QUANTISER = 3  # 1 (best) to 31; at 256 px about 38 dB and 10 KB a frame


def encode_jpegs(frames: Tensor) -> list[bytes]:
    """JPEG files of frames uint8 [N, 3, H, W]."""
    av = require("av")
    codec = av.CodecContext.create("mjpeg", "w")
    codec.height, codec.width = frames.shape[-2:]
    codec.pix_fmt, codec.framerate = "yuvj420p", 1
    codec.qmin = codec.qmax = JPEG_QUANTISER
    own, how = make_scaler(), {"format": "yuvj420p", "interpolation": exact(), "threads": 1}
    packets = []
    for number, pixels in enumerate(frames.permute(0, 2, 3, 1).contiguous().numpy()):
        frame = own.reformat(av.VideoFrame.from_ndarray(pixels, format="rgb24"), **how)
        frame.pts = number
        packets += codec.encode(frame)
    return [bytes(packet) for packet in [*packets, *codec.encode(None)]]


def decode_jpegs(files: list[bytes], size: int | None = None) -> Tensor:
    """Frames uint8 [N, 3, H, W], scaled to a short side of `size` (None: as stored). ValueError for other content."""
    av = require("av")
    codec = av.CodecContext.create("mjpeg", "r")
    codec.options = LIMITS.codec_options
    frames = [frame for file in files for frame in codec.decode(av.Packet(file))] + codec.decode(None)
    if len(frames) != len(files):
        raise ValueError(f"{len(files)} JPEG files hold {len(frames)} pictures")
    height, width = frames[0].height, frames[0].width
    scale = size / min(height, width) if size else 1.0
    height, width = max(1, round(height * scale)), max(1, round(width * scale))
    own, how = make_scaler(), {"format": "rgb24", "interpolation": exact(), "threads": 1}
    frames = [own.reformat(frame, width, height, **how) for frame in frames]
    pixels = np.stack([frame.to_ndarray() for frame in frames])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def encode_flac(waveform: Tensor) -> bytes:
    """A FLAC file of a waveform float32 [S] at 16 kHz, rounded to 16 bits."""
    av = require("av")
    samples = (waveform * 32768).round().clamp(-32768, 32767).to(torch.int16)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=SAMPLE_RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples.numpy()[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = SAMPLE_RATE, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def decode_flac(file: bytes) -> Tensor:
    """The waveform float32 [S] of a 16-bit FLAC file. ValueError for other content."""
    with open_bytes(file, "flac") as container:
        frames = list(_flac_frames(container))
    if {(frame.format.name, frame.sample_rate) for frame in frames} != {("s16", SAMPLE_RATE)}:
        raise ValueError("a FLAC file holds no sound of 16 bits at 16 kHz")
    pieces = [frame.to_ndarray()[0] for frame in frames]
    return torch.from_numpy(np.concatenate(pieces)).float() / 32768


def _flac_frames(container: Any) -> Iterator[Any]:
    """The frames of a FLAC file, up to the number of samples in its header. (Where noise in the last frame looks like
    the beginning of another, FFmpeg gives that piece once more, and it cannot be decoded.)"""
    left = container.streams.audio[0].duration or -1
    for packet in container.demux(audio=0):
        for frame in packet.decode():
            left -= frame.samples
            yield frame
        if left == 0:
            return


def make_scaler() -> Any:
    """A scaler for all frames of a file; its set-up is expensive. (`frame.reformat` uses one that PyAV keeps for the
    process, with threads of its own: it hangs in a fork.) Pass `threads=1`, since files are read in parallel."""
    return require("av.video.reformatter").VideoReformatter()


def exact() -> Any:
    """Interpolation flags for exact colours: the scaler's default shortcuts darken them by one or two steps."""
    flags = require("av.video.reformatter").Interpolation
    return flags.BILINEAR | flags.ACCURATE_RND | flags.FULL_CHR_H_INT

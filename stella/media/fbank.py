"""Kaldi's log-mel filterbanks for a whole batch, in plain torch on any device.

Settings as in AST and CAV-MAE: 25 ms frames every 10 ms, Hanning window, pre-emphasis 0.97, DC removed, no dither, no
energy, power spectrum, mel filters from 20 Hz to half the sampling rate. They also subtract the waveform's mean first,
which removing each frame's DC makes unnecessary.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import SAMPLE_RATE, send
from stella.errors import StellaError

LENGTH, SHIFT, FFT = 400, 160, 512  # samples
PREEMPHASIS = 0.97
LOW_HZ = 20.0
FLOOR = torch.finfo(torch.float32).eps  # Kaldi's, under the logarithm
CACHED = 1 << 18  # samples processed at a time on a CPU: fits its cache, twice as fast as a whole batch
MEAN, STD = -5.081, 4.4849  # of the log-mel values, from the paper


def fbank(
    waveforms: Tensor, lengths: Tensor | None = None, *, frames: int = 1024, mels: int = 128, normalise: bool = True
) -> Tensor:
    """[B, S] waveforms at 16 kHz → [B, frames, mels].

    `lengths` [B] is the number of samples in each row, the rest being padding. Frames beyond it are zero before
    normalisation, so padding is `-MEAN / STD` after it. Longer clips are cut.
    """
    if waveforms.dim() != 2 or not len(waveforms) or waveforms.shape[1] < LENGTH:
        raise StellaError(f"fbank takes waveforms [B, S] of at least {LENGTH} samples, not {list(waveforms.shape)}")
    waveforms = waveforms[:, : LENGTH + SHIFT * (frames - 1)].float()
    rows = max(1, CACHED // waveforms.shape[1]) if waveforms.device.type == "cpu" else len(waveforms)
    spec = torch.cat([_log_mel(block, mels) for block in torch.split(waveforms, rows)])  # [B, time, mels]
    if lengths is not None:
        kept = held(send(lengths, spec.device))
        spec = spec.where((torch.arange(spec.shape[1], device=spec.device) < kept[:, None])[..., None], 0.0)
    spec = F.pad(spec, (0, 0, 0, frames - spec.shape[1]))
    return (spec - MEAN) / STD if normalise else spec


def held(samples: Tensor) -> Tensor:
    """How many frames waveforms of so many samples fill."""
    return (samples - LENGTH).div(SHIFT, rounding_mode="floor") + 1


def _log_mel(waveforms: Tensor, mels: int) -> Tensor:
    window, bank = _constants(mels, waveforms.device)
    # Kaldi removes a frame's mean, then pre-emphasises. In the other order (1 - 0.97) of the mean remains, which is
    # subtracted below. The first sample of a frame, which Kaldi treats specially, is zeroed by the window.
    emphasised = F.pad(waveforms[:, 1:] - PREEMPHASIS * waveforms[:, :-1], (1, 0))  # [B, S]
    mean = waveforms.unfold(1, LENGTH, SHIFT).mean(-1, keepdim=True)  # [B, time, 1]
    pieces = emphasised.unfold(1, LENGTH, SHIFT) * window  # [B, time, LENGTH]
    pieces.addcmul_(mean, window, value=PREEMPHASIS - 1)
    parts = torch.view_as_real(torch.fft.rfft(pieces, FFT)[..., :-1]).flatten(-2)  # [B, time, FFT]: re, im, re, …
    return (parts.square_() @ bank).clamp_(min=FLOOR).log_()  # [B, time, mels]


@functools.lru_cache(maxsize=16)
def _constants(mels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The window [LENGTH], and the mel filters [FFT, mels] with one row each for the real and imaginary part."""
    i = torch.arange(LENGTH, dtype=torch.float64)
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * i / (LENGTH - 1))
    low, high = _mel(torch.tensor([LOW_HZ, SAMPLE_RATE / 2], dtype=torch.float64))
    edges = low + (high - low) / (mels + 1) * torch.arange(mels + 2)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    mel = _mel(torch.arange(FFT // 2, dtype=torch.float64) * SAMPLE_RATE / FFT)[:, None]  # [FFT/2, 1]
    rise, fall = (mel - left) / (centre - left), (right - mel) / (right - centre)
    bank = torch.minimum(rise, fall).clamp(min=0)  # [FFT/2, mels]
    return window.float().to(device), bank.repeat_interleave(2, 0).float().to(device)


def _mel(hertz: Tensor) -> Tensor:
    return 1127.0 * torch.log1p(hertz / 700.0)

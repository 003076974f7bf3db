"""Renders sound: additive synthesis of two bursts, an occasional off-screen sound, and noise."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from stella.data.scenes.classes import AUDIBLE, TIMBRES
from stella.data.scenes.draw import LONGEST, Draw

PARTIALS = 8
LOWEST = 160.0  # Hz, at pitch 0; pitch 1 is three octaves higher
_HARMONIC = tuple(range(1, PARTIALS + 1))
# Per timbre: frequency ratios, amplitudes, attack and decay in seconds.
_RECIPES: dict[str, tuple[tuple[float, ...], tuple[float, ...], float, float]] = {
    "flute": ((1, 2, 3), (1, 0.15, 0.04), 0.03, 9.0),
    "square": ((1, 3, 5, 7, 9, 11, 13, 15), (1, 0.33, 0.2, 0.14, 0.11, 0.09, 0.08, 0.07), 0.005, 9.0),
    "saw": (_HARMONIC, (1, 0.5, 0.33, 0.25, 0.2, 0.17, 0.14, 0.12), 0.005, 9.0),
    "bell": ((1, 2.76, 5.4, 8.93, 0.56), (1, 0.6, 0.4, 0.25, 0.4), 0.002, 0.15),
    "organ": ((0.5, 1, 2, 4, 8), (0.5, 1, 0.8, 0.6, 0.4), 0.02, 9.0),
    "hollow": ((1, 2, 3, 4, 5, 6), (0.15, 1, 0.05, 0.7, 0.05, 0.5), 0.02, 9.0),
    "nasal": (_HARMONIC, (0.25, 0.2, 0.3, 0.8, 1, 0.8, 0.3, 0.2), 0.01, 9.0),
    "buzz": (_HARMONIC, (0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6), 0.005, 9.0),
    "chord": ((1, 1.26, 1.5, 2, 2.52, 3), (1, 0.9, 0.9, 0.5, 0.4, 0.4), 0.02, 9.0),
    "wind": ((0.84, 0.89, 0.93, 0.97, 1.02, 1.07, 1.13, 1.19), (0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4), 0.06, 9.0),
    "pluck": (_HARMONIC, (1, 0.7, 0.45, 0.3, 0.2, 0.15, 0.1, 0.08), 0.002, 0.2),
    "metal": ((1, 1.41, 1.73, 2.24, 2.83, 3.61, 4.36, 5.2), (0.8, 0.7, 0.9, 0.6, 0.7, 0.5, 0.5, 0.4), 0.002, 0.3),
    "reed": ((1, 3, 5, 7), (1, 0.75, 0.5, 0.14), 0.02, 9.0),
    "brass": (_HARMONIC, (0.7, 1, 0.9, 0.6, 0.4, 0.25, 0.15, 0.1), 0.05, 9.0),
    "glass": ((1, 2.32, 4.25, 6.63), (1, 0.3, 0.5, 0.3), 0.002, 0.25),
    "drone": ((0.5, 0.505, 1, 1.01, 1.5, 2, 2.02), (1, 1, 0.7, 0.7, 0.4, 0.3, 0.3), 0.08, 9.0),
    "horn": ((1, 1.2, 2, 2.4, 3, 3.6), (1, 1, 0.4, 0.4, 0.2, 0.2), 0.01, 9.0),
    "choir": ((0.99, 1.01, 1.98, 2.02, 2.97, 3.03, 4, 5), (0.7, 0.7, 0.5, 0.5, 0.6, 0.6, 0.3, 0.1), 0.07, 9.0),
}


@cache
def _recipes(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ratios [timbres, PARTIALS], amplitudes [timbres, PARTIALS] of unit power, and (attack, decay) [timbres, 2]."""
    ratios, amplitudes = torch.ones(len(TIMBRES), PARTIALS), torch.zeros(len(TIMBRES), PARTIALS)
    for row, name in enumerate(TIMBRES):
        ratio, amplitude, *_ = _RECIPES[name]
        ratios[row, : len(ratio)] = torch.tensor(ratio)
        amplitudes[row, : len(ratio)] = torch.tensor(amplitude)
    amplitudes /= amplitudes.square().sum(1, keepdim=True).sqrt()
    shape = torch.tensor([_RECIPES[name][2:] for name in TIMBRES])
    return ratios.to(device), amplitudes.to(device), shape.to(device)


def waveforms(draw: Draw, duration: float, rate: int, device: torch.device) -> Tensor:
    """The clips' sound, float32 [B, S] in [-1, 1]."""

    def tensor(array: object) -> Tensor:
        return torch.as_tensor(array).to(device)

    samples = round(duration * rate)
    reach = math.ceil(LONGEST * samples)
    sound = torch.zeros(len(draw.key), samples + reach, device=device)  # space for a late onset
    own = _Voice(tensor(draw.timbre), tensor(draw.audible), tensor(draw.linked_audible))
    for burst in range(draw.onset.shape[1]):
        onset, length = (tensor(x[:, burst]) * duration for x in (draw.onset, draw.length))
        _add_burst(sound, reach, own, tensor(draw.gain), (onset, length), rate)
    gain, onset, length, pitch = tensor(draw.offscreen).T
    plain = torch.full_like(own.audible, 0.5)
    plain[:, AUDIBLE.index("pitch")] = pitch
    stranger = _Voice(tensor(draw.offscreen_timbre), plain, torch.full_like(own.linked, -1))
    _add_burst(sound, reach, stranger, gain, (onset * duration, length * duration), rate)
    hiss = _noise(tensor(draw.key), samples)
    return (0.25 * sound[:, :samples] + tensor(draw.noise)[:, None] * hiss).clamp_(-1, 1)


class _Voice(NamedTuple):
    timbre: Tensor  # [B]
    audible: Tensor  # [B, 4]
    linked: Tensor  # [B] the audible quantity set by the class's link; -1: none


def _add_burst(sound: Tensor, reach: int, voice: _Voice, gain: Tensor, span: tuple[Tensor, Tensor], rate: int) -> None:
    """Add one burst to every clip's sound, only where it is audible."""
    onset, length = span  # seconds, [B]
    first = (onset * rate).floor().long().clamp_min(0)
    stretch = torch.arange(reach, device=sound.device)
    where = first[:, None] + stretch  # [B, W]
    since = where / rate - onset[:, None]
    sound.scatter_add_(1, where, gain[:, None] * _tone(voice, since, length[:, None]))


def _tone(voice: _Voice, since: Tensor, length: Tensor) -> Tensor:
    """The sound `since` seconds after its onset, [B, W]. Only a class's link gives it tremolo or glide."""
    ratios, amplitudes, shapes = (table[voice.timbre] for table in _recipes(since.device))
    pitch, tremolo, brightness, glide = voice.audible.T[:, :, None]

    def if_linked(quantity: str, value: Tensor) -> Tensor:
        return torch.where(voice.linked[:, None] == AUDIBLE.index(quantity), value, 0)

    frequency = LOWEST * 8**pitch
    # The phase of a tone whose frequency is f·2^(bend·s) is its integral from the burst's middle.
    bend = if_linked("glide", 2.4 * math.log(2) * (glide - 0.5) / length)
    s = (since - length / 2) * bend
    turns = frequency * (since - length / 2) * torch.where(s.abs() < 1e-4, 1 + s / 2, torch.expm1(s) / s)
    tilt = if_linked("brightness", 2.6 * (brightness - 0.65))
    pitched = frequency * ratios  # [B, PARTIALS]
    loud = amplitudes * (pitched / 800).clamp(0.25, 8) ** tilt * (pitched < 7600)
    loud = loud / loud.square().sum(1, keepdim=True).sqrt().clamp_min(1e-6)
    tone = torch.zeros_like(since)
    for k in range(PARTIALS):
        tone += loud[:, k, None] * torch.sin(2 * math.pi * (ratios[:, k, None] * turns + 0.37 * k * k).remainder(1))
    tone *= 1 - if_linked("tremolo", 0.45 + 0.45 * torch.cos(2 * math.pi * 6 * 4**tremolo * since))
    attack, decay = shapes[:, :1], shapes[:, 1:]
    rise, fall = (since / attack).clamp(0, 1), ((length - since) / 0.02).clamp(0, 1)
    return tone * rise * fall * torch.exp(-since.clamp_min(0) / decay)


def _noise(key: Tensor, samples: int) -> Tensor:
    """White noise [B, S], nearly normal, a function of the clip's key only."""
    state = key[:, None] + torch.arange(samples, device=key.device) * -0x61C8864680B583EB
    state = (state ^ (state >> 31)) * 0x7FB5D329728EA185
    state = (state ^ (state >> 27)) * -0x7E25210B43D22BB3  # overflow wraps around, as intended
    parts = [((state >> shift) & 0xFFFF).float() for shift in (0, 16, 32)]
    return (sum(parts[1:], parts[0]) / 65536 - 1.5) * 2

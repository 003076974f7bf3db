"""Patches as quantised DCT coefficients, for the rehearsal memory: at side 16, 72 bytes a patch instead of 768 or 512.

A patch is side × side × channels: RGB pixels, or a piece of a spectrogram. Its DCT is taken over rows, columns and
channels; over R, G, B that gives brightness and two colour differences. Of each channel's coefficients c(u, v) the mean
and the AC coefficients with the largest expected deviations σ(u, v) are kept. The mean and one scale,
s = max |c(u, v)| / σ(u, v), are float16; each AC coefficient takes 4 bits: the level round(7·√(|c|/(σ·s))) and a sign.

The kept coefficients are one matrix product. Everything is static-shaped and stays on the device of its input.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from stella.clip import send

# AC coefficients of each channel in a patch of side 16, by the number of channels (results/codec: rate and distortion).
KEPT = {3: (80, 20, 20), 1: (136,)}
LEVELS = 7  # of a coefficient's magnitude
LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Patching:
    """Where the patches of an array are: `view` is its shape with patches as axes of their own; these axes in `order`
    are positions of patches, then a patch's rows, columns and channels."""

    side: int
    channels: int
    view: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of patches."""
        return math.prod(self.view) // (self.side**2 * self.channels)

    @property
    def kept(self) -> tuple[int, ...]:
        """AC coefficients of each channel: even numbers, since two share a byte."""
        return tuple(2 * round(n * self.side**2 / 512) for n in KEPT[self.channels])

    @property
    def coded_shape(self) -> tuple[int, int]:
        """Patches and bytes of each."""
        return self.count, 4 * self.channels + sum(self.kept) // 2

    def encode(self, values: Tensor) -> Tensor:
        """Arrays [n, …] → uint8 [n, patches, bytes]."""
        axes = values.reshape(-1, *self.view).permute(0, *(axis + 1 for axis in self.order))
        return encode(axes.reshape(-1, self.count, self.side**2 * self.channels), self.side, self.kept)

    def decode(self, code: Tensor) -> Tensor:
        """uint8 [n, patches, bytes] → float32 [n, …] in the shape `view`."""
        axes = decode(code, self.side, self.kept).view(-1, *(self.view[axis] for axis in self.order))
        return axes.permute(0, *(self.order.index(axis) + 1 for axis in range(len(self.order))))


def frames(count: int, size: int, side: int) -> Patching:
    """Frames [T, 3, H, W]."""
    return Patching(side, 3, (count, 3, size // side, side, size // side, side), (0, 2, 4, 3, 5, 1))


def spectrogram(time: int, mel: int, side: int) -> Patching:
    """A spectrogram [time, mel]."""
    return Patching(side, 1, (time // side, side, mel // side, side), (0, 2, 1, 3))


def patches(count: int, side: int, channels: int) -> Patching:
    """Patches [count, side²·channels], each flattened as (row, column, channel)."""
    return Patching(side, channels, (count, side, side, channels), (0, 1, 2, 3))


@torch.no_grad()
def encode(values: Tensor, side: int, kept: tuple[int, ...]) -> Tensor:
    """Patches [..., side²·channels], flattened as (row, column, channel) → uint8 [..., bytes]."""
    basis, deviation, channel = _basis(side, kept, values.device)
    with torch.autocast(values.device.type, enabled=False):
        mean, *parts = torch.split(values.float() @ basis.T, [len(kept), *kept], -1)
        ac = torch.cat(parts, -1) / deviation  # c/σ
        largest = torch.stack([part.abs().amax(-1) for part in torch.split(ac, list(kept), -1)], -1)  # s
        head = torch.cat([mean, largest], -1).clamp(-LARGEST, LARGEST).half()  # [..., 2 · channels]
        scale = head[..., len(kept) :].float()[..., channel]
        share = (ac.abs() / scale).nan_to_num_(0.0, 1.0).clamp_(max=1)  # 0/0 in a constant patch
        level = ((LEVELS * share.sqrt()).round() * ac.sign() + LEVELS + 1).to(torch.uint8)
    return torch.cat([head.view(torch.uint8), level[..., ::2] * 16 + level[..., 1::2]], -1)


@torch.no_grad()
def decode(code: Tensor, side: int, kept: tuple[int, ...]) -> Tensor:
    """The inverse of `encode`, up to quantisation: float32 [..., side²·channels]."""
    basis, deviation, channel = _basis(side, kept, code.device)
    head, packed = code[..., : 4 * len(kept)].contiguous().view(torch.float16), code[..., 4 * len(kept) :]
    mean, scale = head.float().chunk(2, -1)
    level = torch.stack([packed >> 4, packed & 15], -1).flatten(-2).float() - (LEVELS + 1)
    ac = level * level.abs() / LEVELS**2 * deviation * scale[..., channel]
    with torch.autocast(code.device.type, enabled=False):
        return torch.cat([mean, ac], -1).mul_(side**2) @ basis


@lru_cache(maxsize=16)
def _basis(side: int, kept: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The kept rows of the DCT [coefficients, side²·channels], and σ and channel of its AC rows.

    First the channels' means, then their AC coefficients, channel by channel. A row's norm is 1/side, so that means
    are in the units of the values.
    """
    k = torch.arange(side, dtype=torch.float64)
    # Expected deviations: of frames they fall with the diagonal, of spectrograms with the product of both frequencies.
    falls = 1 + k[:, None] + k if len(kept) == 3 else ((1 + k[:, None]) * (1 + k)).sqrt()
    order = falls.flatten().argsort(stable=True)  # by decreasing σ
    rows, columns, channels = dct(side), dct(side), dct(len(kept))
    every = torch.einsum("ui,vj,dc->duvijc", rows, columns, channels).view(len(kept), side**2, -1) / side
    chosen = [order[1 : n + 1] for n in kept]
    basis = torch.cat([every[:, 0], *(every[d, some] for d, some in enumerate(chosen))])
    deviation = torch.cat([1 / falls.flatten()[some] for some in chosen])
    channel = torch.arange(len(kept)).repeat_interleave(torch.tensor(kept))
    return send(basis.float(), device), send(deviation.float(), device), send(channel, device)


def dct(n: int) -> Tensor:
    """The orthonormal DCT-II, float64 [n, n], a frequency a row."""
    i = torch.arange(n, dtype=torch.float64)
    waves = torch.cos(math.pi / n * i[:, None] * (i + 0.5)) * math.sqrt(2 / n)
    waves[0] = math.sqrt(1 / n)
    return waves

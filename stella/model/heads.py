"""Heads of the downstream tasks: what turns a backbone's tokens into classes and masks."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stella.model.vit import init_linear

DILATIONS = (3, 6, 12, 18)


def classifier(dim: int, classes: int, probe: bool = False) -> nn.Module:
    """From the means of the joint audio and video tokens, [B, 2·dim], to logits [B, classes].

    `probe`: one linear layer. Else the published head: Linear, tanh, Linear, LayerNorm, GELU, Linear.
    """
    wide = 2 * dim
    if probe:
        return nn.Linear(wide, classes)
    layers = (
        *(nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, wide)),
        *(nn.LayerNorm(wide), nn.GELU(), nn.Linear(wide, classes)),
    )
    return nn.Sequential(*layers).apply(init_linear)


class MaskDecoder(nn.Module):
    """Masks of the sounding object from the video tokens of two fusion blocks and the mean audio token.

    The first block's tokens become a grid of four times the patches' resolution, the last block's one of twice; each
    meets dilated context and the sound, then both are fused from coarse to fine up to the picture's size. With patches
    of 16 pixels in 224: 14² → 56² and 28² → 224².
    """

    def __init__(self, dim: int, pixels: int, channels: int | None = None) -> None:
        super().__init__()
        width = channels or max(8, dim // 3)  # 256 for the paper's 768
        self.pixels, self.channels = pixels, width
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.context = nn.ModuleList(Context(dim, width) for _ in range(2))
        self.hear = nn.ModuleList(Hear(dim, width) for _ in range(2))
        self.refine_fine, self.refine_coarse, self.refine_both = (Refine(width) for _ in range(3))
        self.smooth = nn.Conv2d(width, width // 2, 3, padding=1)
        self.shape = nn.Conv2d(width // 2, width // 4, 3, padding=1)
        self.out = nn.Conv2d(width // 4, 1, 1)

    def forward(self, first: Tensor, last: Tensor, sound: Tensor) -> tuple[Tensor, Tensor]:
        """Grids [B, T, s, s, D] of the two blocks and the mean audio token [B, D] → logits [B, T, pixels, pixels].

        Also returns the finer feature map [B, T, C, 4s, 4s], for the alignment of masked features with the sound.
        """
        fine, coarse = (
            self._stage(number, grid, sound, scale) for number, (grid, scale) in enumerate(((first, 4), (last, 2)))
        )
        batch, frames = first.shape[:2]
        path = _resized(self.refine_coarse(coarse.flatten(0, 1)), 2)
        path = _resized(self.refine_both(path + self.refine_fine(fine.flatten(0, 1))), 2)
        size = (self.pixels, self.pixels)
        path = F.interpolate(self.smooth(path), size=size, mode="bilinear", align_corners=False)
        logits = self.out(F.relu(self.shape(path)))
        return logits.view(batch, frames, self.pixels, self.pixels), fine

    def heard(self, sound: Tensor) -> Tensor:
        """The mean audio token [B, D] in the finer map's channels, [B, C]."""
        key: Tensor = cast(Hear, self.hear[0]).key(sound)
        return key

    def _stage(self, number: int, grid: Tensor, sound: Tensor, scale: int) -> Tensor:
        batch, frames = grid.shape[:2]
        x = self.norms[number](grid).flatten(0, 1).permute(0, 3, 1, 2)  # [B·T, D, s, s]
        x = self.context[number](_resized(x, scale))
        heard: Tensor = self.hear[number](x.view(batch, frames, *x.shape[1:]), sound)
        return heard


class Context(nn.Module):
    """The sum of four dilated convolutions."""

    def __init__(self, dim: int, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(dim, channels, 3, padding=d, dilation=d) for d in DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = sum((conv(x) for conv in self.convs), torch.zeros((), device=x.device, dtype=x.dtype))
        return total


class Hear(nn.Module):
    """Cross-modal attention of all positions of a clip with its mean audio token (TPAVI), a residual.

    Every key of the clip is the same audio token, so attention over T·s² keys is one product per position.
    """

    def __init__(self, dim: int, channels: int) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.key = nn.Linear(dim, channels)
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x: Tensor, sound: Tensor) -> Tensor:  # [B, T, C, s, s], [B, D] -> [B, T, C, s, s]
        flat = x.flatten(0, 1)
        query = self.query(flat).view_as(x)
        agrees = torch.einsum("btchw,bc->bthw", query, self.key(sound)) / x.shape[2] ** 0.5
        value = self.value(flat).view_as(x).mean((1, 3, 4))  # [B, C]
        seen = agrees[:, :, None] * value[:, None, :, None, None]  # [B, T, C, s, s]
        out: Tensor = self.norm(flat + self.out(seen.flatten(0, 1)))
        return out.view_as(x)


class Refine(nn.Module):
    """A residual unit of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv2(F.relu(self.conv1(F.relu(x))))
        return out


def _resized(x: Tensor, factor: int) -> Tensor:
    return F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)

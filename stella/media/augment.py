"""Augmentation of the paper's training table: multi-scale crop, audio time shift, audio noise.

Each clip of a batch has its own draws. They are made on the generator's device, then copied to the data's. `among` says
that the given clips are some of a batch, whose other draws are made and left: where each draw belongs does not depend
on which of the clips are here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import send
from stella.errors import StellaError

SCALES = (1.0, 0.875, 0.75, 0.66)  # of the short side
MAX_DISTORT = 1  # a crop's width and height are at most this many scales apart
# Positions of a crop, in quarters of the free space (x, y): corners and centre, then the sides and the inner four.
OFFSETS = (
    *((0, 0), (4, 0), (0, 4), (4, 4), (2, 2)),
    *((0, 2), (4, 2), (2, 4), (2, 0), (1, 1), (3, 1), (1, 3), (3, 3)),
)


@dataclass(frozen=True)
class Among:
    """These clips are the `rows` (positions) of a batch of `clips`."""

    clips: int
    rows: Sequence[int]


def multi_scale_crop(video: Tensor, size: int, generator: torch.Generator, among: Among | None = None) -> Tensor:
    """uint8 [B, T, 3, H, W] → [B, T, 3, size, size]: one crop per clip, the same for all its frames.

    The crop is resampled bilinearly without antialiasing, so the short side should be at most about 1.5 times `size`.
    """
    height, width = video.shape[-2:]
    sides = [int(min(height, width) * scale) for scale in SCALES]
    sides = [size if abs(side - size) < 3 else side for side in sides]  # near enough: no resampling
    sides = [min(side, height, width) for side in sides]
    shapes = [(w, h) for i, h in enumerate(sides) for j, w in enumerate(sides) if abs(i - j) <= MAX_DISTORT]
    shape = _draw(shapes, len(video), generator, among)  # [B, 2], width and height
    quarters = _draw(OFFSETS, len(video), generator, among)  # [B, 2]
    free = torch.tensor([width, height], device=shape.device) - shape
    corner = free.div(4, rounding_mode="floor") * quarters  # [B, 2], x and y
    return _resample(video, corner, shape, size)


def pass_crop(generator: torch.Generator) -> None:
    """The draws of `multi_scale_crop` for one clip that is not here."""
    for choices in (range(10), OFFSETS):
        _draw(choices, 1, generator)


def center_crop(video: Tensor, size: int) -> Tensor:
    """uint8 [B, T, 3, H, W] → [B, T, 3, size, size]: the centre square, without antialiasing as above."""
    height, width = video.shape[-2:]
    side = min(height, width)
    corner = torch.tensor([(width - side) // 2, (height - side) // 2])
    if side == size:
        return video[..., corner[1] : corner[1] + size, corner[0] : corner[0] + size].contiguous()
    return _resample(video, corner.expand(len(video), 2), torch.full((len(video), 2), side), size)


def time_shift(spec: Tensor, generator: torch.Generator, most: int = 10, among: Among | None = None) -> Tensor:
    """[B, time, mel], each clip rolled along time by a random integer in -most … most."""
    shift = send(_draw(range(-most, most + 1), len(spec), generator, among), spec.device)  # [B]
    source = (torch.arange(spec.shape[1], device=spec.device) - shift[:, None]) % spec.shape[1]  # [B, time]
    return spec.gather(1, source[..., None].expand_as(spec))


def add_noise(spec: Tensor, generator: torch.Generator, among: Among | None = None) -> Tensor:
    """[B, time, mel] plus uniform noise in [0, r/10), with r uniform in [0, 1) for each clip."""
    clips = among.clips if among else len(spec)
    level = torch.rand(clips, 1, 1, generator=generator, device=generator.device) / 10
    noise = torch.rand(clips, *spec.shape[1:], generator=generator, device=generator.device)
    if among:
        level, noise = level[list(among.rows)], noise[list(among.rows)]
    return spec + send(noise.mul_(level), spec.device).to(spec.dtype)


def _draw(choices: Sequence[object], count: int, generator: torch.Generator, among: Among | None = None) -> Tensor:
    """[count, …], each row one of the choices, on the generator's device."""
    clips = among.clips if among else count
    chosen = torch.randint(len(choices), (clips,), generator=generator, device=generator.device)
    return torch.tensor(choices, device=generator.device)[chosen[list(among.rows)] if among else chosen]


def _resample(video: Tensor, corner: Tensor, shape: Tensor, size: int) -> Tensor:
    """Each clip's box (corner and shape [B, 2], as x and y) scaled to size × size.

    Pixels at the border are not mixed with those outside the box.
    """
    if video.dtype != torch.uint8 or video.dim() != 5:
        raise StellaError(f"a crop takes uint8 video [B, T, 3, H, W], not {video.dtype} {list(video.shape)}")
    batch, frames, channels, height, width = video.shape
    corner, shape = send(corner[:, None], video.device), send(shape[:, None], video.device)  # [B, 1, 2]
    centres = (torch.arange(size, device=video.device)[:, None] + 0.5) / size  # [size, 1]
    pixel = torch.minimum((centres * shape - 0.5).clamp(min=0), shape - 1) + corner  # [B, size, 2]
    grid_xy = (2 * pixel + 1) / send(torch.tensor([width, height]), video.device) - 1  # grid_sample's coordinates
    x, y = grid_xy.unbind(-1)  # [B, size]
    grid = torch.stack([x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], -1)
    flat = video.reshape(batch, frames * channels, height, width).float()
    out = F.grid_sample(flat, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return out.round_().to(torch.uint8).view(batch, frames, channels, size, size)

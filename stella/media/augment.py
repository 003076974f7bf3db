"""Augmentation of the paper's training table: multi-scale crop, audio time shift, audio noise.

Each clip has a generator of its own, so that its draws do not depend on which clips are beside it. They are made on the
CPU, then copied to the data's device: a seed means the same numbers everywhere.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import send
from stella.errors import StellaError

Generators = Sequence[torch.Generator]  # one for each clip, on the CPU

SCALES = (1.0, 0.875, 0.75, 0.66)  # of the short side
MAX_DISTORT = 1  # a crop's width and height are at most this many scales apart
# Positions of a crop, in quarters of the free space (x, y): corners and centre, then the sides and the inner four.
OFFSETS = (
    *((0, 0), (4, 0), (0, 4), (4, 4), (2, 2)),
    *((0, 2), (4, 2), (2, 4), (2, 0), (1, 1), (3, 1), (1, 3), (3, 3)),
)


def multi_scale_crop(video: Tensor, size: int, generators: Generators) -> Tensor:
    """uint8 [B, T, 3, H, W] → [B, T, 3, size, size]: one crop per clip, the same for all its frames.

    The crop is resampled bilinearly without antialiasing, so the short side should be at most about 1.5 times `size`.
    """
    height, width = video.shape[-2:]
    sides = [int(min(height, width) * scale) for scale in SCALES]
    sides = [size if abs(side - size) < 3 else side for side in sides]  # near enough: no resampling
    sides = [min(side, height, width) for side in sides]
    shapes = [(w, h) for i, h in enumerate(sides) for j, w in enumerate(sides) if abs(i - j) <= MAX_DISTORT]
    shape = _draw(shapes, generators)  # [B, 2], width and height
    quarters = _draw(OFFSETS, generators)  # [B, 2]
    free = torch.tensor([width, height]) - shape
    corner = free.div(4, rounding_mode="floor") * quarters  # [B, 2], x and y
    return _resample(video, corner, shape, size)


def center_crop(video: Tensor, size: int) -> Tensor:
    """uint8 [B, T, 3, H, W] → [B, T, 3, size, size]: the centre square, without antialiasing as above."""
    height, width = video.shape[-2:]
    side = min(height, width)
    corner = torch.tensor([(width - side) // 2, (height - side) // 2])
    if side == size:
        return video[..., corner[1] : corner[1] + size, corner[0] : corner[0] + size].contiguous()
    return _resample(video, corner.expand(len(video), 2), torch.full((len(video), 2), side), size)


def time_shift(spec: Tensor, generators: Generators, most: int = 10) -> Tensor:
    """[B, time, mel], each clip rolled along time by a random integer in -most … most."""
    return rolled(spec, _draw(range(-most, most + 1), generators))


def rolled(spec: Tensor, shift: Tensor) -> Tensor:
    """[B, time, mel], each clip rolled along time by its `shift` [B]."""
    shift = send(shift, spec.device)
    source = (torch.arange(spec.shape[1], device=spec.device) - shift[:, None]) % spec.shape[1]  # [B, time]
    return spec.gather(1, source[..., None].expand_as(spec))


def add_noise(spec: Tensor, generators: Generators) -> Tensor:
    """[B, time, mel] plus uniform noise in [0, r/10), with r uniform in [0, 1) for each clip."""
    noise = torch.empty(spec.shape)
    for row, generator in zip(noise, generators, strict=True):
        level = float(torch.rand((), generator=generator)) / 10
        row.uniform_(0, level, generator=generator)
    return spec + send(noise, spec.device).to(spec.dtype)


def _draw(choices: Sequence[object], generators: Generators) -> Tensor:
    """[B, …], each row one of the choices."""
    return torch.tensor([choices[int(torch.randint(len(choices), (), generator=each))] for each in generators])


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

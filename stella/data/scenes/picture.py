"""Renders frames: textured objects over a drifting background. The sounding object acts while it sounds."""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stella.data.scenes.classes import ACTIONS, SHAPES, TEXTURES
from stella.data.scenes.draw import Draw

_ANGLES = 512
# Per texture: two waves over the object, each with weights of (x, y, radius) in cycles, of the angle in turns and of a
# sideways bend. The texture is their product; a wave without weights is constant 1.
_WAVES = {
    "stripes": ((1, 0, 0, 0, 0), (0, 0, 0, 0, 0)),
    "checks": ((0.8, 0, 0, 0, 0), (0, 0.8, 0, 0, 0)),
    "rings": ((0, 0, 1, 0, 0), (0, 0, 0, 0, 0)),
    "spokes": ((0, 0, 0, 4, 0), (0, 0, 0, 0, 0)),
    "dots": ((1, 1, 0, 0, 0), (1, -1, 0, 0, 0)),
    "waves": ((0, 1, 0, 0, 0.35), (0, 0, 0, 0, 0)),
    "bricks": ((0, 0.7, 0, 0, 0), (0.35, 0, 0.7, 0, 0)),
    "weave": ((0.5, 0.5, 0, 0, 0), (1.5, -1.5, 0, 0, 0)),
}


@cache
def _outlines(device: torch.device) -> Tensor:
    """The radius of each shape at each angle, [shapes, _ANGLES], scaled to about unit area."""
    a = torch.arange(_ANGLES) / _ANGLES * 2 * math.pi

    def polygon(n: int, turn: float = 0.0) -> Tensor:
        part = 2 * math.pi / n
        return math.cos(part / 2) / torch.cos((a - turn) % part - part / 2)

    wide, tall = 1 / a.cos().abs().clamp_min(1e-3), 1 / a.sin().abs().clamp_min(1e-3)
    arm = torch.maximum(torch.minimum(wide, tall * 0.36), torch.minimum(tall, wide * 0.36))
    star = 0.72 + 0.34 * torch.asin(torch.cos(5 * (a + math.pi / 2))) / (math.pi / 2)
    heart = 0.9 + 0.3 * a.sin() - 0.55 * torch.exp(-(((a - 1.5 * math.pi) / 0.35) ** 2))
    shapes = {
        "disc": torch.ones(_ANGLES),
        "square": polygon(4, math.pi / 4),
        "triangle": polygon(3, math.pi / 6),
        "star": star,
        "cross": arm,
        "hexagon": polygon(6),
        "flower": 0.82 + 0.22 * torch.cos(6 * a),
        "gear": 0.92 + 0.16 * torch.tanh(4 * torch.cos(9 * a)),
        "drop": 0.62 + 0.6 * ((1 - torch.sin(a)) / 2) ** 6,
        "heart": heart,
    }
    table = torch.stack([shapes[name] for name in SHAPES])
    return (table / table.square().mean(1, keepdim=True).sqrt()).to(device)


@cache
def _waves(device: torch.device) -> Tensor:
    return torch.tensor([_WAVES[name] for name in TEXTURES], dtype=torch.float32, device=device)  # [textures, 2, 5]


class Pictures(NamedTuple):
    frames: Tensor  # uint8 [B, T, 3, N, N]
    mask: Tensor  # bool [B, T, N, N], the sounding object


class _Frame(NamedTuple):
    grid: Tensor  # [N] centres of the pixels, in frame widths
    time: Tensor  # [T] in clip lengths
    act: Tensor  # [B, T] strength of the action: 0 at rest, 1 in the middle of a burst, with short ramps


def pictures(draw: Draw, times: Tensor, pixels: int, device: torch.device) -> Pictures:
    """Frames of the clips at `times` (in clip lengths)."""
    frame = _frame(draw, times, pixels, device)
    image = _background(draw, frame)  # [B, 3, T, N, N]
    for o in reversed(range(1, draw.objects.shape.shape[1])):
        _paint(image, draw, o, frame)
    cover = _paint(image, draw, 0, frame)  # the sounding object last: nothing hides it
    frames = image.mul_(255).round_().clamp_(0, 255).to(torch.uint8)
    return Pictures(frames.transpose(1, 2).contiguous(), cover > 0.5)


def masks(draw: Draw, times: Tensor, pixels: int) -> Tensor:
    """`pictures(…).mask` without painting, for a fraction of the work."""
    return _place(draw, 0, _frame(draw, times, pixels, times.device)).cover > 0.5


def _frame(draw: Draw, times: Tensor, pixels: int, device: torch.device) -> _Frame:
    grid, times = (torch.arange(pixels, device=device) + 0.5) / pixels, times.to(device)
    onset, length = (torch.as_tensor(x).to(device)[:, :, None] for x in (draw.onset, draw.length))
    since = (times - onset) / length  # [B, 2, T]
    return _Frame(grid, times, (torch.minimum(since, 1 - since) / 0.2).clamp(0, 1).amax(1))


def _background(draw: Draw, frame: _Frame) -> Tensor:
    """Two broad, slowly drifting waves in two muted colours, [B, 3, T, N, N]."""
    u = torch.as_tensor(draw.background).to(frame.grid.device)[:, :, None, None, None]  # [B, 24, 1, 1, 1]
    x, y, time = frame.grid, frame.grid[:, None], frame.time[:, None, None]
    waves = []
    for k in (0, 4):
        angle, cycles = math.pi * u[:, k], 2 + 3 * u[:, k + 1]
        drift = time * (u[:, k + 3] - 0.5) + u[:, k + 2]
        waves.append(torch.sin(2 * math.pi * (cycles * (x * torch.cos(angle) + y * torch.sin(angle)) + drift)))
    mix = (0.5 + 0.3 * waves[0] + 0.2 * waves[1])[:, None]  # [B, 1, T, N, N]
    dark, light = (0.12 + 0.16 * u[:, k : k + 3] for k in (8, 11))
    return torch.lerp(dark, light + 0.14, mix)


class _Placed(NamedTuple):
    """An object of every clip: the pixels of the frames in the object's own coordinates, each [B, T, N, N]."""

    x: Tensor  # turned, stretched, radius 1
    y: Tensor
    radius: Tensor
    angle: Tensor  # in turns, -0.5 … 0.5
    beyond: Tensor  # distance outside the outline, in radii
    cover: Tensor  # share of each pixel that the object covers
    actions: list[Tensor]  # strength of each of `ACTIONS`, [B, T, 1, 1]


def _place(draw: Draw, o: int, frame: _Frame) -> _Placed:
    device, objects = frame.grid.device, draw.objects
    present, shape, column, turn = _columns(o, device, objects.present, objects.shape, objects.x, objects.angle)
    size, _, height, stretch, _ = torch.as_tensor(objects.visible[:, o]).to(device).mT[:, :, None, None, None]
    action = torch.as_tensor(draw.action).to(device)[:, None]
    act = frame.act if o == 0 else torch.zeros_like(frame.act[:, :1])  # silent objects are painted once for all frames
    actions = [(act * (action == number))[:, :, None, None] for number in range(len(ACTIONS))]
    _, _, swell, bounce, spin = actions
    unit = draw.scale * (0.12 + 0.1 * size) * (1 + 0.45 * swell)
    aspect = 2 ** (1.3 * (stretch - 0.5))
    dx, dy = frame.grid - column, frame.grid[:, None] - (0.78 - 0.46 * height - 0.15 * bounce)
    cos, sin = torch.cos(turn + math.pi / 2 * spin), torch.sin(turn + math.pi / 2 * spin)
    x = (cos * dx + sin * dy) / (unit * aspect.sqrt())
    y = (cos * dy - sin * dx) / unit * aspect.sqrt()
    radius = torch.sqrt(x * x + y * y)
    angle = torch.atan2(y, x) / (2 * math.pi)
    beyond = radius - _outlines(device)[shape.expand_as(angle), (angle * _ANGLES).long() % _ANGLES]
    cover: Tensor = (0.5 - beyond * unit * len(frame.grid)).clamp(0, 1) * present  # antialiased over one pixel
    return _Placed(x, y, radius, angle, beyond, cover, actions)


def _columns(o: int, device: torch.device, *arrays: np.ndarray[Any, Any]) -> list[Tensor]:
    """Column `o` of arrays [B, O], each as [B, 1, 1, 1]."""
    return [torch.as_tensor(array[:, o]).to(device)[:, None, None, None] for array in arrays]


def _paint(image: Tensor, draw: Draw, o: int, frame: _Frame) -> Tensor:
    """Paint object `o` of every clip onto the image; returns the share of each pixel that it covers, [B, T, N, N]."""
    device, objects = image.device, draw.objects
    texture, shade = _columns(o, device, objects.texture, objects.shade)
    _, hue, _, _, grain = torch.as_tensor(objects.visible[:, o]).to(device).mT[:, :, None, None, None]
    body = _place(draw, o, frame)
    flash, ripple, swell, bounce, spin = body.actions
    pattern = _texture(body, texture, 0.8 * 3**grain)
    if o == 0:  # the marks of an action; each is visible in single patches too
        glow = torch.exp(-3 * body.beyond.clamp_min(0)) * flash
        rings = (body.beyond > 0.15) * (body.beyond < 1) * (torch.sin(body.beyond * 6 * math.pi) > 0) * ripple
        rim = (body.beyond < 0.22) * swell
        trail = (body.x.abs() < 0.8) * (torch.sin(body.x * 5 * math.pi) > 0) * (body.y > 0) * (body.y < 2) * bounce
        marks = torch.maximum(torch.maximum(glow, rings), torch.maximum(rim, trail))
        image.lerp_(torch.ones((), device=device), (0.85 * marks)[:, None])
        whirl = torch.cos(2 * math.pi * (2 * body.angle + 0.8 * body.radius))
        pattern = torch.lerp(pattern, whirl, spin)
    tone = shade * (0.62 + 0.38 * torch.tanh(3 * pattern))
    colour = _rgb(0.8 * hue[:, 0, 0])[:, :, None, None]  # [B, 3, 1, 1, 1]
    paint = torch.lerp(colour * tone[:, None], torch.ones((), device=device), 0.75 * flash[:, None])
    image.lerp_(paint, body.cover[:, None])
    return body.cover


def _texture(body: _Placed, texture: Tensor, cycles: Tensor) -> Tensor:
    """The object's surface, -1 … 1."""
    waves = _waves(body.x.device)[texture]  # [B, 1, 1, 1, 2, 5]
    pattern = torch.ones_like(body.x)
    for w in range(2):
        wx, wy, wr, wa, bend = waves[..., w, :].unbind(-1)
        run = cycles * (wx * body.x + wy * body.y + wr * body.radius) + wa * body.angle
        pattern = pattern * torch.cos(2 * math.pi * (run + bend * torch.sin(2 * math.pi * body.x)))
    return pattern


def _rgb(hue: Tensor) -> Tensor:
    """The saturated colour of a hue in turns, [B, 1] -> [B, 3, 1]."""
    corner = torch.tensor([0.0, 2 / 3, 1 / 3], device=hue.device)[:, None]  # red, green, blue
    wave = ((hue[:, None] + corner) % 1 * 6 - 3).abs() - 1
    return 0.1 + 0.9 * wave.clamp(0, 1)

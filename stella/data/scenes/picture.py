"""What a scene looks like: textured objects over a drifting background. The one that sounds acts while it sounds."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from stella.data.scenes.classes import ACTIONS, SHAPES, TEXTURES, VISIBLE
from stella.data.scenes.draw import Draw

_ANGLES = 512
# Per texture: two waves over the object, each by weights of (x, y, radius) in cycles, of the angle in turns and of a
# sideways bend; the texture is their product (a wave with no weights is constant one).
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
    """How far each shape reaches at each angle, [shapes, _ANGLES], of about unit area."""
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
    """The pixel grid, and per clip and frame how strongly the object acts."""

    x: Tensor  # [N] in frame widths
    y: Tensor
    act: Tensor  # [B, T]
    time: Tensor  # [T] in clip lengths


def pictures(draw: Draw, times: Tensor, pixels: int, device: torch.device) -> Pictures:
    """Frames of the clips at `times` (in clip lengths)."""
    grid = (torch.arange(pixels, device=device) + 0.5) / pixels
    frame = _Frame(grid, grid, _acting(draw, times.to(device)), times.to(device))
    image = _background(draw, frame)  # [B, 3, T, N, N]
    mask = torch.zeros(())
    for o in reversed(range(draw.objects.shape.shape[1])):  # the sounding one last: nothing hides it
        mask = _paint(image, draw, o, frame)
    frames = image.mul_(255).round_().clamp_(0, 255).to(torch.uint8)
    return Pictures(frames.transpose(1, 2).contiguous(), mask > 0.5)


def _acting(draw: Draw, times: Tensor) -> Tensor:
    """0 at rest, 1 in the middle of a burst, with short ramps, [B, T]."""
    onset, length = (torch.as_tensor(x).to(times.device)[:, :, None] for x in (draw.onset, draw.length))
    since = (times - onset) / length  # [B, 2, T]
    return (torch.minimum(since, 1 - since) / 0.2).clamp(0, 1).amax(1)


def _background(draw: Draw, frame: _Frame) -> Tensor:
    """Two broad waves in two muted colours that drift a little, [B, 3, T, N, N]."""
    u = torch.as_tensor(draw.background).to(frame.x.device)[:, :, None, None, None]  # [B, 24, 1, 1, 1]
    x, y, time = frame.x, frame.y[:, None], frame.time[:, None, None]
    waves = []
    for k in (0, 4):
        angle, cycles = math.pi * u[:, k], 2 + 3 * u[:, k + 1]
        drift = time * (u[:, k + 3] - 0.5) + u[:, k + 2]
        waves.append(torch.sin(2 * math.pi * (cycles * (x * torch.cos(angle) + y * torch.sin(angle)) + drift)))
    mix = (0.5 + 0.3 * waves[0] + 0.2 * waves[1])[:, None]  # [B, 1, T, N, N]
    dark, light = (0.12 + 0.16 * u[:, k : k + 3] for k in (8, 11))
    return torch.lerp(dark, light + 0.14, mix)


def _paint(image: Tensor, draw: Draw, o: int, frame: _Frame) -> Tensor:
    """Paint object `o` of every clip onto the image; returns how much of each pixel it covers, [B, T, N, N]."""
    device, objects = image.device, draw.objects
    present, shape, texture, x, shade, turn = (
        torch.as_tensor(a[:, o]).to(device)[:, None]
        for a in (objects.present, objects.shape, objects.texture, objects.x, objects.shade, objects.angle)
    )  # [B, 1]
    size, hue, height, stretch, grain = torch.as_tensor(objects.visible[:, o]).to(device).T[:, :, None]
    action = torch.as_tensor(draw.action).to(device)[:, None]

    act = frame.act if o == 0 else torch.zeros_like(frame.act[:, :1])  # silent objects are painted once for all frames

    def doing(name: str) -> Tensor:  # [B, T]
        return act * (action == ACTIONS.index(name))

    radius = draw.scale * (0.12 + 0.1 * size) * (1 + 0.45 * doing("swell"))
    cy = 0.78 - 0.46 * height - 0.15 * doing("bounce")
    aspect = 2 ** (1.3 * (stretch - 0.5))

    def per_pixel(value: Tensor) -> Tensor:  # [B, T] or [B, 1] -> [B, T, 1, 1]
        return value[:, :, None, None]

    dx, dy = frame.x - per_pixel(x), frame.y[:, None] - per_pixel(cy)
    turned = per_pixel(turn + math.pi / 2 * doing("spin"))
    cos, sin = torch.cos(turned), torch.sin(turned)
    unit = per_pixel(radius)
    px = (cos * dx + sin * dy) / (unit * per_pixel(aspect).sqrt())  # the object's own coordinates, outline near 1
    py = (cos * dy - sin * dx) / unit * per_pixel(aspect).sqrt()
    rho = torch.sqrt(px * px + py * py)
    angle = torch.atan2(py, px) / (2 * math.pi)  # turns, -0.5 … 0.5
    reach = _outlines(device)[per_pixel(shape).expand_as(angle), (angle * _ANGLES).long() % _ANGLES]
    beyond = rho - reach  # how far outside the outline, in radii
    edge = unit * len(frame.x)  # one radius in pixels
    cover = (0.5 - beyond * edge).clamp(0, 1) * per_pixel(present)

    if o == 0:
        glow = torch.exp(-3 * beyond.clamp_min(0)) * per_pixel(doing("flash"))
        rings = (beyond > 0.15) * (beyond < 1) * (torch.sin(beyond * 6 * math.pi) > 0) * per_pixel(doing("ripple"))
        rim = (beyond < 0.22) * per_pixel(doing("swell"))
        trail = (px.abs() < 0.8) * (torch.sin(px * 5 * math.pi) > 0) * (py > 0) * (py < 2) * per_pixel(doing("bounce"))
        marks = torch.maximum(torch.maximum(glow, rings), torch.maximum(rim, trail))
        image.lerp_(torch.ones((), device=device), (0.85 * marks)[:, None])
    waves = _waves(device)[texture]  # [B, 1, 2, 5]
    cycles = 0.8 * 3**grain
    pattern = torch.ones_like(rho)
    for w in range(2):
        wx, wy, wr, wa, bend = (per_pixel(waves[:, :, w, k]) for k in range(5))
        run = per_pixel(cycles) * (wx * px + wy * py + wr * rho)
        pattern = pattern * torch.cos(2 * math.pi * (run + wa * angle + bend * torch.sin(2 * math.pi * px)))
    if o == 0:  # spinning blurs a texture into a two-armed whirl
        pattern = torch.lerp(pattern, torch.cos(2 * math.pi * (2 * angle + 0.8 * rho)), per_pixel(doing("spin")))
    tone = per_pixel(shade) * (0.62 + 0.38 * torch.tanh(3 * pattern))
    flash = per_pixel(0.75 * doing("flash"))[:, None]
    paint = torch.lerp(_rgb(0.8 * hue)[:, :, :, None, None] * tone[:, None], torch.ones((), device=device), flash)
    image.lerp_(paint, cover[:, None])
    return cover


def _rgb(hue: Tensor) -> Tensor:
    """A saturated colour for a hue in turns, [B, 1] -> [B, 3, 1]."""
    corner = torch.tensor([0.0, 2 / 3, 1 / 3], device=hue.device)[:, None]  # red, green, blue
    wave = ((hue[:, None] + corner) % 1 * 6 - 3).abs() - 1
    return 0.1 + 0.9 * wave.clamp(0, 1)


assert set(VISIBLE) == {"size", "hue", "height", "stretch", "grain"}

"""All random numbers of scenes. Every clip is a pure function of (seed, task, split, index).

Numbers come from a counter-based hash, so any clip can be drawn alone or among thousands, on any machine, in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stella.data.scenes.classes import ACTIONS, AUDIBLE, SHAPES, TEXTURES, TIMBRES, VISIBLE, classes
from stella.rng import seed_for

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

SLOTS = 4  # a clip has four time slots, one for each sampled frame
# Two slots sound. Timing alone narrows the choice of a partner but never decides it.
PATTERNS = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
LONGEST = 0.75 / SLOTS  # length of the longest burst, in clip lengths
LINK_NOISE = 0.02  # deviation of the audible quantity from its visible cause (both in 0..1)


@dataclass(frozen=True)
class Variant:
    """How hard a scene is."""

    silent: tuple[int, int] = (1, 3)  # fewest and most silent objects
    scale: float = 1.0  # of all objects
    noise: tuple[float, float] = (0.001, 0.012)  # background noise, amplitude
    offscreen: float = 0.25  # probability of a sound whose object is not in the picture


EASY = Variant()
HARD = Variant(silent=(4, 6), scale=0.6, noise=(0.005, 0.04), offscreen=0.5)


@dataclass(frozen=True)
class Objects:
    """All objects of a batch of clips, [B, O]; object 0 is the one that sounds."""

    present: NDArray[np.bool_]
    shape: Ints
    texture: Ints
    x: Floats  # centre, in frame widths
    visible: Floats  # [B, O, 5] the visible quantities in 0..1, ordered as `VISIBLE`
    angle: Floats
    shade: Floats


@dataclass(frozen=True)
class Draw:
    """All random numbers of a batch of clips, in units of the clip's length and the frame's width."""

    key: Ints  # [B] seeds the clip's own noise
    label: Ints  # [B] class within the task
    pattern: Ints  # [B] which two slots sound
    onset: Floats  # [B, 2] of the two bursts, 0..1 of the clip
    length: Floats  # [B, 2]
    action: Ints
    timbre: Ints
    audible: Floats  # [B, 4] the audible quantities in 0..1, ordered as `AUDIBLE`
    linked_visible: Ints  # [B] which visible quantity the class's link reads
    linked_audible: Ints  # [B] which audible quantity it sets
    gain: Floats
    noise: Floats
    offscreen: Floats  # [B, 4] gain (0: none), onset, length, pitch
    offscreen_timbre: Ints
    objects: Objects
    background: Floats  # [B, 24]
    scale: float


def draw(seed: int, task: str, split: str, indices: Sequence[int], variant: Variant) -> Draw:
    """Draw the clips `indices` of a task's split. Classes alternate, so every split is balanced."""
    kinds = classes(task)
    index = np.asarray(indices, dtype=np.int64)
    u = Uniforms(seed_for("scenes", seed, task, split), index)
    label = index % len(kinds)

    def of_class(names: tuple[str, ...], attribute: str) -> Ints:
        return _indices(task, names, attribute)[label]

    rows = np.arange(len(index))
    linked_v, linked_a = of_class(VISIBLE, "visible"), of_class(AUDIBLE, "audible")
    objects = _objects(u, variant, of_class(SHAPES, "shape"), of_class(TEXTURES, "texture"))
    cause = objects.visible[rows, 0, linked_v]

    # Audible quantities stay near the middle, except the linked one, which follows its visible cause.
    audible = 0.5 + 0.24 * (u(len(AUDIBLE)) - 0.5)
    stray = LINK_NOISE * (u(12).sum(axis=1) - 6)  # nearly normal
    audible[rows, linked_a] = np.clip(cause + stray, 0, 1)

    pattern = u.below(len(PATTERNS))
    length = np.float32(LONGEST) - 0.2 * u(2) / SLOTS
    centre = (PATTERNS[pattern].astype(np.float32) + 0.5 + 0.12 * (u(2) - 0.5)) / SLOTS
    heard = u() < variant.offscreen
    return Draw(
        key=u.keys,
        label=label,
        pattern=pattern,
        onset=(centre - length / 2).astype(np.float32),
        length=length.astype(np.float32),
        action=of_class(ACTIONS, "action"),
        timbre=of_class(TIMBRES, "timbre"),
        audible=audible,
        linked_visible=linked_v,
        linked_audible=linked_a,
        gain=0.7 + 0.3 * u(),
        noise=variant.noise[0] * (variant.noise[1] / variant.noise[0]) ** u(),
        offscreen=np.stack([np.where(heard, 0.15 + 0.15 * u(), 0), 0.9 * u(), 0.06 + 0.06 * u(), u()], axis=1),
        offscreen_timbre=u.below(len(TIMBRES)),
        objects=objects,
        background=u(24),
        scale=variant.scale,
    )


@cache
def _indices(task: str, names: tuple[str, ...], attribute: str) -> Ints:
    """For each class of a task, the index of an attribute's value among `names`."""
    return np.array([names.index(getattr(kind, attribute)) for kind in classes(task)])


def _objects(u: "Uniforms", variant: Variant, shape: Ints, texture: Ints) -> Objects:
    least, most = variant.silent
    count = 1 + most
    columns = np.argsort(u(count), axis=1)  # each object has a column of its own, so they rarely overlap
    silent = least + (u() ** 1.6 * (most - least + 1)).astype(np.int64)  # small numbers are more likely
    shapes = np.stack([u.below(len(SHAPES)) for _ in range(count)], axis=1)
    textures = np.stack([u.below(len(TEXTURES)) for _ in range(count)], axis=1)
    shapes[:, 0], textures[:, 0] = shape, texture
    return Objects(
        present=np.arange(count)[None] <= silent[:, None],
        shape=shapes,
        texture=textures,
        x=(0.13 + 0.74 * (columns + 0.5 + 0.5 * (u(count) - 0.5)) / count).astype(np.float32),
        visible=u(count * len(VISIBLE)).reshape(-1, count, len(VISIBLE)),
        angle=(u(count) - 0.5) * np.float32(0.6),
        shade=0.75 + 0.25 * u(count),
    )


class Uniforms:
    """A row of uniform numbers for each clip: `u()` is the next [B], `u(n)` the next [B, n]."""

    def __init__(self, seed: int, index: NDArray[np.int64]) -> None:
        self._keys = _mix(index.astype(np.uint64) + _mix(np.asarray([seed], dtype=np.uint64)))
        self._count = 0

    @property
    def keys(self) -> Ints:
        return (self._keys >> np.uint64(1)).astype(np.int64)

    def __call__(self, n: int | None = None) -> Floats:
        counters = np.arange(self._count, self._count + (n or 1), dtype=np.uint64)
        self._count += n or 1
        bits = _mix(self._keys[:, None] + counters[None] * np.uint64(0x9E3779B97F4A7C15))
        values = ((bits >> np.uint64(40)).astype(np.float32)) / np.float32(2**24)  # [B, n] in [0, 1)
        return values if n is not None else values[:, 0]

    def below(self, n: int) -> Ints:
        return (self() * n).astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every input bit affects every output bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

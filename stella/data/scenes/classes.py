"""The classes of scenes: each is a look, an action, a timbre and a link.

A class's link ties one visible quantity to one audible quantity, and differs between classes. Each of the eight looks
of the tasks returns in two later tasks with another action, timbre and link, so that learning the later class
overwrites the earlier one. Only look *and* action together identify the sounding class.
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from random import Random

from stella.errors import ConfigError
from stella.rng import seed_for

SHAPES = ("disc", "square", "triangle", "star", "cross", "hexagon", "flower", "gear", "drop", "heart")
TEXTURES = ("stripes", "checks", "rings", "spokes", "dots", "waves", "bricks", "weave")
ACTIONS = ("flash", "ripple", "swell", "bounce", "spin")
VISIBLE = ("size", "hue", "height", "stretch", "grain")
AUDIBLE = ("pitch", "tremolo", "brightness", "glide")
TIMBRES = (
    *("flute", "square", "saw", "bell", "organ", "hollow", "nasal", "buzz", "chord", "wind", "pluck", "metal"),
    *("reed", "brass", "glass", "drone", "horn", "choir"),
)
# An action changes this quantity itself, so the quantity cannot be read during the action.
MOVED_BY = {"swell": "size", "bounce": "height", "flash": "hue", "spin": "grain"}


@dataclass(frozen=True)
class SceneClass:
    shape: str
    texture: str
    action: str
    timbre: str
    visible: str  # the link: this visible quantity …
    audible: str  # … sets this audible one

    @property
    def look(self) -> str:
        return f"{self.texture} {self.shape}"

    @property
    def name(self) -> str:
        return f"{self.look}, {self.action}, {self.timbre}, {self.visible}→{self.audible}"


_TABLE = """
task1  disc     stripes  bounce  flute   hue      pitch
task1  square   checks   flash   square  size     tremolo
task1  triangle rings    spin    saw     height   brightness
task1  star     dots     swell   bell    grain    glide

task2  cross    weave    ripple  organ   size     pitch
task2  hexagon  spokes   bounce  hollow  stretch  tremolo
task2  flower   waves    flash   nasal   grain    brightness
task2  gear     bricks   swell   buzz    hue      glide

task3  disc     stripes  swell   chord   height   tremolo
task3  triangle rings    bounce  wind    size     glide
task3  cross    weave    spin    flute   hue      tremolo
task3  flower   waves    ripple  square  stretch  pitch

task4  square   checks   spin    pluck   hue      tremolo
task4  star     dots     ripple  metal   height   pitch
task4  hexagon  spokes   flash   saw     size     brightness
task4  gear     bricks   bounce  bell    stretch  glide

task5  disc     stripes  flash   nasal   grain    pitch
task5  star     dots     bounce  organ   hue      brightness
task5  hexagon  spokes   swell   chord   height   glide
task5  flower   waves    spin    pluck   size     tremolo

task6  square   checks   ripple  wind    stretch  tremolo
task6  triangle rings    flash   metal   grain    brightness
task6  cross    weave    bounce  buzz    hue      pitch
task6  gear     bricks   spin    hollow  size     glide

base   disc     checks   ripple  reed    size     pitch
base   square   rings    bounce  brass   hue      brightness
base   triangle stripes  flash   glass   height   tremolo
base   star     spokes   spin    drone   stretch  pitch
base   cross    dots     swell   horn    hue      glide
base   hexagon  stripes  ripple  choir   grain    tremolo
base   flower   checks   bounce  reed    size     glide
base   gear     rings    flash   brass   stretch  brightness
base   drop     stripes  spin    glass   hue      pitch
base   drop     rings    swell   drone   height   brightness
base   heart    dots     ripple  horn    size     tremolo
base   heart    checks   bounce  choir   grain    pitch
"""


@cache
def classes(task: str) -> tuple[SceneClass, ...]:
    """The classes of one of the six tasks, of `base`, of `novel`, or of a wide base such as `wide-360`."""
    if task == "novel":
        return _novel()
    if wide := re.fullmatch(r"wide-([1-9]\d{0,5})", task):
        return _wide(int(wide[1]))
    rows = [line.split() for line in _TABLE.splitlines() if line]
    found = tuple(SceneClass(*row[1:]) for row in rows if row[0] == task)
    if not found:
        raise ConfigError(f"unknown scenes task {task!r}; choose base, novel, wide-N or one of {', '.join(TASKS)}")
    return found


TASKS = ("task1", "task2", "task3", "task4", "task5", "task6")


def _novel() -> tuple[SceneClass, ...]:
    """Sixteen classes for transfer, of which no other task has one: each look of the tasks with the two actions that it
    never has there, with a timbre of the tasks and a link of its own."""
    known = [kind for task in TASKS for kind in classes(task)]
    draws = Random(seed_for("scenes", "novel"))
    looks = list(dict.fromkeys((kind.shape, kind.texture) for kind in known))
    pairs = [
        (look, action)
        for look in looks
        for action in ACTIONS
        if not any((kind.shape, kind.texture, kind.action) == (*look, action) for kind in known)
    ]
    heard = list(dict.fromkeys(kind.timbre for kind in known))
    timbres = [heard[i % len(heard)] for i in range(len(pairs))]
    draws.shuffle(timbres)
    made = []
    for ((shape, texture), action), timbre in zip(pairs, timbres, strict=True):
        visible = draws.choice([quantity for quantity in VISIBLE if quantity != MOVED_BY.get(action)])
        made.append(SceneClass(shape, texture, action, timbre, visible, draws.choice(AUDIBLE)))
    return tuple(made)


def _wide(number: int) -> tuple[SceneClass, ...]:
    """`number` classes drawn at random from the tasks' own space, without the tasks' looks, for initial pre-training.

    A smaller wide base is a prefix of a larger one. Each block of 360 classes combines every other look with every
    action once; all timbres are equally frequent; timbre and link are drawn for each class.
    """
    taken = {kind.look for task in TASKS for kind in classes(task)}
    looks = [(shape, texture) for shape in SHAPES for texture in TEXTURES if f"{texture} {shape}" not in taken]  # 72
    combinations = [(look, action) for look in looks for action in ACTIONS]
    made: list[SceneClass] = []
    for block in range(math.ceil(number / len(combinations))):
        draws, pairs = Random(seed_for("scenes", "wide", block)), list(combinations)
        draws.shuffle(pairs)
        timbres = [TIMBRES[i % len(TIMBRES)] for i in range(len(pairs))]
        draws.shuffle(timbres)
        for ((shape, texture), action), timbre in zip(pairs, timbres, strict=True):
            visible = draws.choice([quantity for quantity in VISIBLE if quantity != MOVED_BY.get(action)])
            made.append(SceneClass(shape, texture, action, timbre, visible, draws.choice(AUDIBLE)))
    return tuple(made[:number])

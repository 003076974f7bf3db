"""The methods by name. A new one is one file in this folder and one line here (docs/methods.md).

Tables and plots use this order: the paper's, with the lower bound first and the upper bound last. `initial` makes the
weights that the others start from.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from stella.config import build as build_config
from stella.errors import ConfigError
from stella.methods.base import Losses, MemoryConfig, Method, ObjectiveConfig
from stella.model.cav import CAV

__all__ = ["METHODS", "Losses", "MemoryConfig", "Method", "ObjectiveConfig", "build"]

FOUND_IN = {  # file and class
    "initial": "initial.Initial",
    "finetune": "finetune.Finetune",
    "er": "er.ER",
    "mir": "mir.MIR",
    "derpp": "derpp.DERpp",
    "gmed": "gmed.GMED",
    "cls_er": "cls_er.CLSER",
    "lump": "lump.LUMP",
    "esmer": "esmer.ESMER",
    "random": "ablations.RandomPatches",
    "mats": "ablations.MATS",
    "stella": "stella.STELLA",
    "stella_plus": "stella_plus.STELLAPlus",
    "multitask": "multitask.Multitask",
}


def _find(place: str) -> type[Method]:
    module, name = place.split(".")
    found: type[Method] = getattr(import_module(f"{__name__}.{module}"), name)
    return found


METHODS: dict[str, type[Method]] = {name: _find(place) for name, place in FOUND_IN.items()}


def build(
    name: str, model: CAV, args: Mapping[str, Any], objective: ObjectiveConfig, memory: MemoryConfig, seed: int
) -> Method:
    """A method by name, with its hyper-parameters in `args`, on a model that is already on its device."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    cls = METHODS[name]
    return cls(model, build_config(cls.Config, args, "args."), objective, memory, seed)

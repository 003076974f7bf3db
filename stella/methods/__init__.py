"""The methods by name. A new one is one file beside these and one line here (docs/methods.md).

Their order is that of tables and plots: the paper's, with the bounds at both ends. (`initial` comes before all that:
it makes the weights from which the others start.)
"""

from collections.abc import Mapping
from typing import Any

from stella.config import build as build_config
from stella.errors import ConfigError
from stella.methods.ablations import MATS, RandomPatches
from stella.methods.base import Losses, MemoryConfig, Method, ObjectiveConfig
from stella.methods.cls_er import CLSER
from stella.methods.derpp import DERpp
from stella.methods.er import ER
from stella.methods.esmer import ESMER
from stella.methods.finetune import Finetune
from stella.methods.gmed import GMED
from stella.methods.initial import Initial
from stella.methods.lump import LUMP
from stella.methods.mir import MIR
from stella.methods.multitask import Multitask
from stella.methods.stella import STELLA
from stella.methods.stella_plus import STELLAPlus
from stella.model.cav import CAV

__all__ = ["METHODS", "Losses", "MemoryConfig", "Method", "ObjectiveConfig", "build"]

METHODS: dict[str, type[Method]] = {
    "initial": Initial,
    "finetune": Finetune,
    "er": ER,
    "mir": MIR,
    "derpp": DERpp,
    "gmed": GMED,
    "cls_er": CLSER,
    "lump": LUMP,
    "esmer": ESMER,
    "random": RandomPatches,
    "mats": MATS,
    "stella": STELLA,
    "stella_plus": STELLAPlus,
    "multitask": Multitask,
}


def build(
    name: str, model: CAV, args: Mapping[str, Any], objective: ObjectiveConfig, memory: MemoryConfig, seed: int
) -> Method:
    """A method by its name, with its own hyper-parameters in `args`, on a model that is already on its device."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    cls = METHODS[name]
    return cls(model, build_config(cls.Config, args, "args."), objective, memory, seed)

"""The methods by name. A new one is one file in this folder and one line here (docs/methods.md).

Tables and plots use this order: the paper's, with Finetune first, then our own Chorus, and Multitask last.
`initial` makes the weights that the others start from; `finetune` and then `matching` do so one part after the
other, as the paper does.
"""

import sys
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from stella.config import build as build_config
from stella.config import nearest
from stella.errors import ConfigError
from stella.files import encoded
from stella.methods.base import Losses, MemoryConfig, Method, ObjectiveConfig
from stella.model.cav import CAV

__all__ = ["METHODS", "Losses", "MemoryConfig", "Method", "ObjectiveConfig", "build", "find"]

FOUND_IN = {  # file and class
    "initial": "initial.Initial",
    "matching": "matching.Matching",
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
    "chorus": "chorus.Chorus",
    "multitask": "multitask.Multitask",
}


def _import(place: str) -> type[Method]:
    module, name = place.split(".")
    found: type[Method] = getattr(import_module(f"{__name__}.{module}"), name)
    return found


METHODS: dict[str, type[Method]] = {name: _import(place) for name, place in FOUND_IN.items()}


def own_file(name: str) -> Path | None:
    """The file of a method outside of this package."""
    file, colon, _ = name.rpartition(":")
    return Path(file) if colon and file.endswith(".py") else None


def find(name: str) -> type[Method]:
    """A method by its name here, or by `FILE.py:CLASS`: a class derived from `Method` in a file of one's own."""
    if name in METHODS:
        return METHODS[name]
    file, title = own_file(name), name.rpartition(":")[2]
    if file is None:
        near = nearest(name, METHODS)
        raise ConfigError(f"unknown method {name!r}{near} (known: {', '.join(METHODS)}, or FILE.py:CLASS)")
    found = getattr(_load(file.absolute()), title, None)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"{file} has no class {title} derived from stella.methods.Method; name one that it has")
    return found


@cache
def _load(file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{file} is no file; give the path of the method's file")
    name = f"stella_method_{blake2b(encoded(str(file)), digest_size=8).hexdigest()}"  # no other module has it
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name, and `train/sharing.py` its functions
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{file} cannot be imported ({type(error).__name__}: {error}); correct it") from error
    return module


def build(
    name: str,
    model: CAV,
    args: Mapping[str, Any],
    objective: ObjectiveConfig,
    memory: MemoryConfig,
    seed: int,
    max_clips: int | None = None,
) -> Method:
    """A method by name, with its hyper-parameters in `args`, on a model that is already on its device.

    Its memory takes no more room than for `max_clips`, as many as the stream will bring (none: any number).
    """
    cls = find(name)
    return cls(model, build_config(cls.Config, args, "args."), objective, memory, seed, max_clips)

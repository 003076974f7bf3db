"""The recipe of a reproduction: a base configuration, named variants of it, and the orders of tasks they are run in.

A TOML file in `recipes/`. A recipe that is `like` another and has no base has that one's: their runs can be compared.
One whose base reads files needs `data.path=…` on the command line.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stella.config import build, lay, read_toml
from stella.errors import StellaError
from stella.experiments.paper import DATASET
from stella.methods.base import MemoryConfig
from stella.report.methods import spell_bytes
from stella.runs.config import ModelConfig, RunConfig
from stella.train.config import TrainConfig

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Variant:
    label: str
    set: tuple[str, ...]  # what differs from the base, as on the command line


@dataclass(frozen=True)
class Order:
    """One table: a sequence of tasks, and the paper's tables it is set beside."""

    tasks: tuple[str, ...] = ()  # none: as the data have them
    paper: tuple[str, ...] = ()  # names in paper.toml; a variant's row is the first of that name


@dataclass(frozen=True)
class SpeedSteps:
    """For a recipe that measures speed and memory instead of learning."""

    steps: int
    warmup: int  # steps before these: the memory is filled, kernels are compiled
    gpu: tuple[str, ...] = ()  # what differs from the base where there is a GPU


@dataclass(frozen=True)
class Recipe:
    title: str
    cost: str
    variants: dict[str, Variant]
    orders: dict[str, Order]
    base: dict[str, Any] = field(default_factory=dict)
    dataset: str = DATASET  # of the paper's figures that are set beside ours
    speed: SpeedSteps | None = None

    @property
    def keys(self) -> list[str]:
        """`ORDER/VARIANT` of all runs."""
        return [f"{order}/{variant}" for order in self.orders for variant in self.variants]

    def config(self, order: str, variant: str, overrides: Sequence[str] = ()) -> RunConfig:
        """`overrides` change the base; what a variant sets is its own."""
        return build(RunConfig, self.tree([*overrides, *self.variants[variant].set], self.orders[order].tasks))

    def about(self, overrides: Sequence[str] = ()) -> str:
        """What all variants share unless they say otherwise, in one line."""
        tree = self.tree(overrides)
        model = build(ModelConfig, tree.get("model", {}), "model.")
        memory = build(MemoryConfig, tree.get("memory", {}), "memory.")
        rate = build(TrainConfig, tree.get("train", {}), "train.").lr
        start = f" from {model.weights}" if model.weights else ""
        room = f"{memory.clips:,} clips" if memory.bytes is None else spell_bytes(memory.bytes)
        return f"Recipe: model {model.preset}{start}, learning rate {rate:g}, memory {room}."

    def shadowed(self, overrides: Sequence[str], only: Sequence[str] = ()) -> list[str]:
        """A sentence for each override that does not reach some variants, since they set the same key."""
        said = []
        for override in overrides:
            key = override.partition("=")[0]
            own = [name for name, each in self.variants.items() if any(s.startswith(f"{key}=") for s in each.set)]
            if missed := [name for name in own if not only or name in only]:
                said.append(f"{override} does not reach {', '.join(missed)}: there {key} is the variant's own.")
        return said

    def tree(self, values: Sequence[str], tasks: Sequence[str] = ()) -> dict[str, Any]:
        """The base with these tasks and values, not checked yet."""
        tree = deepcopy(self.base)
        if tasks:
            tree.setdefault("data", {})["tasks"] = list(tasks)
        for value in values:
            lay(tree, value)
        return tree


def names() -> list[str]:
    """Of all recipes that are reproductions."""
    return [path.stem for path in sorted(RECIPES.glob("*.toml")) if "variants" in read_toml(path)]


def load(name: str) -> Recipe:
    """By its name in `recipes/`, or from a file of one's own."""
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not name.endswith(".toml") and name not in names():
        raise StellaError(
            f"no reproduction is called {name!r}; choose one of {', '.join(names()) or f'none, {RECIPES} is missing'}, "
            "or give a TOML file"
        )
    tree = read_toml(path)
    for key, cls in (("variants", Variant), ("orders", Order)):
        tree[key] = {each: build(cls, of, f"{key}.{each}.") for each, of in tree.get(key, {}).items()}
    if (like := tree.pop("like", None)) is not None:
        tree.setdefault("base", load(like).base)
    return build(Recipe, tree)


def runs(
    name: str, overrides: Sequence[str] = (), only: Sequence[str] = (), orders: Sequence[str] = ()
) -> dict[str, RunConfig]:
    """Every run of a reproduction but for its seed: `ORDER/VARIANT` and its configuration, ready for `pretrain`.

    `only` and `orders` choose some variants and orders. Whoever runs them in processes of their own gives each
    `pretrain(replace(config, seed=seed), FOLDER / key / f"seed-{seed}", resume=True)` and calls `collect(FOLDER)`
    at the end: that is all that `reproduce` does.
    """
    recipe = load(name)
    chosen_orders, chosen = _chosen("order", orders, recipe.orders), _chosen("variant", only, recipe.variants)
    return {f"{o}/{v}": recipe.config(o, v, overrides) for o in chosen_orders for v in chosen}


def _chosen(kind: str, wanted: Sequence[str], known: dict[str, Any]) -> list[str]:
    if unknown := [name for name in wanted if name not in known]:
        raise StellaError(f"no {kind} is called {unknown[0]!r}; choose from {', '.join(known)}")
    return list(wanted or known)

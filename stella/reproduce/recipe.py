"""The recipe of a reproduction: a base configuration, named variants of it, and the orders of tasks they are run in.

A TOML file in `recipes/`. A recipe that is `like` another and has no base has that one's: their runs can be compared.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stella.config import build, lay, read_toml
from stella.errors import StellaError
from stella.train.config import RunConfig

RECIPES = Path(__file__).parents[2] / "recipes"


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
    speed: SpeedSteps | None = None

    def config(self, order: str, variant: str, overrides: Sequence[str] = ()) -> RunConfig:
        """`overrides` change the base; what a variant sets is its own."""
        tree = deepcopy(self.base)
        if tasks := self.orders[order].tasks:
            tree.setdefault("data", {})["tasks"] = list(tasks)
        for override in (*overrides, *self.variants[variant].set):
            lay(tree, override)
        return build(RunConfig, tree)


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

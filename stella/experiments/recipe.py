"""Recipes: TOML files with the configuration of a run and, for a reproduction, the variants of it that are compared.

A recipe that is shipped (`recipes/`) is known by its name, any other by its path. `like = "other"` inherits the
other's run configuration; the recipe's own keys are merged over it. The keys of a reproduction (title, cost, variants,
orders, dataset, speed, seeds, initial …) are not inherited.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from stella.config import build, layered, nearest, read_toml
from stella.errors import ConfigError
from stella.experiments.paper import DATASET
from stella.methods.base import MemoryConfig
from stella.model.weights import preset_of
from stella.report.methods import format_bytes
from stella.runs.config import ModelConfig, RunConfig
from stella.runs.record import flatten
from stella.train.config import TrainConfig

RECIPES = Path(__file__).parent / "recipes"
Tree = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    label: str
    set: tuple[str, ...]  # what differs from the base, as on the command line


@dataclass(frozen=True)
class Order:
    """One table: a sequence of tasks, and the paper's tables to print beside it."""

    tasks: tuple[str, ...] = ()  # empty: the order of the data
    paper: tuple[str, ...] = ()  # names in paper.toml; a variant's row is the first of that name
    set: tuple[str, ...] = ()  # what differs from the base in this order; a variant's own values win
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of some variants in this order; these win


@dataclass(frozen=True)
class SpeedSteps:
    """For a recipe that measures speed and memory instead of learning."""

    steps: int  # timed steps, after the warm-up
    gpu: tuple[str, ...] = ()  # what differs from the base on a GPU


@dataclass(frozen=True)
class Recipe:
    """A reproduction: every variant is run in every order of the tasks."""

    title: str
    cost: str
    variants: dict[str, Variant]
    orders: dict[str, Order]
    base: Tree  # the run configuration that all variants share
    dataset: str = DATASET  # which of the paper's datasets to print beside our results
    speed: SpeedSteps | None = None
    first_seed: int = 0  # seeds are first_seed, first_seed + 1, …; development has others than tables
    columns: tuple[str, ...] = ()  # further columns of results.csv to print
    plot: str = ""  # drawn beside the table: "methods", "gap", or what the numbers at the end of variants' names are
    attention: bool = False  # draw where the sound is found after each task, and measure it
    seeds: int = 5  # that are run unless the command says otherwise
    initial: tuple[str, ...] = ()  # recipes of the runs that make the initial weights if none are given
    transfer: tuple[str, ...] = ()  # downstream tasks that the weights of every run are tested on

    @property
    def keys(self) -> list[str]:
        """`ORDER/VARIANT` of all runs."""
        return [f"{order}/{variant}" for order in self.orders for variant in self.variants]

    def config(self, order: str, variant: str, overrides: Sequence[str] = ()) -> RunConfig:
        """The configuration of one run. `overrides` change the base; an order's and a variant's own values win."""
        return build(RunConfig, self.tree(overrides, self.orders[order].tasks, self.own(order, variant)))

    def own(self, order: str, variant: str) -> list[Sequence[str]]:
        """What differs from the base in one run, in layers: later ones win."""
        table = self.orders[order]
        return [table.set, self.variants[variant].set, table.variants.get(variant, ())]

    def about(self, overrides: Sequence[str] = ()) -> str:
        """One line on what all variants share unless they set it themselves."""
        tree = self.tree(overrides)
        model = build(ModelConfig, tree.get("model", {}), "model.")
        memory = build(MemoryConfig, tree.get("memory", {}), "memory.")
        rate = build(TrainConfig, tree.get("train", {}), "train.").lr
        start = f" from {model.weights}" if model.weights else ""
        preset = model.preset or (preset_of(model.weights) if model.weights else None) or "tiny"
        room = f"{memory.clips:,} clips" if memory.bytes is None else format_bytes(memory.bytes)
        own = ["memory.bytes" in _keys(each.set) for each in self.variants.values()]
        size = "" if own and all(own) else f", memory {room}"
        return f"Recipe: model {preset}{start}, learning rate {rate:g}{size}."

    def shadowed(self, overrides: Sequence[str], only: Sequence[str] = (), orders: Sequence[str] = ()) -> list[str]:
        """A sentence for each override that some of these variants or orders ignore because they set the same key."""
        said = []
        for override in overrides:
            key = override.partition("=")[0]
            own = [name for name, each in self.variants.items() if key in _keys(each.set)]
            if ignoring := [name for name in own if not only or name in only]:
                said.append(f"{override} does not apply to {', '.join(ignoring)}: a variant's own value wins.")
            said += [
                f"{override} does not apply to the order {name}: its own value wins."
                for name in self.orders
                if (not orders or name in orders) and key in _keys(self.orders[name].set)
            ]
        return said

    def tree(self, values: Sequence[str], tasks: Sequence[str] = (), own: Sequence[Sequence[str]] = ()) -> Tree:
        """The base with these tasks and values, and what a run has of its own, not validated yet. `data.tasks=…` picks
        some of the tasks; their order stays."""
        tree = deepcopy(self.base)
        if tasks:
            tree.setdefault("data", {})["tasks"] = list(tasks)
        tree = with_values(tree, values, *own)
        given = tree.get("data", {}).get("tasks")
        if isinstance(given, list) and set(map(str, given)) <= set(tasks):
            tree["data"]["tasks"] = [task for task in tasks if task in given]
        return tree


def with_values(tree: Tree, *layers: Sequence[str]) -> Tree:
    """A recipe's tables with layers of `key.sub=value` over them. Under other model.weights the recipe's own model
    sizes, which follow from the weights, are dropped."""
    if any(value.startswith("model.weights=") for values in layers for value in values):
        tree = {**tree, "model": {}}
    return layered(RunConfig, tree, *layers)


def _keys(values: Sequence[str]) -> set[str]:
    """The keys that these values set, and those that they clear."""
    return set(flatten(layered(RunConfig, values)))


OF_A_RUN = [f.name for f in fields(RunConfig)]
OF_A_REPRODUCTION = [f.name for f in fields(Recipe) if f.name != "base"]


def shipped() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def names() -> list[str]:
    """All shipped recipes that are reproductions."""
    return [name for name in shipped() if "variants" in read_toml(RECIPES / f"{name}.toml")]


def find(recipe: str, beside: Path, offered: Callable[[], list[str]] = shipped) -> Path:
    """The file of a recipe: a path (relative to `beside`) if it looks like one, else the name of a shipped recipe.

    An unknown name is answered with those that are `offered`.
    """
    is_shipped = recipe in shipped()
    if not is_shipped and (beside / recipe).is_dir():
        raise ConfigError(
            f"{recipe} is a folder, not a recipe; take its videos with data.source=folder data.path={recipe}"
        )
    if "/" in recipe or "\\" in recipe or recipe.endswith(".toml"):
        return beside / recipe
    if not is_shipped:
        known = offered()
        raise ConfigError(
            f"no recipe is called {recipe!r}{nearest(recipe, known)} (known: {', '.join(known)}; "
            "the path of your own ends in .toml)"
        )
    return RECIPES / f"{recipe}.toml"


def read(recipe: str, heirs: tuple[Path, ...] = (), offered: Callable[[], list[str]] = shipped) -> Tree:
    """The tables of a recipe with those that it inherits, checked for unknown top-level keys."""
    path = find(recipe, heirs[-1].parent if heirs else Path(), offered)
    if path in heirs:
        raise ConfigError(
            f"{path} is `like` itself ({' → '.join(each.stem for each in (*heirs, path))}); break the loop"
        )
    tree = read_toml(path)
    like = tree.pop("like", None)
    known = [*OF_A_REPRODUCTION, *OF_A_RUN, "like"]
    for key in tree:
        if key not in known:
            raise ConfigError(f"unknown key {key} in {path}{nearest(key, known)} (known: {', '.join(known)})")
    if like is None:
        return tree
    if not isinstance(like, str):
        raise ConfigError(f"like in {path} must be the name or path of a recipe, not {like!r}")
    return layered(RunConfig, _of_a_run(read(like, (*heirs, path))), tree)


def _of_a_run(tree: Tree) -> Tree:
    return {key: value for key, value in tree.items() if key in OF_A_RUN}


def run_tree(recipe: str) -> Tree:
    """The run configuration of any recipe, not validated yet."""
    return _of_a_run(read(recipe))


def run_config(recipe: str | None, values: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run from a recipe (None: the defaults) and `key.sub=value` overrides."""
    return build(RunConfig, with_values(run_tree(recipe) if recipe else {}, values))


def described(recipe: str) -> list[str]:
    """What a recipe says of itself, and the values that it sets or inherits, as on the command line."""
    file, tree = find(recipe, Path()), read(recipe)
    comment = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    lines = [str(file), *(line.removeprefix("#").removeprefix(" ") for line in comment)]
    lines += [f"{key}: {tree[key]}" for key in ("title", "cost") if key in tree]
    lines += [f"  {key}={_as_given(value)}" for key, value in flatten(_of_a_run(tree)).items()]
    variants = load(recipe).variants if "variants" in tree else {}
    return lines + [f"variant {name}: {' '.join(each.set)}" for name, each in variants.items()]


def _as_given(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def load(recipe: str) -> Recipe:
    """A reproduction by its name or path."""
    tree = read(recipe, offered=names)
    if "variants" not in tree:
        raise ConfigError(
            f"{recipe} is the recipe of a single run: use `stella pretrain {recipe}` or `stella compare {recipe}`, "
            f"or reproduce one of {', '.join(names())}"
        )
    for key, cls in (("variants", Variant), ("orders", Order)):
        tables = tree.get(key, {})
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise ConfigError(f"{key} in {recipe} must be a table of tables")
        tree[key] = {each: build(cls, of, f"{key}.{each}.") for each, of in tables.items()}
    own = {key: value for key, value in tree.items() if key in OF_A_REPRODUCTION}
    try:
        return build(Recipe, own | {"base": _of_a_run(tree)})
    except ConfigError as error:
        raise ConfigError(f"{find(recipe, Path(), names)}: {error}") from error


def runs(
    name: str, overrides: Sequence[str] = (), only: Sequence[str] = (), orders: Sequence[str] = ()
) -> dict[str, RunConfig]:
    """Every run of a reproduction except for its seed: `ORDER/VARIANT` and its configuration.

    `only` and `orders` select variants and orders of tasks. `stella.experiments.runner.run_all` runs them.
    """
    recipe = load(name)
    chosen_orders = _selected("order", orders, list(recipe.orders))
    chosen = _selected("variant", only, list(recipe.variants))
    return {f"{o}/{v}": recipe.config(o, v, overrides) for o in chosen_orders for v in chosen}


def _selected(kind: str, wanted: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"no {kind} is called {unknown[0]!r}; choose from {', '.join(known)}")
    return wanted or known

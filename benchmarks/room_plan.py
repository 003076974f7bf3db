"""The runs of a reproduction as a plan for `room.py`, seed by seed.

    python benchmarks/room_plan.py table1-full model.weights=base-full.safetensors train.compile=on > plan.json
    python benchmarks/room_plan.py table1 --only esmer,esmer-dct > plan.json

`key.sub=value` changes all runs, as in `stella reproduce`: a variant's own value wins.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from stella.experiments.recipe import Recipe, load


def plan(
    name: str, recipe: Recipe, seeds: int, values: Sequence[str], end: bool, only: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Of the variants in `only`. With `end`, slow weights are evaluated after the last task alone."""
    for seed in range(recipe.first_seed, recipe.first_seed + seeds):
        for at, order in recipe.orders.items():
            for of in only:
                tasks = json.dumps(recipe.config(at, of, values).data.tasks)
                given = [*values, f"seed={seed}", *([f"data.tasks={tasks}"] if order.tasks else [])]
                given += [value for layer in recipe.own(at, of) for value in layer]
                run = {"label": f"{at}/{of}", "recipe": name, "set": changed(given)}
                yield run | ({"slow": "end"} if end else {})


def changed(values: Sequence[str]) -> list[str]:
    """The method first; of two values for a key, only the last, which wins."""
    wins = {value.partition("=")[0]: value for value in values}
    return sorted(wins.values(), key=lambda value: not value.startswith("method="))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("values", nargs="*")
    parser.add_argument("--seeds", type=int, help="how many; as many as the recipe says")
    parser.add_argument("--only", help="variants, with commas between them; all")
    parser.add_argument("--slow-at-the-end", action="store_true")
    given = parser.parse_intermixed_args()
    recipe = load(given.recipe)
    only = given.only.split(",") if given.only else list(recipe.variants)
    if unknown := ", ".join(of for of in only if of not in recipe.variants):
        parser.error(f"{given.recipe} has no {unknown}")
    runs = plan(given.recipe, recipe, given.seeds or recipe.seeds, given.values, given.slow_at_the_end, only)
    print("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]")


if __name__ == "__main__":
    main()

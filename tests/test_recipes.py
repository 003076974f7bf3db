"""Every recipe can be read, and says what it is."""

from pathlib import Path

import pytest

from stella.config import resolve
from stella.methods import METHODS
from stella.train.config import RunConfig, model_config, settle

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
DEMO = Path(__file__).parents[1] / "stella" / "demo.toml"


@pytest.mark.parametrize("recipe", [*RECIPES, DEMO], ids=lambda path: path.name)
def test_a_recipe_resolves(recipe: Path) -> None:
    config = settle(resolve(RunConfig, recipe))
    assert config.method in METHODS
    assert model_config(config).image_size == config.stream.size
    assert recipe.read_text().startswith("# ")


def test_memories_of_the_comparison_are_equal_in_bytes() -> None:
    """400 clips of STELLA's and 800 of STELLA+'s, as the recipe says."""
    from stella.memory import capacity_for

    config = settle(resolve(RunConfig, RECIPES[0].parent / "scenes.toml"))
    held = {
        name: capacity_for(
            METHODS[name].columns(model_config(config), METHODS[name].Config()), clips=None, bytes=config.memory.bytes
        )
        for name in ("stella", "stella_plus")
    }
    assert held == {"stella": 400, "stella_plus": 800}

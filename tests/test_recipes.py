"""Every recipe can be read, says what it is, and builds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stella.config import build, read_toml, resolve
from stella.memory import capacity_for
from stella.methods import METHODS
from stella.reproduce import load, names, runs
from stella.train.config import RunConfig, model_config, settle
from stella.train.run import build_method

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
SINGLE = [path for path in RECIPES if "variants" not in read_toml(path)]
DEMO = Path(__file__).parents[1] / "stella" / "demo.toml"
PAPER = ("finetune", "er", "mir", "derpp", "gmed", "cls_er", "lump", "esmer", "stella", "stella_plus", "stella++")
SMALL = ("model.preset=tiny", "model.weights=base-tiny", "train.device=cpu")


@pytest.mark.parametrize("recipe", [*SINGLE, DEMO], ids=lambda path: path.name)
def test_a_recipe_resolves(recipe: Path) -> None:
    config = settle(resolve(RunConfig, recipe))
    assert config.method in METHODS
    assert model_config(config).image_size == config.stream.size
    assert recipe.read_text().startswith("# ")


def test_memories_of_the_comparison_are_equal_in_bytes() -> None:
    """400 clips of STELLA's and 800 of STELLA+'s, as the recipe says."""
    config = settle(resolve(RunConfig, RECIPES[0].parent / "scenes.toml"))
    held = {
        name: capacity_for(
            METHODS[name].columns(model_config(config), METHODS[name].Config()), clips=None, bytes=config.memory.bytes
        )
        for name in ("stella", "stella_plus")
    }
    assert held == {"stella": 400, "stella_plus": 800}


def test_every_comparison_of_the_paper_has_a_recipe() -> None:
    paper = {"audio_selection", "efficiency", "memory_size", "ratios", "sampling", "table1", "temperature"}
    assert set(names()) == paper | {"why", "scoring", "fast"}  # and three studies of our own


@pytest.mark.parametrize("name", names())
def test_every_run_of_a_reproduction_builds(name: str) -> None:
    """From the shipped weights, with which one learns; every variant is another experiment."""
    made = runs(name, SMALL)
    assert len(made) == len(load(name).orders) * len(load(name).variants)
    first = next(iter(load(name).orders))
    for key, config in made.items():
        if key.startswith(first):  # an order changes nothing of the method
            method = build_method(settle(config), torch.device("cpu"))
            assert method.config == build(METHODS[config.method].Config, config.args)
    assert len({repr(config) for config in made.values()}) == len(made)


def test_the_main_comparison_is_fair() -> None:
    """The same bytes (GMED: ER's clips), rate and data for all, the same batches for all but STELLA++."""
    made = {key: settle(config) for key, config in runs("table1").items()}
    assert {key.split("/")[1] for key in made} == {*PAPER, "multitask"}
    base = made["original/finetune"]
    er = METHODS["er"].columns(model_config(base), METHODS["er"].Config())
    clips_of_er = capacity_for(er, clips=None, bytes=base.memory.bytes)
    for key, config in made.items():
        assert (config.train, config.model) == (base.train, base.model)
        assert config.memory == (
            replace(base.memory, clips=clips_of_er, bytes=None) if config.method == "gmed" else base.memory
        )
        assert config.stream.batch_size == (106 if key.endswith("stella++") else 64)
        assert set(config.data.tasks) == set(base.data.tasks) and len(config.data.tasks) == 6
        assert "virtual_lr" not in config.args  # MIR and GMED look ahead by a step of train.lr
    assert made["shuffled/er"].data.tasks != made["original/er"].data.tasks
    stella = METHODS["stella"].columns(model_config(base), METHODS["stella"].Config())
    assert capacity_for(stella, clips=None, bytes=base.memory.bytes) == 400


def test_ablations_change_table1s_stella() -> None:
    """Their default is table1's STELLA, so that all tables can be read together."""
    stella = settle(runs("table1")["original/stella"])
    default = {
        "sampling": "stella",
        "audio_selection": "time",
        "ratios": "stella",
        "temperature": "beta-0.4",
        "memory_size": "stella-73",
    }
    for name, variant in default.items():
        config = settle(runs(name)[f"original/{variant}"])
        args = build(METHODS["stella"].Config, config.args)
        assert (config.method, args) == ("stella", METHODS["stella"].Config())
        assert (config.memory, config.train, config.model) == (stella.memory, stella.train, stella.model)
        assert config.data.clips == stella.data.clips and not config.data.tasks  # all, as they are numbered

"""Every recipe can be read, says what it is, and builds."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stella.config import build, read_toml, resolve
from stella.experiments import demo
from stella.experiments import recipe as recipe_file
from stella.experiments.reproduce import load, names, runs
from stella.memory import capacity_for
from stella.methods import METHODS
from stella.model import weights
from stella.report.methods import hyper_parameters
from stella.runs.build import build_method
from stella.runs.config import RunConfig, model_config, settle

RECIPES = sorted(recipe_file.RECIPES.glob("*.toml"))
SINGLE = [path for path in RECIPES if "variants" not in read_toml(path)]
PAPER_SOURCE = Path(__file__).parents[3] / "shared" / "paper.tex"
DEMO = Path(demo.__file__).with_name("demo.toml")
PAPER = ("finetune", "er", "mir", "derpp", "gmed", "cls_er", "lump", "esmer", "stella", "stella_plus", "stella++")
SMALL = ("model.preset=tiny", "model.weights=base-tiny", "train.device=cpu")
OWN_CLIPS = ("data.path=clips", "data.pixels=96", "data.duration=2.56", "memory.clips=50")


@pytest.mark.parametrize("recipe", [*SINGLE, DEMO], ids=lambda path: path.name)
def test_a_recipe_resolves(recipe: Path) -> None:
    config = settle(resolve(RunConfig, recipe))
    assert config.method in METHODS
    assert model_config(config).image_size == config.stream.size
    assert recipe.read_text().startswith("# ")


@pytest.mark.parametrize("recipe", [*RECIPES, DEMO], ids=lambda path: path.name)
def test_initial_weights_that_a_recipe_names_ship(recipe: Path) -> None:
    for name in re.findall(r'^weights = "(.+?)"', recipe.read_text(encoding="utf-8"), re.M):
        assert weights.find(name).parent == weights.SHIPPED, name


def test_the_main_comparison_starts_from_its_own_weights() -> None:
    build_method(settle(runs("table1", ["train.device=cpu"])["original/stella"]), torch.device("cpu"))


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
    own = {"why", "scoring", "fast"}  # studies of our own
    assert set(names()) == paper | {"continual-vs", "continual-as"} | own


@pytest.mark.parametrize("name", names())
def test_every_run_of_a_reproduction_builds(name: str) -> None:
    """From the shipped weights, with which one learns; every variant is another experiment."""
    made = runs(name, [*SMALL, *(OWN_CLIPS if name.startswith("continual") else ())])
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


SYMBOLS = {  # of the paper's table of hyper-parameters, and the fields that have them
    "mir": {"C": "candidates"},
    "derpp": {r"\alpha": "alpha"},
    "gmed": {r"\alpha": "alpha", r"\beta": "beta", r"\gamma": "gamma"},
    "cls_er": dict(
        zip(
            (r"\lambda", r"\alpha_{S}", r"\alpha_{P}", "r_{S}", "r_{P}"),
            ("weight", "alpha_stable", "alpha_plastic", "rate_stable", "rate_plastic"),
            strict=True,
        )
    ),
    "lump": {r"\lambda": "concentration"},
    "esmer": {r"\alpha_l": "alpha_loss", r"\beta": "beta", r"\gamma": "gamma", r"\alpha": "alpha", "r": "rate"},
    "stella": {r"\alpha": "alpha", r"\beta": "beta", r"\rho_{a}": "keep_ratio", r"\rho_{v}": "keep_ratio"},
}
TITLES = {METHODS[name].title: name for name in SYMBOLS}


def rows_of(label: str) -> dict[str, list[str]]:
    """A table of the paper by its first column, cells that span several columns repeated."""
    text = PAPER_SOURCE.read_text(encoding="utf-8")
    end = text.index(rf"\label{{{label}}}")
    lines = text[text.rindex(r"\begin{tabular}", 0, end) : end].split(r"\\")
    rows = {}
    for line in lines:
        first, *cells = (cell.strip() for cell in line.split("&"))
        spans = [re.fullmatch(r"\\multicolumn\{(\d)\}\{c\}\{(.*)\}", cell) for cell in cells]
        whole = [[s[2]] * int(s[1]) if s else [cell] for s, cell in zip(spans, cells, strict=True)]
        rows[first.splitlines()[-1].strip("{}") if first else ""] = [cell for span in whole for cell in span]
    return rows


@pytest.mark.skipif(not PAPER_SOURCE.exists(), reason="the paper's source is not here")
@pytest.mark.parametrize(("name", "column", "clips"), [("continual-vs", 0, 2000), ("continual-as", 1, 5000)])
def test_the_papers_datasets_are_run_with_its_values(name: str, column: int, clips: int) -> None:
    made = {key.split("/")[1]: settle(c) for key, c in runs(name, ["data.path=clips"], orders=["original"]).items()}
    assert list(made) == [*PAPER, "multitask"]
    told = 0
    for title, cells in rows_of("tab:baseline_hyp").items():
        if (method := TITLES.get(title.removesuffix(" (Ours)"))) is None:
            continue
        values = re.findall(r"([\\\w{}]+?)(?:\\;)*:(?:\\;)*(\d+(?:\.\d+)?)", cells[column])
        assert [symbol for symbol, _ in values] == list(SYMBOLS[method])
        for run in ("stella", "stella_plus", "stella++") if method == "stella" else (method,):
            args = build(METHODS[made[run].method].Config, made[run].args)
            assert [str(getattr(args, SYMBOLS[method][symbol])) for symbol, _ in values] == [v for _, v in values]
        told += 1
    assert told == len(SYMBOLS)
    training = {what: cells[column] for what, cells in rows_of("tab:training_hyp").items() if len(cells) > 1}
    for run, config in made.items():
        larger = run == "stella++"
        assert config.stream.batch_size == int(training["Batch size"]) * (15 / 9 if larger else 1)
        assert (config.stream.epochs, config.stream.augment) == (int(training["Epoch"]), True)
        assert (config.train.lr, config.train.weight_decay) == (float(training["Learning rate"]), 5e-7)
        assert f"{config.train.beta1}, {config.train.beta2}" in training["Optimizer momentum"]
        assert config.memory.clips == (2 * clips if config.method == "stella_plus" else clips)
        assert config.model.preset == "base"


def test_the_papers_other_dataset_is_told_beside_the_fields() -> None:
    """Where its value is another, and of no field that has none there."""
    made = {key: runs("continual-as", ["data.path=clips"])[f"original/{key}"] for key in (*SYMBOLS, "stella_plus")}
    for name, config in made.items():
        said = {field: comment for field, _, _, comment in hyper_parameters(METHODS[name].Config)}
        told = {field for field, comment in said.items() if "Continual-AS)" in comment}
        assert told == set(config.args), name
        assert all(f"({value} on Continual-AS)" in said[field] for field, value in config.args.items())
    for name in ("random", "mats"):
        assert not any("Continual-AS" in comment for *_, comment in hyper_parameters(METHODS[name].Config))


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

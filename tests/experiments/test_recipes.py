"""Every recipe can be read by its name, inherits what it should, and builds."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stella.columns import capacity_for
from stella.config import build
from stella.errors import ConfigError
from stella.experiments.recipe import RECIPES, find, load, names, read, run_config, runs, shipped
from stella.methods import METHODS
from stella.model import weights
from stella.report.methods import hyper_parameters
from stella.runs.build import build_method
from stella.runs.config import RunConfig, model_config, settle

SINGLE = [name for name in shipped() if name not in names()]
PRINTED = json.loads((Path(__file__).parents[1] / "data" / "paper_tables.json").read_text())
PAPER = ("finetune", "er", "mir", "derpp", "gmed", "cls_er", "lump", "esmer", "stella", "stella_plus", "stella++")
SMALL = ("model.preset=tiny", "model.weights=base-tiny", "train.device=cpu")
DEVELOPMENT = 100  # the first seed that is not for tables
OWN_CLIPS = ("data.path=clips", "data.pixels=96", "data.duration=2.56", "memory.clips=50")


@pytest.mark.parametrize("name", SINGLE)
def test_a_recipe_of_a_single_run_resolves(name: str) -> None:
    config = settle(run_config(name, ["data.path=clips"] if name.startswith("initial") else []))
    assert config.method in METHODS
    assert model_config(config).image_size == config.stream.size


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_explains_itself_and_its_initial_weights_ship(name: str) -> None:
    assert find(name, Path()).read_text().startswith("# ")
    if file := read(name).get("model", {}).get("weights"):
        assert weights.find(file).parent == weights.SHIPPED


# Model, weights, clips, evaluation clips, batch, epochs, memory, learning rate, warm-up, precision, compile.
ON_SCENES = ("tiny", "base-tiny", 800, 240, 64, 6, 71_939_200, 5e-4, 20, "float32", "off")
ROOM = ("tiny", "base-wide", 3200, 960, 64, 6, 36_000_000, 5e-4, 20, "auto", "off")
BASES = {
    **dict.fromkeys(("scenes", "why", "fast", "scoring"), ON_SCENES),
    **dict.fromkeys(("room", "table1", "sampling"), ROOM),
    "table1-small": ("small", "base-wide-small", *ROOM[2:]),
    "table1-full": ("small", "base-wide-small", 3200, 960, 64, 6, 176_650_000, 5e-4, 20, "auto", "off"),
    "stella++": ("tiny", "base-tiny", 800, 240, 106, 6, 71_939_200, 5e-4, 20, "auto", "off"),
    "base-tiny": ("tiny", None, 24000, 480, 256, 56, None, 1e-3, 300, "float32", "off"),
    "base-small": ("small", None, 48000, 480, 256, 36, None, 1e-3, 300, "bfloat16", "auto"),
    "efficiency": ("tiny", None, 30, 240, 9, 1, None, 1e-4, 0, "auto", "auto"),
}


@pytest.mark.parametrize("name", BASES)
def test_values_that_results_depend_on(name: str) -> None:
    c = run_config(name)
    data = (c.data.clips, c.data.eval_clips, c.stream.batch_size, c.stream.epochs)
    training = (c.memory.bytes, c.train.lr, c.train.warmup_steps, c.train.precision, c.train.compile)
    assert (c.model.preset, c.model.weights, *data, *training) == BASES[name]
    assert c.stream.augment is False and (c.memory.clips is None) == (c.memory.bytes is not None)
    assert (c.train.decay, c.stream.drop_last) == ((0.4, True) if name.startswith("base-") else (0.0, False))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_recipe_inherits_a_run_and_nothing_else(tmp_path: Path) -> None:
    """Key by key, over several steps; paths are relative to the file that names them."""
    first = write(tmp_path / "first.toml", 'like = "table1"\nmethod = "er"\n[train]\nlr = 0.5\n')
    (tmp_path / "sub").mkdir()
    second = write(tmp_path / "sub" / "second.toml", 'like = "../first.toml"\n[train]\nwarmup_steps = 7\n')
    parent, config = run_config("table1"), run_config(second, ["seed=3"])
    assert config == replace(parent, seed=3, method="er", train=replace(parent.train, lr=0.5, warmup_steps=7))
    assert "variants" not in read(first) and "title" not in read(second)
    assert run_config(None, ["seed=3"]) == RunConfig(seed=3)


def test_a_memory_is_given_in_clips_or_in_bytes_by_the_last_layer_that_does(tmp_path: Path) -> None:
    """Defaults, a recipe, what it is like, the command line, an order, a variant."""
    in_clips = write(tmp_path / "clips.toml", 'like = "scenes"\n[memory]\nclips = 9\n')
    for recipe, values, clips, room in (
        (None, ["memory.bytes=3000000"], None, 3_000_000),
        ("scenes", ["memory.clips=500"], 500, None),
        (in_clips, [], 9, None),
        (in_clips, ["memory.bytes=5"], None, 5),
    ):
        memory = run_config(recipe, values).memory
        assert (memory.clips, memory.bytes) == (clips, room)
    text = 'title = "t"\ncost = "c"\n[orders.one]\n[variants]\nown = { label = "o", set = ["memory.bytes=7"] }\n'
    recipe = load(write(tmp_path / "two.toml", f'like = "clips.toml"\n{text}plain = {{ label = "p", set = [] }}\n'))
    sizes = {name: recipe.config("one", name, ["memory.clips=4"]).memory for name in recipe.variants}
    assert [(each.clips, each.bytes) for each in sizes.values()] == [(None, 7), (4, None)]
    assert recipe.shadowed(["memory.clips=4"]) == ["memory.clips=4 does not apply to own: a variant's own value wins."]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('like = "scense"', "no recipe is called 'scense': did you mean scenes?"),
        ('like = "no.toml"', "no.toml cannot be read"),
        ('like = "own.toml"', "is `like` itself"),
        ("like = 3", "must be the name or path of a recipe, not 3"),
        ("titel = 'x'", "unknown key titel in .*own.toml: did you mean title"),
        ("[train]\nlrr = 1", "unknown key train.lrr: did you mean train.lr"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        run_config(write(tmp_path / "own.toml", text))


def test_a_name_is_a_shipped_recipe_whatever_lies_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "scenes", "seed = 9")
    write(tmp_path / "scenes.toml", "seed = 8")
    assert find("scenes", Path()) == RECIPES / "scenes.toml"
    assert (run_config("scenes.toml").seed, run_config("./scenes").seed) == (8, 9)
    with pytest.raises(ConfigError, match=r"'tabel1': did you mean table1\? \(known: .*scenes.*own"):
        read("tabel1")
    for variants in ("variants = 3", 'variants = { er = "er" }'):
        with pytest.raises(ConfigError, match="must be a table of tables"):
            load(write(tmp_path / "scenes.toml", variants))
    with pytest.raises(ConfigError, match="scenes is the recipe of a single run: use `stella pretrain scenes`"):
        load("scenes")


def test_the_main_comparison_starts_from_its_own_weights() -> None:
    build_method(settle(runs("table1", ["train.device=cpu"])["original/stella"]), torch.device("cpu"))


def test_memories_of_the_comparison_are_equal_in_bytes() -> None:
    """400 clips of STELLA's and 800 of STELLA+'s, as the recipe says."""
    config = settle(run_config("scenes"))
    held = {
        name: capacity_for(
            METHODS[name].columns(model_config(config), METHODS[name].Config()), clips=None, bytes=config.memory.bytes
        )
        for name in ("stella", "stella_plus")
    }
    assert held == {"stella": 400, "stella_plus": 800}


def test_every_comparison_of_the_paper_has_a_recipe() -> None:
    paper = {"audio_selection", "efficiency", "memory_size", "ratios", "sampling", "table1", "temperature"}
    paper |= {"downstream", "fading", "modality_gap"}
    own = {"why", "scoring", "fast", "codec", "codec_size", "room", "table1-small", "table1-full"}  # studies of our own
    assert set(names()) == paper | {"continual-vs", "continual-as"} | own


def test_development_and_tables_share_no_seed_and_no_clips() -> None:
    """What is chosen is chosen with seeds from 100 on and other clips; what is reported has neither."""
    development = {"room"}
    for name in names():
        recipe, own = load(name), OWN_CLIPS if name.startswith("continual") else ()
        clips = {config.data.seed for config in runs(name, own).values()}
        if name in development:
            assert recipe.first_seed >= DEVELOPMENT and 0 not in clips, name
        else:
            assert recipe.first_seed == 0 and clips == {0}, name


def test_committed_results_have_the_seeds_of_their_kind() -> None:
    """Studies of development have development's seeds and clips, tables have others."""
    development = {"room", "bases", "chorus"}
    of_room = {"habit.csv", "pruned.csv", "correlation.csv", "cpu.csv", "tests.csv", "chosen.csv"}
    no_column = {*of_room, "results.csv"}  # their plans are checked below
    seen = set()
    for path in sorted((Path(__file__).parents[2] / "results").rglob("*.csv")):
        lines = list(csv.DictReader(path.open(encoding="utf-8")))
        for line in lines if "seed" in lines[0] else []:
            kind = path.parent.name in development
            assert (int(line["seed"]) >= DEVELOPMENT) == kind, (path, line)
            assert not kind or path.name in no_column or line["data_seed"] != "0", (path, line)
            assert kind or line.get("data_seed", "0") == "0", (path, line)
            seen.add(kind)
    assert seen == {True, False}


def test_committed_plans_of_development_have_its_seeds_and_clips() -> None:
    root = Path(__file__).parents[2] / "results"
    for path in sorted({*root.glob("room/*.json"), *root.glob("chorus/*.json")}):
        for run in json.loads(path.read_text(encoding="utf-8")):
            values = dict(value.split("=", 1) for value in run["set"])
            given = int(values["seed"]), int(values.get("data.seed", load(run["recipe"]).tree([])["data"]["seed"]))
            assert given[0] >= DEVELOPMENT and given[1] != 0, (path, run)


def test_a_share_of_the_stream_is_as_many_bytes_for_every_method() -> None:
    """`codec_size`: the label's percentage of the stream's 3.4 GB."""
    for key, config in runs("codec_size").items():
        label = load("codec_size").variants[key.partition("/")[2]].label
        assert config.memory.bytes == 34_000_000 * int(label.split()[-1].strip("%")), key
        assert (config.memory.codec == "dct") == ("codec" in label), key


@pytest.mark.parametrize("name", names())
def test_every_run_of_a_reproduction_builds(name: str) -> None:
    """From the shipped weights, with which one learns; every variant is another experiment."""
    own = {"continual-vs": OWN_CLIPS, "continual-as": OWN_CLIPS, "table1-full": ("data.size=scenes",)}
    made = runs(name, [*SMALL, *own.get(name, ())])
    assert len(made) == len(load(name).orders) * len(load(name).variants)
    first = next(iter(load(name).orders))
    for key, config in made.items():
        if key.startswith(first):  # an order changes nothing of the method
            few = replace(config, memory=replace(config.memory, clips=4, bytes=None))
            method = build_method(settle(few), torch.device("cpu"))
            assert method.config == build(METHODS[config.method].Config, config.args)
    assert len({repr(config) for config in made.values()}) == len(made)


PENALISED = ("derpp", "stella", "stella_plus")  # with α = 0.1, chosen on development seeds


def test_the_main_comparison_is_fair() -> None:
    """The same bytes (GMED: ER's clips), rate and data for all, the same batches for all but STELLA++, the methods'
    own values but for α; every method of memory also with the codec, but GMED, which cannot. Beside these some that
    draw as often as Chorus, and STELLA++ with as many steps as the others."""
    made = {key: settle(config) for key, config in runs("table1").items()}
    rehearsing = {name for name in PAPER if name not in ("finetune", "gmed")}
    often = {f"{name}-dct-3" for name in ("er", "derpp", "cls_er", "stella_plus")}
    coded = {f"{name}-dct" for name in rehearsing} | often | {"chorus"}
    others = {"stella++-steps", "derpp-unlimited", "multitask"}
    assert {key.split("/")[1] for key in made} == {*PAPER, *coded, *others}
    base = made["original/finetune"]
    er = METHODS["er"].columns(model_config(base), METHODS["er"].Config())
    clips_of_er = capacity_for(er, clips=None, bytes=base.memory.bytes)
    for key, config in made.items():
        name = key.split("/")[1]
        assert (config.train, config.model) == (base.train, base.model)
        memory = replace(base.memory, codec="dct" if name in coded else None)
        if name in ("gmed", "derpp-unlimited"):
            memory = replace(memory, clips=clips_of_er if name == "gmed" else 6 * config.data.clips, bytes=None)
        assert config.memory == memory
        batch = {"stella++-steps": 107}.get(name, 106 if name.startswith("stella++") else 64)
        assert config.stream.batch_size == batch
        if name not in ("stella++", "stella++-dct"):
            assert config.stream.epochs * math.ceil(config.data.clips / batch) == 300
        assert set(config.data.tasks) == set(base.data.tasks) and len(config.data.tasks) == 6
        own = {"alpha": 0.1} if config.method in PENALISED else {}
        assert config.args == own | ({"draws": 3} if name in often else {})
    assert made["shuffled/er"].data.tasks != made["original/er"].data.tasks
    assert made["original/derpp"].args == settle(runs("room")["original/derpp"]).args


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


@pytest.mark.parametrize(("dataset", "clips"), [("Continual-VS", 2000), ("Continual-AS", 5000)])
def test_the_papers_datasets_are_run_with_its_values(dataset: str, clips: int) -> None:
    made: dict[str, Any] = runs(dataset.lower(), ["data.path=clips"], orders=["original"])
    made = {key.split("/")[1]: settle(config) for key, config in made.items()}
    assert list(made) == [*PAPER, "multitask"]
    assert {TITLES[title] for title in PRINTED["hyper_parameters"]} == set(SYMBOLS)
    for title, values in PRINTED["hyper_parameters"].items():
        method = TITLES[title]
        assert list(values[dataset]) == list(SYMBOLS[method])
        for run in ("stella", "stella_plus", "stella++") if method == "stella" else (method,):
            args = build(METHODS[made[run].method].Config, made[run].args)
            found = {symbol: str(getattr(args, field)) for symbol, field in SYMBOLS[method].items()}
            assert found == values[dataset]
    training = {what: values[dataset] for what, values in PRINTED["training"].items()}
    for run, config in made.items():
        larger = run == "stella++"
        assert config.stream.batch_size == int(training["Batch size"]) * (15 / 9 if larger else 1)
        assert (config.stream.epochs, config.stream.augment) == (int(training["Epoch"]), True)
        assert config.train.lr == float(training["Learning rate"])
        assert config.train.weight_decay == float(training["Weight decay"])
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
        "memory_size": "stella-36",
    }
    for name, variant in default.items():
        config = settle(runs(name)[f"original/{variant}"])
        args = build(METHODS["stella"].Config, config.args)
        assert (config.method, args) == ("stella", build(METHODS["stella"].Config, stella.args))
        assert (config.memory, config.train, config.model) == (stella.memory, stella.train, stella.model)
        assert config.data.clips == stella.data.clips and not config.data.tasks  # all, as they are numbered


def test_another_data_source_drops_the_recipes_keys_of_its_own(tmp_path: Path) -> None:
    config = run_config("scenes", ["data.source=folder", f"data.path={tmp_path}"])
    assert (config.data.source, config.data.eval_clips) == ("folder", 240) and config.train.lr == 5e-4
    with pytest.raises(ConfigError, match=r"data\.clips is not a key of data\.source=folder"):
        run_config("scenes", ["data.source=folder", f"data.path={tmp_path}", "data.clips=5"])
    with pytest.raises(ConfigError, match=r"unknown data\.source='flder'"):
        run_config("scenes", ["data.source=flder"])


def test_the_shuffled_continual_vs_has_the_papers_batch() -> None:
    made = runs("continual-vs", OWN_CLIPS, only=["er", "stella++"])
    sizes = {key: config.stream.batch_size for key, config in made.items()}
    assert sizes == {"original/er": 48, "shuffled/er": 36, "original/stella++": 80, "shuffled/stella++": 60}
    said = load("continual-vs").shadowed(["stream.batch_size=8"])
    assert any("the order shuffled: its own value wins" in line for line in said)


@pytest.mark.parametrize(
    ("name", "method", "source", "epochs"),
    [
        ("initial-vs", "finetune", "initial-vs", 25),
        ("initial-vs-matching", "matching", "audioset", 15),
        ("initial-as", "finetune", "vggsound", 25),
        ("initial-as-matching", "matching", "vggsound", 8),
    ],
)
def test_the_initial_chain_is_the_authors(name: str, method: str, source: str, epochs: int) -> None:
    config = run_config(name, ["data.path=clips"])
    assert (config.method, config.data.source, config.stream.epochs) == (method, source, epochs)
    assert (config.stream.batch_size, config.train.lr, config.train.decay) == (48, 1e-4, 0.0)


def test_tables_of_other_sizes_compare_what_table1_compares() -> None:
    """The same variants on the same clips, with as many clips in memory."""
    table = load("table1")
    for name in ("table1-small", "table1-full"):
        other = load(name)
        assert all(other.variants[each] == table.variants[each] for each in other.variants), name
        assert other.orders["original"].tasks == table.orders["original"].tasks
    full = ["model.weights=none", "model.image_size=224", "model.spec_frames=1024"]
    capacities = set()
    for name, overrides in (("table1", []), ("table1-full", full)):
        config = settle(runs(name, overrides)["original/er"])
        columns = METHODS["er"].columns(model_config(config), METHODS["er"].Config())
        capacities.add(capacity_for(columns, clips=None, bytes=config.memory.bytes))
    assert capacities == {204}

"""`stella config`: every key of a run's configuration, with a meaning, readable in 80 columns."""

import pytest
from typer.testing import CliRunner

from stella.cli import app
from stella.report.methods import hyper_parameters
from stella.report.settings import sections
from stella.transfer.config import TransferConfig

CLASSES = [(name, kind) for name, kinds in sections().items() for kind in kinds]
DOWNSTREAM = [(name, kind) for name, kinds in sections(TransferConfig).items() for kind in kinds]


def shown(*args: str) -> str:
    done = CliRunner().invoke(app, ["config", *args], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    return done.output


@pytest.mark.parametrize(("section", "kind"), CLASSES + DOWNSTREAM, ids=lambda x: getattr(x, "__name__", x))
def test_every_key_has_a_meaning(section: str, kind: type) -> None:
    tables = {*sections(), *sections(TransferConfig)}
    missing = [name for name, _, _, meaning in hyper_parameters(kind) if not meaning and name not in tables]
    assert not missing, f"{section}: give {missing} a comment in {kind.__name__}"


def test_all_keys_are_listed_with_their_defaults() -> None:
    lines = [line.split() for line in shown().splitlines() if line.strip()]
    for section, kind in CLASSES:
        for name, *_ in hyper_parameters(kind):
            if section:
                wanted = f"{section}.{name}"
                assert any(words[0] == wanted for words in lines), wanted
    assert ["train.lr", "0.0001"] in [words[:2] for words in lines]
    assert ["train.graph", "true"] in [words[:2] for words in lines]
    assert ["train.ema", "none"] in [words[:2] for words in lines]


def test_a_section_and_one_source_of_the_data() -> None:
    assert "train.lr" in shown("train") and "stream." not in shown("train")
    folder = shown("data.folder")
    assert "data.labels" in folder and "data.cache" not in folder


def test_keys_of_a_downstream_run() -> None:
    keys = [line.split()[0] for line in shown("transfer").splitlines() if line[2:3].strip()]
    assert {"warmup_epochs", "views", "features", "weights.after", "head.align"} <= set(keys)
    assert not any(key.startswith(("data", "train", "stream")) for key in keys)  # as of any run


@pytest.mark.parametrize("section", ["trian", "data.foldr", "transfer.head"])
def test_an_unknown_section_names_the_known_ones(section: str) -> None:
    done = CliRunner().invoke(app, ["config", section])
    assert done.exit_code and "hoose one of model, data" in str(done.exception)
    meant = {"trian": "train", "data.foldr": None, "transfer.head": "transfer"}[section]
    assert (f": did you mean {meant}? Choose one of" if meant else "; choose one of") in str(done.exception)

"""`stella methods`: the table of all methods, narrow enough for a pipe, and one method in detail."""

from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from stella.cli import app
from stella.columns import bytes_per_clip
from stella.methods import METHODS
from stella.methods.ablations import AblationConfig
from stella.model.cav import preset
from stella.report.methods import format_bytes, hyper_parameters


def shown(*args: str) -> str:
    done = CliRunner().invoke(app, ["methods", *args])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_table_lists_all_methods_in_order_with_the_size_of_their_memory() -> None:
    lines = shown().splitlines()
    firsts = [line.split()[0] for line in lines if line[:3].strip() and line[2:3].strip()]
    blocks = {name: firsts.index(name) for name in METHODS}
    assert list(blocks.values()) == sorted(blocks.values())
    assert max(map(len, lines)) <= 100
    text = " ".join(shown().split())
    assert "887 kB a clip" in text and "1.77 GB for 2,000" in text and "Buzzega et al., NeurIPS 2020" in text


@pytest.mark.parametrize("name", METHODS)
def test_one_method_shows_its_hyper_parameters_and_every_column(name: str) -> None:
    text, method = shown(name), METHODS[name]
    words = text.split()
    assert " ".join(method.citation.split()) in " ".join(words)
    for parameter, default, _, _ in hyper_parameters(method.Config):
        assert any(line.split()[:2] == [parameter, str(default)] for line in text.splitlines())
    columns = method.columns(preset("base"), method.Config())
    if columns is None:
        assert "No memory" in text
    else:
        assert all(name in words and f"{column.bytes:,}" in words for name, column in columns.items())
        assert f"{bytes_per_clip(columns):,}" in words


def test_field_comments_are_read_also_from_base_classes() -> None:
    assert hyper_parameters(METHODS["finetune"].Config) == []
    assert hyper_parameters(METHODS["derpp"].Config) == [
        ("alpha", 0.5, "float", "weight of the penalty (1.0 on Continual-AS)")
    ]
    assert [name for name, *_ in hyper_parameters(AblationConfig)] == ["alpha", "keep_ratio"]
    assert hyper_parameters(AblationConfig)[0][3]

    @dataclass
    class Needs:
        value: int

    assert hyper_parameters(Needs) == [("value", "required", "int", "")]


def test_an_unknown_method_is_refused_with_the_list() -> None:
    done = CliRunner().invoke(app, ["methods", "stela"])
    assert done.exit_code and "choose one of initial, matching, finetune" in str(done.exception)


def test_bytes_have_three_digits() -> None:
    assert [format_bytes(n) for n in (8, 864_264, 1_467_000, 1_728_528_000)] == ["8 B", "864 kB", "1.47 MB", "1.73 GB"]

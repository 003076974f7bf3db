"""The paper's figures are those that it prints."""

import json
from math import isnan
from pathlib import Path

import pytest

from stella.experiments.paper import WAYS, row, tables

PRINTED = json.loads((Path(__file__).parents[1] / "data" / "paper_tables.json").read_text())["figures"]
DATASETS = ("Continual-VS", "Continual-AS")


def figures(table: dict[str, object]) -> list[tuple[str, str, list[float]]]:
    """(variant, direction, row) of both datasets."""
    found = [(name, each) for dataset in DATASETS for name, each in table.get(dataset, {}).items()]  # type: ignore[attr-defined]
    return [(name, way, each[way]) for name, each in found for way in WAYS]


@pytest.mark.parametrize("name", tables())
def test_every_row_of_the_paper_is_whole(name: str) -> None:
    table = tables()[name]
    for variant, way, values in figures(table):
        assert len(values) == len(table["columns"]), (variant, way)
        missing = [column for column, value in zip(table["columns"], values, strict=True) if isnan(value)]
        assert all(column.endswith("F") and variant == "multitask" for column in missing), (variant, way)


@pytest.mark.parametrize("name", ["retrieval_table", "shuffle_retrieval_table"])
def test_averages_of_the_paper_are_means_of_their_parts(name: str) -> None:
    for variant, way, values in figures(tables()[name]):
        for average, parts in ((values[6], values[0:6:2]), (values[7], values[1:6:2])):
            if not isnan(average):
                assert abs(average - sum(parts) / 3) < 0.0051, (variant, way)


def test_tables_of_the_paper_agree_where_they_repeat_one_another() -> None:
    main = {v: row(["retrieval_table"], v) for v in tables()["retrieval_table"]["Continual-VS"]}
    for name, variants in {
        "efficiency": {v: v for v in main if v != "multitask"},
        "sampling_method": {"derpp": "derpp", "stella": "stella"},
        "audio_select_method": {"time": "stella"},
        "sample_ratio_hyp": {"stella": "stella"},
        "temperature_hyp": {"beta-0.4": "stella"},
    }.items():
        for here, there in variants.items():
            found, known = row([name], here), main[there]
            assert found and known and [found.show(f) for f in "AF"] == [known.show(f) for f in "AF"]


@pytest.mark.parametrize("name", tables())
def test_figures_are_printed_in_that_table(name: str) -> None:
    """The digits of each row are in a row of the table with this label."""
    table = tables()[name]
    printed = PRINTED[table["label"]]

    def spell(values: list[float]) -> str:
        return " ".join("-" if isnan(value) else f"{value:.2f}" for value in values)

    for variant, way, values in figures(table):
        each = table["Continual-VS"][variant]
        if len(values) == 2:  # both ways, memory and speed stand in one line
            values = [*each["a2v"], *each["v2a"], *(each[extra] for extra in ("gb", "speed") if extra in each)]
        assert any(spell(values) in line for line in printed), (variant, way, spell(values))

"""Figures of reproductions, drawn from their results."""

from pathlib import Path
from typing import Any

import pytest

from stella.experiments import figures
from stella.experiments.recipe import load
from stella.files import write_json
from stella.report.colours import LIGHT, OF_METHOD


def found(name: str, **rows: list[dict[str, str]]) -> dict[str, Any]:
    return {key: rows.get(key.split("/")[1].replace("-", "_"), []) for key in load(name).keys}


def test_accuracy_and_forgetting_over_sizes_of_memory(tmp_path: Path) -> None:
    recipe = load("memory_size")
    rows = {"er-18": [{"A": "4", "F": "12"}, {"A": "5", "F": "12"}], "er-72": [{"A": "9", "F": "8"}]}
    figure = figures._sizes(recipe, rows)
    left, right = figure.axes
    line = left.containers[0].lines[0]
    assert line.get_xdata().tolist() == [18, 72] and line.get_ydata() == pytest.approx([4.5, 9])
    assert right.containers[0].lines[0].get_ydata() == pytest.approx([12, 8])
    assert line.get_color() == LIGHT[OF_METHOD["er"]] and left.get_xlabel() == "rehearsal memory, MB"
    assert left.get_legend().get_texts()[0].get_text() == "ER"
    assert figures.draw(recipe, "original", found("memory_size", er_18=rows["er-18"]), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5_000
    assert not figures.draw(recipe, "original", found("memory_size"), tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


def test_a_method_with_the_codec_has_the_colour_of_that_without_it() -> None:
    rows = {name: [{"A": "4", "F": "12"}] for name in ("derpp-1", "stella-1", "derpp-dct-1", "stella_plus-1")}
    left, _ = figures._sizes(load("codec_size"), rows).axes
    derpp, stella, coded, _ = (bar.lines[0] for bar in left.containers)
    assert coded.get_color() == derpp.get_color() == LIGHT[OF_METHOD["derpp"]] != stella.get_color()
    assert coded.get_marker() == derpp.get_marker() != stella.get_marker()
    looks = [(line.get_linestyle(), line.get_mfc() == "white") for line in (derpp, coded, stella)]
    assert looks == [("--", True), ("-", False), ("-", False)]


def test_accuracy_and_forgetting_by_method_with_and_without_the_codec(tmp_path: Path) -> None:
    recipe = load("table1")
    figures_of = {"er": (7, 10), "er-dct": (13, 5), "er-dct-3": (17, 2), "chorus": (18, 1.5), "stella++-steps": (8, 9)}
    rows = {name: [{"A": str(a + d), "F": str(f)} for d in (-1, 1)] for name, (a, f) in figures_of.items()}
    rows |= {"derpp-unlimited": [{"A": "14", "F": "4"}], "multitask": [{"A": "15", "F": ""}]}
    left, right = figures._methods(recipe, rows).axes
    assert [each.get_text() for each in left.get_yticklabels()] == ["STELLA++, as many steps", "ER", "Chorus"]
    marks = {(bar.lines[0].get_ydata()[0], bar.lines[0].get_xdata()[0]): bar.lines[0] for bar in left.containers}
    assert marks.keys() == {(0, 8), (1, 7), (1, 13), (1, 17), (2, 18)}
    assert [marks[1, a].get_marker() for a in (7, 13, 17)] == ["o", "o", "D"]
    assert [marks[1, a].get_mfc() for a in (7, 13)] == ["white", LIGHT[OF_METHOD["er"]]]
    assert marks[2, 18].get_mfc() == LIGHT[OF_METHOD["chorus"]]
    assert {bar.lines[0].get_xdata()[0] for bar in right.containers} == {9, 10, 5, 2, 1.5}
    bounds = [[line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == "--"] for axis in (left, right)]
    assert bounds == [[14, 15], [4]]  # Multitask has no F
    one_task = found("table1", er=[{"A": "7", "F": ""}])
    for each in (one_task, found("table1", er=rows["er"])):
        assert figures.draw(recipe, "original", each, tmp_path / "a.png")
    assert not figures.draw(recipe, "original", found("table1", multitask=rows["multitask"]), tmp_path / "b.png")


def test_the_gap_has_a_line_for_each_variant_that_was_measured_after_each_task(tmp_path: Path) -> None:
    recipe = load("modality_gap")
    line = {"gaps": "0.5 0.4 0.3", "gap_decline": "0.1"}
    rows = {"lpis": [line, line], "stella": [line], "er": [{"gaps": "", "gap_decline": ""}]}
    left, _ = figures._gap(recipe, rows).axes
    assert [each.get_label() for each in left.lines] == ["LPIS only", "STELLA"]
    assert left.lines[1].get_color() == LIGHT[OF_METHOD["stella"]] != left.lines[0].get_color()
    assert not figures.draw(recipe, "original", found("modality_gap", er=rows["er"]), tmp_path / "a.png")
    left, _ = figures._gap(recipe, {name: [line] for name in ("er", "lump", "er-dct")}).axes
    assert [each.get_color() for each in left.lines] == [LIGHT[OF_METHOD[name]] for name in ("er", "lump", "er")]
    assert [(each.get_linestyle(), each.get_mfc() == "white") for each in left.lines[::2]] == [
        ("--", True),
        ("-", False),
    ]


def test_pairs_of_those_runs_that_have_them(tmp_path: Path) -> None:
    recipe, run = load("modality_gap"), tmp_path / "original" / "er" / "seed-1"
    assert not figures.draw_pairs(recipe, "original", tmp_path, 1, tmp_path / "a.png")
    run.mkdir(parents=True)
    write_json(run / "pairs.json", {"task": "task1", "share": 0.5, "pairs": [[0.0, 0.0, 1.0, 1.0]]})
    assert not figures.draw_pairs(recipe, "original", tmp_path, 0, tmp_path / "a.png")
    assert figures.draw_pairs(recipe, "original", tmp_path, 1, tmp_path / "a.png") and (tmp_path / "a.png").exists()

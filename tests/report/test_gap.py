"""Colours of methods, and figures of the modality gap."""

import re
from itertools import combinations
from math import dist
from pathlib import Path

import numpy as np
import pytest
from helpers.run_files import write_run

import stella.report
from stella.experiments.recipe import load
from stella.files import write_json
from stella.methods import METHODS
from stella.report import gap
from stella.report.colours import LIGHT, OF_METHOD, colours
from stella.report.page import write_page
from stella.report.svg import SERIES


def test_every_method_has_a_colour_of_its_own_whoever_is_beside_it() -> None:
    assert OF_METHOD.keys() == METHODS.keys() and len(set(OF_METHOD.values())) == len(METHODS) <= len(SERIES)
    for shown in (["stella"], ["er", "stella"], ["stella", "chorus", "finetune", "er"], list(METHODS)):
        assert colours(shown) == [OF_METHOD[name] for name in shown]


def test_methods_that_are_compared_have_colours_that_can_be_told_apart() -> None:
    compared = [name for name in load("table1").variants if name in OF_METHOD]
    shown = {name: [int(LIGHT[OF_METHOD[name]][i : i + 2], 16) for i in (1, 3, 5)] for name in compared}
    for (one, a), (other, b) in combinations(shown.items(), 2):
        assert dist(a, b) > 45, (one, other)  # a step of a hundred is easily seen, one of forty is not


def test_a_second_run_of_a_method_takes_a_colour_that_is_free() -> None:
    found = colours(["stella", "stella", "mine.py:Mine", "er"])
    assert found[0] == OF_METHOD["stella"] and found[3] == OF_METHOD["er"] and len(set(found)) == 4
    assert all(0 <= number < len(SERIES) for number in colours(["stella"] * 40))


def test_files_have_the_colours_of_the_page() -> None:
    css = Path(stella.report.__file__).with_name("page.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--c(\d+): (#\w+)", part)) for part in css.split("@media (prefers-color-scheme: dark)")
    )
    assert [light[str(number)] for number in range(len(SERIES))] == list(LIGHT)
    assert dark.keys() == light.keys() and len(set(dark.values())) == len(dark) == len(set(LIGHT))


def test_lines_and_declines_are_drawn_of_every_series() -> None:
    series = [
        gap.Series("ER", "red", "o", [[0.5, 0.4], [0.5, 0.3]], [0.1, 0.2]),
        gap.Series("ER, slow weights", "red", "o", [[0.5, 0.45]], [0.05], hollow=True),
    ]
    left, right = gap.new_gap_figure(series, ["task1", "task2"], "grey", "white").axes
    assert [line.get_label() for line in left.lines] == ["ER", "ER, slow weights"]
    assert left.lines[0].get_ydata() == pytest.approx([0.5, 0.35])
    assert left.get_ylim()[0] == 0 and left.get_ylim()[1] > 0.5  # a small fall is a small fall
    assert [text.get_text() for text in right.get_yticklabels()] == ["ER", "ER, slow weights"]
    assert any(line.get_xdata() == pytest.approx([0.15]) for line in right.lines if len(line.get_xdata()) == 1)


def test_pairs_and_fading_attention_are_on_the_page_of_runs_that_have_them(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name) for name in ("er", "stella")]
    page = write_page(runs, tmp_path / "page.html").read_text()
    assert "Pairs in two dimensions" not in page and "attention stay" not in page
    write_json(
        runs[1] / "pairs.json", {"task": "task1", "share": 0.3, "pairs": [[0.0, 0.1, 1.0, 0.2], [0.5, 0.1, 1.5, 0]]}
    )
    (runs[1] / "fading.png").write_bytes(b"picture")
    page = write_page(runs, tmp_path / "page.html").read_text()
    assert "STELLA (30% of the variance)" in page and "ER (" not in page and page.count("base64,cGljdHVyZQ==") == 1


@pytest.mark.parametrize("methods", [1, 3, 5])
def test_pairs_have_one_scale_and_whole_titles(methods: int) -> None:
    tall = {"share": 0.44, "pairs": [[-0.2, -0.9, 0.1, 0.9], [0.0, 0.3, 0.1, 0.4]]}
    figure = gap.new_pairs_figure([(f"method {n}", "#444444", tall) for n in range(methods)], "#cccccc", "#ffffff")
    figure.draw_without_rendering()
    axes = [axis for axis in figure.axes if axis.get_visible()]
    assert len(axes) == methods
    for axis in axes:
        box = axis._left_title.get_window_extent()
        assert box.y1 <= figure.bbox.y1 and box.x1 <= figure.bbox.x1
        width, height = axis.get_window_extent().size
        assert np.ptp(axis.get_xlim()) / width == pytest.approx(np.ptp(axis.get_ylim()) / height, rel=0.01)

"""What the page and `--status` say."""

import io
import re
from pathlib import Path

import pytest
from helpers.learning import copy
from rich.console import Console
from typer.testing import CliRunner

from stella.cli import app
from stella.files import write_json
from stella.learn import page as page_module
from stella.learn.home import Home, Plan
from stella.learn.page import render
from stella.learn.round import Learner, told
from stella.runs.stop import Stop
from stella.serve.learner import Attached


def test_figures_name_the_round_they_are_of(three: Path, tmp_path: Path) -> None:
    """The last in use, or one that is kept apart."""
    home = Home(copy(three, tmp_path / "home"))
    last = home.history()[-1]
    page = render(home)
    assert "In round 3, which is in use, on " in page and "The last point is round 3. " in page
    assert f"fell most in round 3, among the {last['gallery']} measured." in page and "After round 3: 7 clips" in page
    home.next.write_plan(Plan(1, "", 9, [], []))
    write_json(home.next.record, last | {"round": 4, "kept_apart": True, "guard": 1.0, "gallery": 9})
    page = render(home)
    assert "In round 3, which is in use, on " in page
    assert "The last point is round 4, which is kept apart. " in page and "After round 4, which is kept apart: " in page
    assert "fell most in round 4, which is kept apart, among the 9 measured." in page


def test_one_round_alone_has_no_bars(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to compare it with; what is held is told."""
    history, drawn = Home(three).history(), "clips in memory by round"
    assert drawn in render(Home(three))
    first = history[0] | {"memory": history[-1]["memory"] | {"rounds": [7]}}
    monkeypatch.setattr(Home, "history", lambda self: [first])
    page = render(Home(three))
    assert drawn not in page and "<p>After round 1: " in page and "<th>clips in memory</th>" in page


def test_matching_says_of_how_many_pairs_it_is(three: Path, tmp_path: Path) -> None:
    home = Home(copy(three, tmp_path / "home"))
    last = home.history()[-1]
    assert last["pairs"] == 2 * min(16, last["gallery"])
    write_json(home.round(3).record, last | {"matching": 59.375, "pairs": 64})
    write_json(home.round(2).record, {k: v for k, v in home.history()[1].items() if k != "pairs"} | {"matching": 43.75})
    page, shown = render(home), CliRunner().invoke(app, ["learn", str(home.root), "--status"]).output
    assert "<td>59.4% of 64 pairs</td>" in page and "<td>43.8%</td>" in page  # as of earlier versions
    assert "59% of 64\n" in shown and "44%\n" in shown and max(map(len, shown.splitlines())) <= 80


def test_too_few_clips_to_measure_with_are_told(three: Path, tmp_path: Path) -> None:
    home = Home(copy(three, tmp_path / "home"))
    for number, record in enumerate(home.history(), 1):
        few = {"gallery": number // 3, "old": None, "new": None, "F": None, "set_aside": number // 3, "worst": []}
        write_json(home.round(number).record, record | few)
    page = render(home)
    assert "; too few set aside to measure with (1)." in page and "of them measured" not in page
    assert "over time" not in page


def test_chance_stands_beside_every_a_and_so_few_clips_are_pointed_out(three: Path, tmp_path: Path) -> None:
    """Among two clips 66.7 is the least there is, and chance is 83.3."""
    home = Home(copy(three, tmp_path / "home"))
    least = {"clips": 1, "before": 200 / 3, "after": 200 / 3, "error": None}
    last = home.history()[-1] | {"gallery": 2, "old": least, "new": least, "F": 0.0, "steps": 1, "steps_taken": 1}
    write_json(home.round(3).record, last)
    assert "A on 1 old clip 66.7 → 66.7, A on 1 new clip 66.7 → 66.7 among 2 clips (chance 83.3), F 0.0" in told(last)
    few = "few clips to evaluate on: round 3 (2); figures of so few say little"
    short = "only 1 step so far: a model learns next to nothing in so few; raise --epochs, or add clips"
    console = Console(file=io.StringIO(), width=200)
    Learner(home, console, Stop()).tell(last)
    assert console.file.getvalue().splitlines()[1:] == [short, few]  # type: ignore[attr-defined]
    shown = CliRunner().invoke(app, ["learn", str(home.root), "--status"]).output
    assert re.search(r"66\.7→66\.7 66\.7→66\.7 +2 +83\.3 +0\.0", shown) and f"{short} {few}" in " ".join(shown.split())
    assert "before→after the round, %, in round 3 of 1 old clip and 1 new clip; chance" in " ".join(shown.split())
    page, tree = render(home), Attached(str(home.root)).tree()
    assert "from 66.7% to 66.7%; chance is 83.3%." in page
    assert f'<p class="note">O{short[1:]}.</p>' in page and f'<p class="note">F{few[1:]}.</p>' in page
    assert "<td>66.7 → 66.7 of 1</td><td>66.7 → 66.7 of 1</td><td>2</td><td>83.3</td><td>0.0</td>" in page
    assert tree["caveats"] == [short, few] and round(tree["history"][-1]["chance"], 1) == 83.3
    assert tree["history"][-1]["new"] == [200 / 3, 200 / 3, 1]
    write_json(home.round(3).record, last | {"gallery": 200, "steps": 100})
    few = "few clips to evaluate on: the new clips of round 3 (1); figures of so few say little"
    assert Attached(str(home.root)).tree()["caveats"] == [few] and f">F{few[1:]}.<" in render(home)
    write_json(home.round(3).record, last | {"gallery": 200, "steps": 100, "new": least | {"clips": 20}})
    assert Attached(str(home.root)).tree()["caveats"] == [] and 'class="note"' not in render(home)


def test_figures_are_explained_in_a_line_each(three: Path) -> None:
    page = render(Home(three))
    assert [f"<dt>{name}</dt>" in page for name in ("A", "among, chance", "F", "gap", "matching")] == [True] * 5


def test_without_forgetting_there_is_no_plot_of_it_and_none_is_never_negative(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, axes = Home(copy(three, tmp_path / "home")), []
    monkeypatch.setattr(page_module, "to_svg", lambda figure, label: axes.append(figure.axes[0]) or label)
    for number, record in enumerate(home.history(), 1):
        write_json(home.round(number).record, record | {"F": 0.0 if number > 1 else None})
    assert "forgetting over time" in render(home) and axes[0].get_ylim() == (0.0, 1.0)
    names = [line.get_label() for line in axes[1].lines]
    assert names.index("new clips") > names.index("new clips, before it")  # on top, where both are equal
    for number, record in enumerate(home.history(), 1):
        write_json(home.round(number).record, record | {"F": None})
    page = render(home)
    assert "accuracy over time" in page and "forgetting over time" not in page

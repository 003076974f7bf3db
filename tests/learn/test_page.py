"""What the page and `--status` say."""

from pathlib import Path

from helpers.learning import copy
from typer.testing import CliRunner

from stella.cli import app
from stella.files import write_json
from stella.learn.home import Home, Plan
from stella.learn.page import render


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


def test_matching_says_of_how_many_pairs_it_is(three: Path, tmp_path: Path) -> None:
    home = Home(copy(three, tmp_path / "home"))
    last = home.history()[-1]
    assert last["pairs"] == 2 * min(16, last["gallery"])
    write_json(home.round(3).record, last | {"matching": 59.375, "pairs": 64})
    write_json(home.round(2).record, {k: v for k, v in home.history()[1].items() if k != "pairs"} | {"matching": 43.75})
    page, shown = render(home), CliRunner().invoke(app, ["learn", str(home.root), "--status"]).output
    assert "<td>59.4% of 64 pairs</td>" in page and "<td>43.8%</td>" in page  # as of earlier versions
    assert "59% of 64 " in shown and "44% " in shown and max(map(len, shown.splitlines())) <= 80


def test_too_few_clips_to_measure_with_are_told(three: Path, tmp_path: Path) -> None:
    home = Home(copy(three, tmp_path / "home"))
    for number, record in enumerate(home.history(), 1):
        few = {"gallery": number // 3, "old": None, "new": None, "F": None, "set_aside": number // 3, "worst": []}
        write_json(home.round(number).record, record | few)
    page = render(home)
    assert "; too few set aside to measure with (1)." in page and "measured" not in page
    assert "accuracy and forgetting" not in page

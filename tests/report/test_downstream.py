"""Downstream runs side by side: which are pooled, and what tells the others apart."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers.run_files import edit_config, write_downstream
from typer.testing import CliRunner

from stella.cli import app
from stella.config import to_tree
from stella.report.downstream import by_task, read_downstream, story
from stella.runs.folder import runs_below
from stella.transfer.config import transfer_config
from stella.transfer.results import command

WORDS = "the commonest class"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def write(
    path: Path,
    value: float,
    *given: str,
    seed: int = 0,
    model: str = "base-tiny",
    digest: str = "",
    task: str = "classify",
    end: dict[str, Any] | None = None,
) -> None:
    """A finished run with these settings; `end` changes its last line."""
    write_downstream(path, task, model, value, seed)
    source = [f"weights.source={model}", f"seed={seed}", f"stream.seed={seed}", f"weights.digest={digest}"]
    tree = to_tree(transfer_config(task, None, [*source, *given]))
    edit_config(path, lambda config: (config.clear(), config.update(tree)))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= end or {}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of(folder: Path, task: str = "classify") -> list[dict[str, Any]]:
    return by_task(read_downstream(runs_below(folder, downstream=True))[0])[task]


def shown(folder: Path, task: str = "classify") -> list[tuple[str, ...]]:
    return [tuple(str(line[key]) for key in ("model", "data", "settings", "value")) for line in lines_of(folder, task)]


def test_runs_that_differ_in_their_seed_alone_are_pooled(folder: Path) -> None:
    for seed, value in ((0, 40.0), (1, 44.0)):
        write(folder / f"{seed}", value, seed=seed)
        model = f"/x/er/seed-{seed}"  # weights of a comparison differ in the seed too
        write(folder / f"er-{seed}", value + 10, seed=seed, model=model, digest=f"d{seed}")
    assert shown(folder) == [("x/er", "", "", "52.0 ± 2.8"), ("base-tiny", "", "", "42.0 ± 2.8")]
    assert [line["runs"] for line in lines_of(folder)] == [2, 2]


@pytest.mark.parametrize(
    ("given", "data", "settings"),
    [
        ("data.seed=3", ["scenes", "scenes, seed=3"], ["", ""]),
        ("data.clips=7", ["scenes", "scenes, clips=7"], ["", ""]),
        ("data.size=scenes-hard", ["scenes", "scenes, size=scenes-hard"], ["", ""]),
        ("stream.epochs=2", ["", ""], ["", "stream.epochs=2"]),
        ("head.head_rate=3", ["", ""], ["", "head.head_rate=3.0"]),
        ("train.device=cpu", ["", ""], ["", "train.device=cpu"]),
    ],
)
def test_runs_that_differ_in_more_are_not(folder: Path, given: str, data: list[str], settings: list[str]) -> None:
    write(folder / "a", 50.0)
    write(folder / "b", 40.0, given, seed=1)
    found = lines_of(folder)
    assert [line["data"] for line in found] == data and [line["settings"] for line in found] == settings
    assert [str(line["value"]) for line in found] == ["50.0", "40.0"]


def test_settings_that_no_result_depends_on_are_no_difference(folder: Path) -> None:
    write(folder / "a", 50.0)
    write(folder / "b", 40.0, "stream.workers=2", "train.checkpoint_minutes=1", "features=/somewhere", seed=1)
    assert shown(folder) == [("base-tiny", "", "", "45.0 ± 7.1")]


def test_settings_that_all_runs_share_are_not_shown(folder: Path) -> None:
    for name, rate in (("a", 1), ("b", 2)):
        write(folder / name, 50.0 - rate, "stream.epochs=3", f"train.lr={rate}")
    assert [line["settings"] for line in lines_of(folder)] == ["train.lr=1.0", "train.lr=2.0"]


def test_copies_of_a_data_set_are_told_apart_by_their_paths(folder: Path) -> None:
    for name, path in (("a", "/disk/one/clips"), ("b", "/disk/two/clips")):
        write(folder / name, 50.0, "data.source=packed", f"data.path={path}")
    write(folder / "c", 60.0)
    assert [line["data"] for line in lines_of(folder)] == ["packed, one/clips", "packed, two/clips", "scenes"]
    assert {line["settings"] for line in lines_of(folder)} == {""}


def test_the_size_of_inputs_makes_no_other_data_set(folder: Path) -> None:
    for name, side in (("a", 96), ("b", 64)):
        write(folder / name, float(side), "data.source=folder", "data.path=/clips", f"data.pixels={side}")
    assert shown(folder) == [("base-tiny", "", f"data.pixels={side}", f"{side}.0") for side in (96, 64)]


def test_a_data_set_that_has_grown_is_another(folder: Path) -> None:
    write(folder / "a", 50.0)
    write(folder / "b", 40.0, seed=1, end={"parts": [180, 20, 90]})
    assert [line["data"] for line in lines_of(folder)] == ["scenes, 180/20/60 clips", "scenes, 180/20/90 clips"]
    assert [line["clips"] for line in lines_of(folder)] == ["60", "90"]


def test_the_data_sets_of_two_tasks_are_named(folder: Path) -> None:
    write(folder / "a", 50.0)
    write(folder / "b", 40.0, "data.source=packed", "data.path=/clips", task="retrieval")
    tasks = by_task(read_downstream(runs_below(folder, downstream=True))[0])
    assert [lines[0]["data"] for lines in tasks.values()] == ["scenes", "packed"]
    assert story(tasks)[1].startswith("Downstream, retrieval on packed: base-tiny reaches 40.0%")


def test_each_line_has_its_own_baselines(folder: Path) -> None:
    for seed, chance in ((0, 4.0), (1, 5.0)):
        write(folder / f"a{seed}", 50.0, seed=seed, end={"ceilings": {"chance": 25.0, "majority": chance}})
    write(folder / "b", 40.0, "data.seed=1", end={"ceilings": {"chance": 10.0}, "parts": [180, 20, 30]})
    first, second = lines_of(folder)
    assert first["without"] == f"chance 25.0, {WORDS} 4.5 ± 0.7" and second["without"] == "chance 10.0"
    assert (first["clips"], second["clips"]) == ("60", "30")


def test_models_and_weights_are_told_apart(folder: Path) -> None:
    write(folder / "a", 50.0, model="/one/er/last", digest="x")
    write(folder / "b", 40.0, model="/two/er/last", digest="y")
    write(folder / "c", 30.0, model="/two/er/last", digest="z", seed=1)  # trained again, in the same folder
    assert [line["model"] for line in lines_of(folder)] == ["one/er/last", "two/er/last (y)", "two/er/last (z)"]


def test_a_run_that_repeats_another_is_left_out(folder: Path) -> None:
    write(folder / "a", 50.0)
    write(folder / "b", 40.0)
    rows, left_out = read_downstream(runs_below(folder, downstream=True))
    assert [row["run"].name for row in rows] == ["a"]
    assert left_out == [f"{folder}/b has the settings and the seed of {folder}/a; give it another seed"]


def test_another_figure_is_another_table(folder: Path) -> None:
    write(folder / "a", 50.0)
    write(folder / "b", 30.0, seed=1, end={"figure": "map", "test": {"map": 30.0}})
    assert [line["figure"] for line in lines_of(folder)] == ["right answers, %"]
    assert "(mAP)" in lines_of(folder, "classify, several classes a clip")[0]["figure"]


class Cells(HTMLParser):
    """The cells of all rows of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.inside = tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        elif self.inside:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_the_page_and_the_terminal_say_what_differs(folder: Path) -> None:
    write(folder / "a", 50.0)
    write(folder / "b", 52.0, seed=1)
    write(folder / "c", 70.0, "data.seed=3", end={"ceilings": {"chance": 9.0}, "parts": [9, 9, 9]})
    write(folder / "d", 20.0, "stream.epochs=1")
    (folder / "c" / "predictions.png").write_bytes(b"picture")
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    page = (folder / "report.html").read_text()
    cells = Cells()
    cells.feed(page)
    head = "head, frozen backbone"
    assert cells.rows == [
        *[["model", "data", "head and backbone", "settings", "runs", "result ↑", "without looking", "test clips"]],
        ["base-tiny", "scenes", head, "–", "2", "51.0 ± 1.4", "chance 4.2", "60"],
        ["base-tiny", "scenes", head, "stream.epochs=1", "1", "20.0", "chance 4.2", "60"],
        ["base-tiny", "scenes, seed=3", head, "–", "1", "70.0", "chance 9.0", "9"],
    ]
    assert "Downstream, classify on scenes: base-tiny reaches 51.0% (chance 4.2)." in page
    assert "Downstream, classify on scenes, seed=3: base-tiny reaches 70.0% (chance 9.0)." in page
    assert "a few test clips of scenes, seed=3</summary>" in page
    for words in ("seed=3", "epochs=1", "51.0 ± 1.4"):
        assert words in re.sub(r"\s", "", done.output) or words in done.output


def test_the_page_of_one_data_set_names_it_nowhere(folder: Path) -> None:
    write(folder / "a", 50.0)
    CliRunner().invoke(app, ["report", str(folder)])
    cells = Cells()
    cells.feed((folder / "report.html").read_text())
    assert cells.rows[0] == ["model", "head and backbone", "runs", "result ↑", "test clips"]
    assert "Without a look at the clips: chance 4.2." in (folder / "report.html").read_text()


def test_a_command_names_its_data() -> None:
    given = ["weights.source=base-tiny", "stream.epochs=2", "data.source=packed", "data.path=/clips"]
    tree = to_tree(transfer_config("retrieval", None, given))
    wanted = "stella transfer retrieval base-tiny data.source=packed data.path=/clips stream.epochs=2 --seed 0"
    assert command(tree) == wanted
    own = to_tree(transfer_config("retrieval", None, given[:2]))
    assert command(own) == "stella transfer retrieval base-tiny stream.epochs=2 --seed 0"

"""From archives to the paper's table: initial weights, all orders, what it costs; stopped and continued."""

import csv
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.small import quick
from rich.console import Console

from stella.errors import ConfigError, StellaError
from stella.experiments import initial
from stella.experiments.initial import COST, downstream_data, stages, taken_out
from stella.experiments.recipe import load, runs
from stella.experiments.reproduce import reproduce
from stella.experiments.tables import learning_sheet
from stella.runs.config import RunConfig
from stella.runs.record import read_run


def test_the_initial_runs_take_over_what_is_set_for_all(tmp_path: Path) -> None:
    own, rest = taken_out(["initial.stream.epochs=2", "data.path=V", "stream.epochs=1", "train.lr=1e-3"], "initial")
    assert own == ["stream.epochs=2"] and rest == ["data.path=V", "stream.epochs=1", "train.lr=1e-3"]
    made = stages(load("continual-vs"), [*own, "data.audioset=A", "model.weights=mae.pth"], rest, tmp_path)
    backbone, matching = made.values()
    assert [run.name for run in made] == ["backbone", "matching"]
    assert (backbone.method, backbone.data.source, backbone.model.weights) == ("finetune", "initial-vs", "mae.pth")
    assert (matching.method, matching.data.source, matching.model.weights) == (
        "matching",
        "audioset",
        str(tmp_path / "backbone"),
    )
    assert {config.stream.epochs for config in made.values()} == {2}
    assert {config.train.lr for config in made.values()} == {1e-3}
    alone = list(stages(load("continual-vs"), [], rest, tmp_path).values())
    assert [config.data.source for config in alone] == ["initial-vs", "initial-vs"] and alone[1].stream.epochs == 15
    with pytest.raises(ConfigError, match=r"trains on vggsound, which is not at data\.path; give it with initial"):
        stages(load("continual-as"), [], ["data.path=A"], tmp_path)
    sound = stages(load("continual-as"), ["data.path=V"], ["data.path=A"], tmp_path)
    assert [getattr(config.data, "path", "") for config in sound.values()] == ["V", "V"]
    assert downstream_data(["events=ave:/x"]) == {"events": {"source": "ave", "path": "/x"}}
    with pytest.raises(ConfigError, match=r"downstream\.TASK=SOURCE:PATH"):
        downstream_data(["events=/x"])


def test_the_cost_is_told_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def rates(configs: dict[str, RunConfig], steps: int) -> Iterator[tuple[str, float]]:
        asked.extend(configs)
        return ((kind, 0.5) for kind in configs)

    monkeypatch.setattr(initial, "rates", rates)
    values = ("data.clips=90", "data.tasks=['task1','task2']", "stream.epochs=2")
    configs = {"initial/backbone": quick("finetune", *values), "original/er": quick("er", *values)}
    for _ in range(2):
        text = io.StringIO()
        initial.tell_cost(configs, range(3), tmp_path, Console(file=text, width=300))
        # 2 tasks × 90 clips × 2 epochs at half a clip a second: 0.2 hours, once and three times
        assert "0.8 hours of training on this machine for 4 runs of 2 configurations" in text.getvalue()
        assert "original/er (0.6 h)" in text.getvalue()
    assert asked == ["finetune, batch 4", "er, batch 4"]
    for done in ("initial/backbone", "original/er/seed-0", "original/er/seed-2"):
        (tmp_path / done).mkdir(parents=True)
        (tmp_path / done / "metrics.jsonl").write_text('{"kind": "end"}\n')
    text = io.StringIO()
    initial.tell_cost(configs, range(3), tmp_path, Console(file=text, width=300))
    assert "0.2 hours of training on this machine for 1 run of 1 configuration," in text.getvalue()


@pytest.mark.parametrize("values", [["data.path=nope"], ["data.path=nope", "model.weights=base-tiny"]])
@pytest.mark.parametrize("name", ["continual-vs", "continual-as"])
def test_missing_clips_are_refused_before_anything_is_measured(
    name: str, values: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial, "rates", lambda *_: pytest.fail("steps are measured"))
    own = ["initial.data.path=nope"] if name == "continual-as" else []
    with pytest.raises(StellaError, match=r"nope is not a folder; give shards, or a folder of videos with \w+\.csv"):
        reproduce(name, [0], tmp_path / "out", Console(file=io.StringIO()), overrides=[*values, *own])
    assert not (tmp_path / "out").exists()


def test_what_was_measured_before_a_stop_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(configs: dict[str, RunConfig], steps: int) -> Iterator[tuple[str, float | Exception]]:
        yield "finetune, batch 4", 2.0
        raise KeyboardInterrupt

    monkeypatch.setattr(initial, "rates", rates)
    configs = {f"original/{method}": quick(method) for method in ("finetune", "er")}
    with pytest.raises(KeyboardInterrupt):
        initial.tell_cost(configs, [0], tmp_path, Console(file=io.StringIO()))
    assert json.loads((tmp_path / COST).read_text()) == {"finetune, batch 4": 2.0}


def test_given_tasks_keep_the_sequence_of_each_order() -> None:
    values = ["data.path=x", "data.tasks=['sports','music']"]
    made = runs("continual-vs", values, ["er"])
    assert {key: config.data.tasks for key, config in made.items()} == {
        "original/er": ("sports", "music"),
        "shuffled/er": ("music", "sports"),
    }
    recipe = load("continual-vs")
    sheet = learning_sheet(recipe, "shuffled", {key: [] for key in recipe.keys}, None, values)
    assert sheet.title.endswith("Tasks in shuffled order: music → sports")


METHODS = ("finetune", "stella")


def rehearsal() -> list[list[str]]:
    """The commands of the first block of docs/datasets.md."""
    text = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text(encoding="utf-8")
    block = text.split("```")[1].strip().replace("\\\n", " ")
    return [shlex.split(line) for line in block.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_archives_to_the_table_as_the_documentation_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = rehearsal()
    assert [command[1] for command in commands] == ["scenes", "prepare", "prepare", "look", "reproduce"]
    outputs = []
    for _, *arguments in commands:
        done = subprocess.run([sys.executable, "-m", "stella", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(" ".join(done.stdout.split()))
    assert "missing: 8 of 62 wanted clips" in outputs[1] and "missing: 8 of 62 wanted clips" in outputs[2]
    assert "hours of training on this machine for 6 runs of 6 configurations" in outputs[4] and "STELLA" in outputs[4]
    out = tmp_path / "runs" / "continual-vs"
    assert (out / COST).exists() and (out / "reproduce.md").exists()
    run = read_run(out / "shuffled" / "stella" / "seed-0")
    assert run.config["stream"]["batch_size"] == 36
    assert run.config["model"]["weights"] == str(out / "initial" / "matching")
    assert any("16 training clips of 21 listed are here" in note for note in run.notes)
    tested = list(csv.DictReader((out / "downstream.csv").read_text().splitlines()))
    assert {line["name"] for line in tested} == {f"{o}/{m}" for o in ("original", "shuffled") for m in METHODS}
    assert {line["task"] for line in tested} == {"classify"}
    assert "classify: accuracy" in (out / "downstream.md").read_text()
    assert "classify: paper:" in outputs[4]  # the terminal breaks the headings
    before = {path: path.read_bytes() for path in out.rglob("model.safetensors") if path.parent.name != "classify"}
    assert len(before) == 6
    values = [value for value in commands[-1] if "=" in value]
    console = Console(file=io.StringIO())
    assert reproduce("continual-vs", [0, 1], out, console, ["finetune"], ["original"], values) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert (out / "original" / "finetune" / "seed-1" / "model.safetensors").exists()

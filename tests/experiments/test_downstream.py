"""Downstream comparisons, fading attention, the modality gap, and the list of all the paper has."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from stella.cli import app
from stella.data.scenes import Scenes
from stella.evaluate.forgetting import gap_decline
from stella.experiments import downstream, fading
from stella.experiments.coverage import coverage, items
from stella.experiments.downstream import downstream_sheet, paper_figures, show_downstream
from stella.experiments.recipe import load, runs, shipped
from stella.experiments.results import to_csv
from stella.report.attention import attention_sheet
from stella.runs.training import RunResult
from stella.transfer.config import transfer_config

TINY = (
    *("model.preset=tiny", "model.weights=base-tiny", "train.device=cpu", "train.warmup_steps=0"),
    *("memory.clips=8", "memory.bytes=none", "data.clips=4", "data.eval_clips=4"),
    *("stream.epochs=1", "stream.batch_size=4", "evaluate.batch=4"),
)


def test_every_item_of_the_paper_has_a_command_a_result_or_a_reason() -> None:
    found = items()
    assert len({item.number for item in found}) == len(found) >= 25
    assert all(item.command or item.why for item in found)
    root = Path(__file__).parents[2]
    for item in found:
        words = item.command.split()
        if words[:2] == ["stella", "reproduce"]:
            assert words[2] in shipped() and load(words[2])
        assert not item.result or (root / item.result).is_dir(), item.result
    shown = " ".join(CliRunner().invoke(app, ["reproduce"]).output.split())
    assert all(item.number in shown for item in found)


def test_in_80_columns_no_command_and_no_folder_of_the_listing_is_cut() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(coverage())
    lines = console.export_text().splitlines()
    words = {word for line in lines for word in line.split()}
    assert max(map(len, lines)) <= 80
    for item in items():
        assert words.issuperset(f"{item.what} {item.command} {item.result} {item.why}".split()), item.number


def test_the_table_has_the_paper_s_figures_beside_ours(tmp_path: Path) -> None:
    recipe = load("downstream")
    rows = [
        {
            "name": f"original/{name}",
            "task": task,
            "seed": seed,
            "value": value + seed,
            "without_looking": f"chance=4.20 majority={10 * seed}.00",  # of other clips, if some cannot be used
        }
        for name, value in (("er", 50.0), ("stella", 60.0))
        for task in recipe.transfer
        for seed in (0, 1)
    ]
    lines = [{key: str(value) for key, value in row.items()} for row in rows]
    sheet = downstream_sheet(recipe, "original", lines)
    assert "Scenes and the paper's data differ in scale" in sheet.notes[-1] and "paper: events ↑" in sheet.head
    own = downstream_sheet(replace(load("continual-vs"), transfer=("events",)), "shuffled", lines)
    assert own.head == ["", "runs", "events: accuracy ↑"] and "Scenes" not in " ".join(own.notes)
    by_label = {row[0]: row for row in sheet.rows}
    assert by_label["ER"][1:4] == ["2", "50.5 ± 0.7", "57.09"] and by_label["MIR"][1:4] == ["0", "–", "56.82"]
    assert by_label["STELLA"][8:10] == ["60.5 ± 0.7", f"{(2.70 + 8.70 + 13.96 + 2.67 + 8.81 + 14.30) / 6:.2f}"]
    assert by_label["Multitask"][9] == "–"  # the paper has no such row
    (tmp_path / "downstream.csv").write_text(to_csv(rows))
    console = Console(width=200, record=True, file=io.StringIO())
    show_downstream("downstream", recipe, tmp_path / "results.csv", console)
    assert "Without looking, classify: chance=4.20 majority=5.00." in " ".join(console.export_text().split())
    assert "| ER | 2 | 50.5 ± 0.7 | 57.09 |" in (tmp_path / "downstream.md").read_text()


def test_after_another_benchmark_other_figures_of_the_paper_stand_beside() -> None:
    recipe = replace(load("continual-as"), transfer=("retrieval", "classify"))
    sheet = downstream_sheet(recipe, "original", [])
    stella = next(row for row in sheet.rows if row[0] == "STELLA")
    assert sheet.head == ["", "runs", "retrieval: recall ↑", "paper: retrieval ↑", "classify: accuracy ↑"]
    assert stella[3] == f"{(2.74 + 9.26 + 15.37 + 2.85 + 9.48 + 15.56) / 6:.2f}" and "Tab. 8 (a)" in sheet.notes[-1]


def test_the_paper_s_downstream_rows_are_whole() -> None:
    methods = load("downstream").variants.keys() - {"er-dct", "chorus"}  # ours
    assert {name: list(tables) for name, tables in paper_figures().items()} == {
        "Continual-VS": ["retrieval", "classify", "segment", "events"],
        "Continual-AS": ["retrieval"],
    }
    for task, table in (each for tables in paper_figures().values() for each in tables.items()):
        rows = {name: value for name, value in table.items() if name != "label"}
        assert rows.keys() == methods - ({"multitask"} if task == "retrieval" else set())
        assert all(len(value) == 6 for value in rows.values()) if task == "retrieval" else min(rows.values()) > 50


def test_the_decline_of_the_gap_by_hand() -> None:
    gaps = [[0.5, 0.1, 0.2], [0.7, 0.6, 0.1], [0.4, 0.7, 0.9]]
    assert gap_decline(gaps) == pytest.approx(((0.7 - 0.4) + (0.6 - 0.7)) / 2)
    assert gap_decline(gaps[2:]) is None and gap_decline([[0.3]]) is None and gap_decline([]) is None


def test_the_gap_is_a_column_where_a_recipe_asks_for_it(tmp_path: Path) -> None:
    from stella.experiments.reproduce import show

    row = {"name": "original/er", "seed": 0, "A": 10.0, "F": 5.0, "gap": 0.4567, "gap_decline": 0.1234}
    (tmp_path / "results.csv").write_text(to_csv([row, {**row, "seed": 1, "gap": 0.4569}]))
    console = Console(width=200, record=True, file=io.StringIO())
    show("modality_gap", tmp_path / "results.csv", console)
    said = console.export_text()
    assert "0.457 ± 0.000" in said and "ours gap decline" in (tmp_path / "reproduce.md").read_text()


def test_a_picture_of_attention(tmp_path: Path) -> None:
    clip = Scenes("task1", "eval", 1)[0]
    maps = {"DER++": [torch.rand(6, 6), torch.zeros(6, 6)], "STELLA": [torch.rand(6, 6), torch.rand(6, 6)]}
    attention_sheet(clip, 1, maps, ["after task1", "after task2"], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000


def small(plain: Any) -> Any:
    """The configuration of a task with few clips."""
    few = ["data.clips=4", "data.eval_clips=4", "stream.epochs=1", "warmup_epochs=0", "stream.batch_size=8"]
    return lambda task, data, values: plain(task, data, [*values, *few])


@pytest.mark.slow
def test_fading_attention_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fading, "transfer_config", small(fading.transfer_config))
    done = CliRunner().invoke(app, ["reproduce", "fading", "--seeds", "1", "--out", str(tmp_path), *TINY])
    assert done.exit_code == 0, (done.output, done.exception)
    rows = list(csv.DictReader((tmp_path / "fading" / "fading.csv").open()))
    assert len(rows) == 12 and all(0 < float(row["task1_ciou"]) < 100 for row in rows)
    assert (tmp_path / "fading" / "fading-1.png").exists() and (tmp_path / "fading" / "fading-2.png").exists()
    assert (tmp_path / "fading/original/derpp/seed-0/matching-3/model.safetensors").exists()
    assert (tmp_path / "fading/original/stella/seed-0/fading.png").exists()
    assert not (tmp_path / "fading/original/stella/seed-0/matching-3").exists()


def test_a_stop_while_a_matching_module_is_trained_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are not there yet: they are not asked for."""
    monkeypatch.setattr(fading, "open_weights", lambda *_: (SimpleNamespace(avm=None), None))
    monkeypatch.setattr(fading, "transfer", lambda *_, **__: RunResult(tmp_path, False, exit_code=130))
    console = Console(record=True, file=io.StringIO())
    config = runs("fading", TINY)["original/derpp"]
    assert fading.fading(load("fading"), {"original/derpp": config}, [0], tmp_path, console) == 130
    assert "Run the same command again to resume." in console.export_text()


def test_after_a_stopped_test_no_other_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[Path] = []

    def stopped(_: Any, run: Path, **__: Any) -> RunResult:
        begun.append(run)
        return RunResult(run, True, exit_code=143 if run.name == "2" else 0)

    monkeypatch.setattr(downstream, "transfer", stopped)
    config = transfer_config("classify", None, ["weights.source=base-tiny"])
    jobs = [("er", config, tmp_path / str(number)) for number in range(4)]
    assert downstream._do(jobs, Console(quiet=True), 1) == 143 and [run.name for run in begun] == ["0", "1", "2"]


@pytest.mark.slow
def test_downstream_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downstream, "transfer_config", small(downstream.transfer_config))
    command = ["reproduce", "downstream", "--only", "er,finetune", "--seeds", "1", "--out", str(tmp_path), *TINY]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (done.output, done.exception)
    rows = list(csv.DictReader((tmp_path / "downstream" / "downstream.csv").open()))
    assert len(rows) == 10 and {row["task"] for row in rows} == set(load("downstream").transfer)
    assert len(list(csv.DictReader((tmp_path / "downstream" / "results.csv").open()))) == 2  # the pre-training alone
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and "10 of 10 downstream tests are finished already" in again.output

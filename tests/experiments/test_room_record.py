"""Runs of `benchmarks/room.py` leave what `pretrain` leaves, so that a reproduction finds them finished."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stella.evaluate.pairs import plane
from stella.evaluate.retrieval import Embeddings
from stella.experiments import recipe
from stella.experiments.results import row
from stella.files import read_json
from stella.model.cav import CAV
from stella.report.page import write_page
from stella.runs.config import machine, model_config, settle
from stella.runs.folder import RunFolder
from stella.runs.loop import check_unchanged, pretrain
from stella.transfer.config import WeightsConfig
from stella.transfer.weights import open_weights

ROOT = Path(__file__).parents[2]
EASY = {way: {k: [float(k)] * 6 for k in ("1", "5", "10")} for way in ("a2v", "v2a")}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("room_record").Record


def test_a_recorded_run_is_a_finished_run(record: Any, tmp_path: Path) -> None:
    config = settle(replace(recipe.load("downstream").config("original", "derpp", ["data.eval_clips=12"]), seed=3))
    torch.manual_seed(0)
    model = CAV(model_config(config))
    clips = int(config.data.clips)  # type: ignore[union-attr]
    memory = SimpleNamespace(ids=torch.tensor([0, 1, clips, 5 * clips]))
    method = SimpleNamespace(eval_model=model, avm=None, memory=memory)
    written = record(tmp_path / "run", config, machine(config.train))
    assert RunFolder(tmp_path / "run").started and RunFolder(tmp_path / "run").end is None
    for task in range(6):
        found = {"clips": [12] * 6, "recall": EASY, "modality_gap": [0.6 - 0.1 * task] * 6}
        found |= {"slow": dict(found)} if task == 5 else {}
        written.evaluated(task, found, method, 300 * (task + 1))
    pairs = Embeddings(torch.randn(4, 8), torch.randn(4, 8), torch.arange(4))
    written.ended(method, SimpleNamespace(step=1800, clips=115200, skipped=0), pairs)
    folder = RunFolder(tmp_path / "run")
    check_unchanged(folder, config)
    assert pretrain(config, folder.root, resume=True).finished  # nothing is trained
    line = row("original/derpp", folder)
    assert (line["A"], line["F"], line["slow_A"], line["slow_F"]) == (16 / 3, 0.0, 16 / 3, None)
    assert line["seed"] == 3 and line["gap"] == pytest.approx(0.1) and line["gap_decline"] == pytest.approx(0.5)
    assert line["gaps"] == "0.6000 0.5000 0.4000 0.3000 0.2000 0.1000"
    loaded, _ = open_weights(WeightsConfig(str(folder.root), after=6), 0)
    assert all(
        torch.equal(p.half(), q.half()) for p, q in zip(model.parameters(), loaded.model.parameters(), strict=True)
    )
    assert read_json(folder.pairs) == plane("task1", pairs)
    page = write_page([folder.root], tmp_path / "page.html").read_text()
    assert "Pairs in two dimensions" in page and "<text" in page

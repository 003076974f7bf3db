"""`stella evaluate` repeats what a run measured after its last task, from its files alone."""

import io
from pathlib import Path

import pytest
from helpers.small import quick
from rich.console import Console

from stella.errors import StellaError
from stella.model import weights
from stella.runs.evaluate import evaluate_weights
from stella.runs.loop import pretrain

QUIET = Console(file=io.StringIO())
SCENES = ("data.clips=8", "data.eval_clips=8", 'data.tasks=["task1", "task2"]')


def test_a_run_is_evaluated_as_it_evaluated_itself_at_its_own_beta(tmp_path: Path) -> None:
    result = pretrain(quick("stella", "args.beta=0.05", *SCENES), tmp_path, console=QUIET)
    found, last = evaluate_weights(str(tmp_path)), result.evaluations[-1]
    for key in ("recall", "modality_gap", "avm_accuracy", "importance_ratio", "clips"):
        assert found[key] == last[key], key
    loaded = weights.load(tmp_path / "model.safetensors")
    assert loaded.avm is not None and loaded.avm.beta == 0.05
    loaded.avm.beta = 4.0
    weights.save(tmp_path / "model.safetensors", loaded.model, loaded.avm)
    assert evaluate_weights(str(tmp_path))["importance_ratio"] != found["importance_ratio"]
    assert any(ratio is not None for ratio in found["importance_ratio"])


def test_an_unfinished_run_has_no_weights_to_evaluate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StellaError, match="is not finished and has no weights yet; continue it with"):
        evaluate_weights(str(tmp_path))

"""What a run does, writes and says, from its first step to its weights."""

import io
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.small import Noise, Whole, lines, noise_tasks, outcome, quick, same, use_tasks
from rich.console import Console
from safetensors.torch import load_file

from stella.clip import Clip
from stella.data.scenes import ScenesConfig
from stella.errors import ClipError, StellaError
from stella.evaluate.after_task import evaluate_tasks
from stella.files import read_json, read_lines
from stella.methods import METHODS
from stella.methods.finetune import Finetune
from stella.model import weights
from stella.model.avm import AVM
from stella.model.cav import CAV
from stella.report.page import write_page
from stella.runs import loop as run_module
from stella.runs import progress
from stella.runs.build import build_method
from stella.runs.config import model_config, settle
from stella.runs.loop import pretrain
from stella.runs.record import read_run
from stella.train.checkpoint import Checkpoints
from stella.train.trainer import Trainer

QUIET = Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)


@pytest.mark.parametrize("method", [name for name, cls in METHODS.items() if not cls.joint])
def test_every_method_runs_through(method: str, whole: Whole) -> None:
    result = whole(method)
    assert result.finished and result.exit_code == 0
    evaluations = lines(result.run, "evaluation")
    assert [(e["task"], e["step"]) for e in evaluations] == [(-1, 0), (0, 3), (1, 6), (2, 9)]  # 10, 11, 12 clips by 4
    for e in evaluations:
        assert e["tasks"] == ["one", "two", "three"]
        assert all(len(e["recall"][d][k]) == 3 for d in ("a2v", "v2a") for k in ("1", "5", "10"))
        assert len(e["modality_gap"]) == 3
    steps = lines(result.run, "step")
    assert [s["step"] for s in steps] == [2, 3, 4, 6, 8, 9]  # every second, and the last of a task
    assert steps[-1]["clips"] == 33
    assert steps[-1]["loss"] == pytest.approx(sum(steps[-1]["parts"].values()))
    assert len(read_json(result.run / "examples.json")["queries"]) == 6
    [end] = lines(result.run, "end")
    assert end == result.end and end["A"] is not None and end["F"] is not None
    assert result.evaluations == evaluations


def test_the_memory_is_counted_by_task(tmp_path: Path, whole: Whole) -> None:
    all_held = pretrain(quick("er", "memory.clips=40", "memory.codec=dct"), tmp_path, console=QUIET)
    counts = [e["memory_by_task"] for e in all_held.evaluations]
    assert counts == [[0, 0, 0], [10, 0, 0], [10, 11, 0], [10, 11, 12]]
    assert [e["memory_distinct"] for e in all_held.evaluations] == [0, 10, 21, 33]
    assert [sum(e["memory_by_task"]) for e in whole("er").evaluations] == [0, 7, 7, 7]
    assert {e["memory_by_task"] for e in whole("finetune").evaluations} == {None}


def test_a_memory_holds_passes_and_no_more_than_the_stream_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of ten clips are twenty passes, for which there is room, whatever the configuration allows."""
    use_tasks(monkeypatch, noise_tasks(("one",)))
    config, said = quick("er", "memory.clips=100000000", "stream.epochs=2"), io.StringIO()
    monkeypatch.setattr(ScenesConfig, "train_tasks", lambda *_, **__: noise_tasks(("one",)))
    done = pretrain(config, tmp_path, console=Console(file=said, width=300))
    assert [(e["memory_by_task"], e["memory_distinct"]) for e in done.evaluations] == [([0], 0), ([20], 10)]
    assert ": all that this run brings, 100,000,000 were allowed" in said.getvalue()
    assert "memory holds 20 clips, 10 of them distinct" in said.getvalue()


def test_a_joint_method_sees_all_tasks_shuffled_and_is_evaluated_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    plain = Finetune.loss
    monkeypatch.setattr(Finetune, "loss", lambda self, batch: (seen.append(batch.ids.tolist()), plain(self, batch))[1])
    result = pretrain(quick("multitask", "stream.epochs=2"), tmp_path, console=QUIET)
    assert [(e["task"], e["step"]) for e in result.evaluations] == [(-1, 0), (2, 18)]
    assert result.end["A"] is not None and result.end["F"] is None
    epochs = [[i for ids in half for i in ids] for half in (seen[:9], seen[9:])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(33))] * 2
    assert len({0 if i < 10 else 1 if i < 21 else 2 for i in epochs[0][:12]}) > 1
    assert epochs[0] != epochs[1]


def test_what_is_said_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine lacks, and a line for each task."""
    plain, said = run_module.machine, io.StringIO()
    monkeypatch.setattr(run_module, "machine", lambda train: replace(plain(train), remark="not compiled here"))
    pretrain(quick("finetune"), tmp_path, console=Console(file=said, width=200))
    lines = [line.split(":")[0] for line in said.getvalue().splitlines()]
    assert [line for line in lines if line.startswith(("not", "Finetune"))] == [  # and the plan, see test_plan
        "not compiled here",
        "Finetune before the first task",
        "Finetune after one (1 of 3)",
        "Finetune after two (2 of 3)",
        "Finetune after three (3 of 3)",
    ]


def test_the_clips_that_a_run_measures_with_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE", -1.0)  # speaks at once
    said = Console(file=io.StringIO(), width=200)
    pretrain(quick("stella", "train.ema=0.9", "evaluate.batch=4"), tmp_path, console=said)
    told = said.file.getvalue()  # type: ignore[attr-defined]
    assert told.index("embedding one before the first task: 4 of ") < told.index("STELLA before the first task: step 0")
    assert "matching two after three: " in told and "embedding one after one, slow weights: 4 of " in told


def test_no_weight_depends_on_task_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole) -> None:
    use_tasks(monkeypatch, noise_tasks(("two", "one", "new")))  # the same clips in order, permuted and renamed labels
    pretrain(quick("stella"), tmp_path, console=QUIET)
    a, b = outcome(whole("stella").run), outcome(tmp_path)
    assert same(a["weights"], b["weights"])
    assert same(a["state"]["trainer"]["memory"], b["state"]["trainer"]["memory"])


def test_no_weight_depends_on_where_a_task_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Noise(0, 24)

    class Half:
        def __init__(self, first: int) -> None:
            self.first = first

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return whole[self.first + index]

        def tensors(self, indices: list[int], device: str = "cpu") -> Any:
            return whole.tensors([self.first + i for i in indices], device)

    plain = ("stream.shuffle=false", "stream.augment=false")
    for name, tasks in (("a", [("whole", whole)]), ("b", [("first", Half(0)), ("second", Half(12))])):
        use_tasks(monkeypatch, tasks)
        pretrain(quick("stella", *plain), tmp_path / name, console=QUIET)
    assert same(outcome(tmp_path / "a")["weights"], outcome(tmp_path / "b")["weights"])


class OneBad:
    """Clips of noise, the fourth of which cannot be decoded."""

    def __init__(self, path: str, clips: int) -> None:
        self.path, self.clips = path, Noise(0, clips)

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Clip:
        if index == 3:
            raise ClipError(self.path, "no audio track", "leave it out")
        return self.clips[index]


def test_clips_skipped_in_evaluation_are_listed_once_beside_those_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [[("one", OneBad(f"{part}1.mp4", 10)), ("two", OneBad(f"{part}2.mp4", 10))] for part in ("train", "eval")]
    monkeypatch.setattr(run_module, "open_tasks", lambda *_: tasks)
    result = pretrain(quick("stella"), tmp_path / "run", console=QUIET)
    assert {tuple(line["clips"]) for line in result.evaluations} == {(9, 9)}
    listed = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert [(record["id"], record["path"]) for record in listed] == [
        *(("evaluation/one/3", "eval1.mp4"), ("evaluation/two/3", "eval2.mp4")),
        *((3, "train1.mp4"), (13, "train2.mp4")),
    ]
    page = write_page([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "Skipped clips: 4 no audio track" in page and "eval2.mp4" in page


def test_metrics_hold_no_times_and_speed_does(whole: Whole) -> None:
    run = whole("finetune").run
    assert "second" not in (run / "metrics.jsonl").read_text()
    kinds = [json.loads(line)["kind"] for line in (run / "speed.jsonl").read_text().splitlines()]
    assert set(kinds) == {"start", "step", "evaluation", "checkpoint"}
    facts = json.loads((run / "environment.json").read_text())
    assert {"commit", "torch", "gpu", "threads"} <= facts.keys()
    assert (run / "config.json").exists() and (run / "lock").read_text() == ""


def test_tensorboard_is_asked_for_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it were not installed
    with pytest.raises(StellaError, match=r"pip install '\.\[tensorboard\]'"):
        pretrain(quick("finetune", "train.tensorboard=true"), tmp_path, console=QUIET)
    assert not (tmp_path / "config.json").exists()


def test_tensorboard_gets_what_metrics_get_and_a_terminal_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    fake = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=200)
    pretrain(quick("finetune", "train.tensorboard=true"), tmp_path, console=console)
    steps = lines(tmp_path, "step")
    assert [(value, step) for name, value, step in written if name == "loss"] == [(s["loss"], s["step"]) for s in steps]
    assert {"loss/recon_a", "clips/s", "mean recall"} <= {name for name, _, _ in written}
    assert written[-1][0] == "closed"
    assert all(word in said.getvalue() for word in ("recon_a", "contrastive", "clips/s", "GB", "epoch 1 of 1"))
    assert re.search("Finetune: one, epoch 1 of 1[^/]* [^ ]*0/9", said.getvalue())  # the bar has a name from the start


def test_what_cannot_be_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """test_runner has the list of what is refused."""
    with pytest.raises(StellaError, match=r"GB.*free"):
        pretrain(quick("er", "memory.clips=1000000000", "stream.epochs=1000000"), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


def test_initial_weights_fill_backbone_and_matching_module(tmp_path: Path) -> None:
    torch.manual_seed(99)
    model = CAV(model_config(settle(quick("stella"))))
    avm = AVM(model.config.dim, model.config.heads)
    weights.save(tmp_path / "w.safetensors", model, avm)
    config = settle(quick("stella", f"model.weights={tmp_path / 'w.safetensors'}"))
    method = build_method(config, torch.device("cpu"))
    assert method.avm is not None
    assert same(dict(method.model.state_dict()), dict(model.state_dict()))
    assert same(dict(method.avm.state_dict()), dict(avm.state_dict()))
    assert not same(
        dict(build_method(config, torch.device("cpu"), initial=False).model.state_dict()), dict(model.state_dict())
    )


def test_the_final_weights_are_the_last_checkpoints(whole: Whole) -> None:
    result = whole("stella")
    loaded = weights.load(result.run / "model.safetensors")
    state = outcome(result.run)["state"]["trainer"]["method"]
    assert loaded.avm is not None
    assert all(torch.equal(value, state[f"model.{name}"]) for name, value in loaded.model.state_dict().items())
    assert all(torch.equal(value, state[f"avm.{name}"]) for name, value in loaded.avm.state_dict().items())
    assert loaded.extra["scores"]["A"] == result.end["A"]
    assert loaded.extra["config"]["method"] == "stella"


def test_the_model_that_a_method_names_is_evaluated_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[dict[str, Any]] = []

    def evaluate(model: CAV, *args: Any, **kwargs: Any) -> Any:
        evaluated.append({name: value.clone() for name, value in model.state_dict().items()})
        return evaluate_tasks(model, *args, **kwargs)

    monkeypatch.setattr(run_module, "evaluate_tasks", evaluate)
    pretrain(quick("cls_er", "args.evaluate=stable"), tmp_path, console=QUIET)
    state = outcome(tmp_path)["state"]["trainer"]["method"]
    saved = dict(weights.load(tmp_path / "model.safetensors").model.state_dict())
    assert same(saved, {name: state[f"stable.model.{name}"] for name in saved}) and same(evaluated[-1], saved)


def test_slow_weights_are_evaluated_and_saved_beside_the_working_ones(tmp_path: Path, whole: Whole) -> None:
    result, plain = pretrain(quick("derpp", "train.ema=0.9"), tmp_path, console=QUIET), whole("derpp")
    assert {key: result.end[key] for key in "AF"} == {key: plain.end[key] for key in "AF"}
    assert same(outcome(tmp_path)["weights"], outcome(plain.run)["weights"])
    assert not (plain.run / "slow.safetensors").exists() and "slow" not in plain.end
    assert {"A", "F", "a2v", "v2a"} <= result.end["slow"].keys()
    first, last = result.evaluations[0], result.evaluations[-1]
    assert first["slow"]["recall"] == first["recall"]  # before the first step both are the same
    assert last["slow"]["modality_gap"] != last["modality_gap"] and last["slow"]["avm_accuracy"] is None
    slow = weights.load(tmp_path / "slow.safetensors")
    state = outcome(tmp_path)["state"]["trainer"]["slow"]
    assert same(dict(slow.model.state_dict()), {name: state[f"model.{name}"] for name in slow.model.state_dict()})
    assert slow.extra["scores"]["A"] == result.end["slow"]["A"]


def test_the_matching_module_alone_leaves_the_backbone_as_it_is(tmp_path: Path) -> None:
    """The initial chain: a backbone, then its matching module; what the import decided is printed and kept."""
    first = pretrain(quick("finetune"), tmp_path / "backbone").run
    out = io.StringIO()
    config = quick("matching", f"model.weights={first}", "train.lr=1e-2")
    second = pretrain(config, tmp_path / "matching", console=Console(file=out, width=200)).run
    before, after = (load_file(run / "model.safetensors") for run in (first, second))
    assert before.keys() < after.keys() and {name.partition(".")[0] for name in after.keys() - before.keys()} == {"avm"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    fresh = build_method(settle(config), torch.device("cpu")).avm
    assert fresh is not None and not torch.equal(fresh.state_dict()["to_a_q.weight"], after["avm.to_a_q.weight"])
    note = "it has no matching module: ours keeps its initial values"
    kept = json.loads((second / "notes.json").read_text())["weights"]
    assert note in out.getvalue() and any(note in line for line in kept)
    assert any(note in line for line in read_run(second).notes)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    """Two steps for each of them; the run's end waits for the last."""
    expected, reached = outcome(whole("er").run), 0
    advance, write = Trainer.advance, Checkpoints._write

    def counted(self: Trainer) -> bool:
        nonlocal reached
        more, reached = advance(self), self.counters.step
        return more

    def slow(self: Checkpoints, step: int, *args: Any) -> Path:
        end = time.monotonic() + 20
        while reached < min(step + 2, 9):
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.1)
        return write(self, step, *args)

    monkeypatch.setattr(Trainer, "advance", counted)
    monkeypatch.setattr(Checkpoints, "_write", slow)
    assert pretrain(quick("er"), tmp_path, console=QUIET).finished
    assert same(outcome(tmp_path), expected)
    written = [line for line in read_lines(tmp_path / "speed.jsonl") if line["kind"] == "checkpoint"]
    assert [line["step"] for line in written] == [3, 6, 9] and all(line["bytes"] for line in written)
    assert all(line["seconds"] >= 0.1 for line in written) and all("held" in line for line in written)

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.disk import small_disk
from helpers.small import Noise, noise_tasks, outcome, quick, same, use_tasks
from rich.console import Console
from safetensors.torch import load_file

from stella.clip import Batch, Clip
from stella.data.scenes import ScenesConfig
from stella.errors import ClipError, ConfigError, StellaError
from stella.evaluate.after_task import evaluate_tasks
from stella.experiments.results import row
from stella.files import read_json
from stella.methods import METHODS, Losses
from stella.methods.finetune import Finetune
from stella.model import weights
from stella.model.avm import AVM
from stella.model.cav import CAV
from stella.report.page import write_page
from stella.runs import loop as run_module
from stella.runs.build import build_method
from stella.runs.config import FREE, model_config, settle
from stella.runs.environment import with_earlier
from stella.runs.folder import RunFolder
from stella.runs.loop import Run, RunResult, pretrain, resume
from stella.runs.record import read_run
from stella.train.checkpoint import Checkpoints
from stella.train.device import Later, runtime
from stella.train.trainer import Trainer

QUIET = Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)


Whole = Callable[[str], RunResult]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An undisturbed run of a method, done once."""

    @cache
    def done(method: str) -> RunResult:
        with pytest.MonkeyPatch.context() as patch:
            use_tasks(patch)
            return pretrain(quick(method), tmp_path_factory.mktemp(method), console=QUIET)

    return done


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    text = (run / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


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
    assert [line for line in lines if line.startswith(("not", "finetune"))] == [  # and the plan, see test_plan
        "not compiled here",
        "finetune before the first task",
        "finetune after one (1 of 3)",
        "finetune after two (2 of 3)",
        "finetune after three (3 of 3)",
    ]


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


@pytest.mark.parametrize(("number", "where"), [(signal.SIGTERM, "loss"), (signal.SIGINT, "evaluation")])
def test_a_signal_saves_and_stops_and_the_run_goes_on_as_if_it_had_not(
    number: signal.Signals,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Whole,
) -> None:
    expected = outcome(whole("er").run)
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    calls = 0
    owner, name, at = (METHODS["er"], "loss", 5) if where == "loss" else (CAV, "represent_v", 8)
    plain = getattr(owner, name)

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), number)
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        console = Console(file=io.StringIO())
        result = pretrain(quick("er"), tmp_path / "run", console=console)
    assert (result.finished, result.exit_code) == (False, 128 + number)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert number.name in told and f"resume with stella pretrain --resume {tmp_path / 'run'}" in told
    state = Checkpoints(tmp_path / "run" / "checkpoints").load()
    assert state is not None and state["trainer"]["counters"]["step"] == (5 if where == "loss" else 3)
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert resume(tmp_path / "run", console=QUIET).finished
    assert same(outcome(tmp_path / "run"), expected)


def test_a_signal_while_a_run_ends_is_told_and_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, console = weights.packed, Console(file=io.StringIO())
    monkeypatch.setattr(weights, "packed", lambda *args: (os.kill(os.getpid(), signal.SIGINT), packed(*args))[1])
    result = pretrain(quick("finetune"), tmp_path, console=console)
    assert (result.finished, result.exit_code) == (True, 130)
    assert "SIGINT arrived while the run was ending; the run is finished" in console.file.getvalue()  # type: ignore[attr-defined]


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    plain, calls = Finetune.loss, 0

    def loss(self: Finetune, batch: Batch) -> Losses:
        nonlocal calls
        calls += 1
        losses = plain(self, batch)
        bad = {"recon_v": losses.parts["recon_v"] * torch.nan}
        return Losses(losses.parts | bad, losses.rows) if calls in steps else losses

    monkeypatch.setattr(Finetune, "loss", loss)


def test_nine_non_finite_steps_are_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, set(range(3, 12)))
    result = pretrain(quick("finetune", "stream.epochs=2"), tmp_path, console=QUIET)
    assert result.finished and result.end["skipped_steps"] == 9
    assert [line["step"] for line in lines(tmp_path, "skip")] == list(range(3, 12))


@pytest.mark.parametrize("later", [False, True])  # as on a GPU, where the host learns of it when it asks
def test_ten_in_a_row_stop_the_run_with_a_checkpoint_and_a_sentence(
    later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if later:
        monkeypatch.setattr(Later, "known", False)
    with monkeypatch.context() as patch:
        spoil(patch, set(range(3, 100)))
        with pytest.raises(StellaError, match=r"10 steps in a row up to step 12 .*recon_v.*checkpoint is saved"):
            pretrain(quick("finetune", "stream.epochs=2"), tmp_path, console=QUIET)
    state = Checkpoints(tmp_path / "checkpoints").load()
    assert state is not None and state["trainer"]["counters"]["step"] == 12
    result = resume(tmp_path, console=QUIET)  # it was the loss, not the run
    assert result.finished and result.end["skipped_steps"] == 10


def test_a_run_without_a_finite_loss_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, set(range(1, 10)))
    with pytest.raises(StellaError, match="no step of this run was finite"):
        pretrain(quick("finetune"), tmp_path, console=QUIET)
    assert not lines(tmp_path, "end")


def test_a_broken_checkpoint_is_told_and_a_run_without_a_whole_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_early(tmp_path, monkeypatch, "train.checkpoint_minutes=0")
    older, newest = sorted((tmp_path / "checkpoints").glob("*.pt"))
    newest.write_bytes(b"torn")
    said = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_train_task", lambda self: self.stop._receive(signal.SIGTERM, None) or True)
        resume(tmp_path, console=Console(file=said, width=200))
    step = int(older.name.split("-")[1])
    assert f"{newest.stem}.broken is damaged and was renamed; resuming from step {step}" in said.getvalue()
    for path in (tmp_path / "checkpoints").glob("*.pt"):
        path.write_bytes(b"torn")
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(StellaError, match=r"all checkpoints .* are damaged"):
        resume(tmp_path, console=QUIET)
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


def test_a_checkpoint_that_is_not_of_this_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, more in (("a", ()), ("b", ("seed=5",))):
        with monkeypatch.context() as patch:
            stopped_early(tmp_path / name, patch, *more)
    metrics = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    shutil.move(tmp_path / "a" / "checkpoints", tmp_path / "kept")
    with pytest.raises(StellaError, match=r"the checkpoints of .*a are gone; restore them, or start a new run"):
        resume(tmp_path / "a", console=QUIET)
    shutil.copytree(tmp_path / "b" / "checkpoints", tmp_path / "a" / "checkpoints")
    with pytest.raises(StellaError, match=r"is of another run, .*: seed was 5 and is now 0; stream.seed was 5 and"):
        resume(tmp_path / "a", console=QUIET)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config["train"]["lr"] = 0.5
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    with pytest.raises(StellaError, match=r"config.json was edited: train.lr was 0.001 and is now 0.5; restore"):
        resume(tmp_path / "b", console=QUIET)
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == metrics  # nothing was cut
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    shutil.move(tmp_path / "kept", tmp_path / "a" / "checkpoints")
    assert resume(tmp_path / "a", console=QUIET).finished


def test_a_run_that_goes_on_elsewhere_says_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, said = run_module.environment(runtime("cpu")), io.StringIO()
    monkeypatch.setattr(run_module, "environment", lambda _: facts | {"commit": "aaaa"})
    stopped_early(tmp_path, monkeypatch)
    with (tmp_path / "speed.jsonl").open("ab") as file:
        file.write(b'{"kind": "st')  # torn by a kill
    monkeypatch.setattr(run_module, "environment", lambda _: facts | {"commit": "bbbb"})
    assert resume(tmp_path, console=Console(file=said, width=200)).finished
    assert [line["kind"] for line in read_run(tmp_path).speed].count("start") == 2
    assert "started at commit aaaa on" in said.getvalue() and "resumed at commit bbbb on" in said.getvalue()
    told = row("er", RunFolder(tmp_path))
    assert told["commit"] == "aaaa + bbbb" and "+" not in told["hardware"]
    page = write_page([tmp_path], tmp_path / "page.html").read_text()
    assert "commit aaaa, bbbb" in page and "earlier 1: commit" in page
    back = with_earlier(facts | {"commit": "aaaa"}, RunFolder(tmp_path).environment)
    assert [each["commit"] for each in back["earlier"]] == ["aaaa", "bbbb"]  # in their order, also on the way back


def test_a_signal_is_heeded_with_a_checkpoint_whenever_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = Run._stuck, 0

    def between(self: Run) -> bool:
        nonlocal calls
        calls += 1
        if calls == 4:  # after this step has looked for a signal
            self.stop._receive(signal.SIGTERM, None)
        return plain(self)

    monkeypatch.setattr(Run, "_stuck", between)
    said = io.StringIO()
    assert pretrain(quick("er"), tmp_path, console=Console(file=said, width=200)).exit_code == 128 + signal.SIGTERM
    state = Checkpoints(tmp_path / "checkpoints").load()
    assert state is not None and f"at step {state['trainer']['counters']['step']};" in said.getvalue()


def test_a_full_disk_stops_with_a_sentence_and_loses_nothing(tmp_path: Path, whole: Whole) -> None:
    config = quick("er", "train.checkpoint_minutes=0")
    size = max(path.stat().st_size for path in (whole("er").run / "checkpoints").iterdir())
    with small_disk(size - 40_000), pytest.raises(StellaError, match="free some space and continue with --resume"):
        pretrain(config, tmp_path, console=QUIET)  # checkpoints grow with the memory
    state = Checkpoints(tmp_path / "checkpoints").load()
    assert state is not None and 0 < state["trainer"]["counters"]["step"] < 9
    assert pretrain(config, tmp_path, resume=True, console=QUIET).finished
    assert same(outcome(tmp_path), outcome(whole("er").run))


def test_a_resumed_run_needs_neither_its_initial_weights_nor_its_checkpoint_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, mapped, plain = tmp_path / "w.safetensors", list[bool](), Trainer.advance
    weights.save(file, CAV(model_config(settle(quick()))))
    stopped_early(tmp_path / "run", monkeypatch, f"model.weights={file}")
    file.unlink()

    def advance(self: Trainer) -> bool:
        mapped.append(str(tmp_path) in Path("/proc/self/maps").read_text())
        return plain(self)

    monkeypatch.setattr(Trainer, "advance", advance)
    assert resume(tmp_path / "run", console=QUIET).finished and mapped and not any(mapped)


def test_a_full_disk_while_lines_are_written_stops_with_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    config = quick("finetune", "stream.epochs=2", "train.log_every=1")
    told = rf"{tmp_path}/run cannot be written .*nothing up to the last checkpoint is lost.*--resume"
    with small_disk(1500), pytest.raises(StellaError, match=told):  # one evaluation and a few steps
        pretrain(config, tmp_path / "run", console=QUIET)
    for name in ("metrics.jsonl", "speed.jsonl"):
        assert (tmp_path / "run" / name).read_bytes().endswith(b"}\n")
    assert pretrain(config, tmp_path / "run", resume=True, console=QUIET).finished
    pretrain(config, tmp_path / "whole", console=QUIET)
    assert same(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))


def test_a_full_disk_at_the_final_weights_loses_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    packed = weights.packed
    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(weights, "packed", lambda *args: (stack.enter_context(small_disk(50_000)), packed(*args))[1])
        with pytest.raises(StellaError, match=r"nothing up to the last checkpoint is lost: .*continue with --resume"):
            pretrain(quick("er"), tmp_path, console=QUIET)
    assert not any("safetensors" in path.name for path in tmp_path.iterdir())
    assert resume(tmp_path, console=QUIET).finished
    assert same(outcome(tmp_path), outcome(whole("er").run))
    modes = {path.stat().st_mode for path in tmp_path.iterdir() if path.is_file()}
    assert len(modes) == 1  # whoever may read one file may read all


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


def test_a_finished_run_is_not_done_again_and_without_resume_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    first = whole("finetune")
    monkeypatch.setattr(Trainer, "advance", None)
    assert pretrain(quick("finetune"), first.run, resume=True, console=QUIET) == first
    with pytest.raises(StellaError, match="already holds a run; continue it with --resume"):
        pretrain(quick("finetune"), first.run, console=QUIET)


def stopped_early(run: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> RunResult:
    plain = Trainer.advance

    def advance(self: Trainer) -> bool:
        if self.counters.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", advance)
        return pretrain(quick("er", *more), run, console=QUIET)


def test_a_changed_configuration_is_refused_with_the_key(whole: Whole) -> None:
    for override, told in (
        ("train.lr=0.5", "train.lr was 0.001 and is now 0.5"),
        ("seed=3", "seed was 0 and is now 3"),
        ("memory.clips=8", "memory.clips was 7 and is now 8"),
        ("memory.codec=dct", "memory.codec was none and is now 'dct'"),
        ("method=derpp", "method was 'er' and is now 'derpp'"),
    ):
        with pytest.raises(StellaError, match=told):
            resume(whole("er").run, [override], console=QUIET)
    with pytest.raises(ConfigError, match=r"train\.lr\?"):
        resume(whole("er").run, ["train.lrr=1"], console=QUIET)


def test_what_no_result_depends_on_may_change_also_in_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    stopped_early(tmp_path, monkeypatch)
    recipe = {"train": {"lr": 0.5}, "stream": {"prefetch": 3}}
    with pytest.raises(StellaError, match=r"otherwise: train\.lr was 0\.001 and is now 0\.5; restore it"):
        resume(tmp_path, console=QUIET, recipe=recipe)
    changes = {
        "stream.workers": "2",
        "stream.time_limit": "30.0",
        "stream.worker_gb": "3.0",
        "data.cache": "off",
        "train.checkpoint_minutes": "0.0",
        "train.keep_checkpoints": "1",
        "train.tensorboard": "false",
        "train.patience_minutes": "2.0",
        "train.graph": "false",
        "train.compile": "off",
        "train.activations": "all",
    }
    assert {*changes, "stream.prefetch"} == set(FREE)
    overrides = ["train.lr=1e-3", *(f"{key}={value}" for key, value in changes.items())]
    assert resume(tmp_path, overrides, QUIET, recipe).finished
    assert same(outcome(tmp_path), outcome(whole("er").run))
    written = json.loads((tmp_path / "config.json").read_text())["stream"]
    assert (written["workers"], written["prefetch"]) == (2, 3)


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
    with pytest.raises(StellaError, match=r"pip install 'stella-av\[tensorboard\]'"):
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

"""Runs that are stopped, killed by what they meet, or resumed: signals, losses that are not finite, full disks."""

import errno
import io
import json
import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.disk import small_disk
from helpers.small import Whole, lines, outcome, quick, same, use_tasks
from rich.console import Console

from stella.clip import Batch
from stella.errors import ConfigError, StellaError
from stella.experiments.results import row
from stella.methods import METHODS, Losses
from stella.methods.finetune import Finetune
from stella.model import weights
from stella.model.cav import CAV
from stella.report.page import write_page
from stella.runs import loop as run_module
from stella.runs.config import FREE, model_config, settle
from stella.runs.environment import with_earlier
from stella.runs.folder import RunFolder
from stella.runs.loop import Run, RunResult, pretrain, resume
from stella.runs.record import read_run
from stella.train import checkpoint
from stella.train.checkpoint import Checkpoints
from stella.train.device import Later, runtime
from stella.train.trainer import Trainer

QUIET = Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)


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


@pytest.mark.parametrize(
    ("place", "step", "said", "saved"),
    [
        ("a step", 5, "RuntimeError('out of memory')", "at step 3"),  # the first task's end
        ("a step", 2, "RuntimeError('out of memory')", "before the first checkpoint"),
        ("a checkpoint", 5, "checkpoint of step 5 cannot be written to", "at step 4"),
        ("a checkpoint", 1, "checkpoint of step 1 cannot be written to", "before the first checkpoint"),
    ],
)
def test_what_fails_after_a_signal_is_told_and_the_step_that_is_saved(
    place: str, step: int, said: str, saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = (Trainer, "compute") if place == "a step" else (checkpoint, "publish")
    plain, console = getattr(owner, name), Console(file=io.StringIO(), width=200)

    def fails(first: Any, second: Any) -> Any:
        now = first.counters.step if owner is Trainer else int(second.name.split("-")[1])
        if now != step:
            return plain(first, second)
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("out of memory") if owner is Trainer else OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, name, fails)
    result = pretrain(quick("er", f"train.checkpoint_minutes={10 * (owner is Trainer)}"), tmp_path, console=console)
    assert (result.finished, result.exit_code) == (False, 143)
    *_, why, stop = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert why.startswith(said) and stop.startswith(f"stopped by SIGTERM {saved}; resume with stella pretrain --resume")


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

    def between(self: Run, known: int) -> bool:
        nonlocal calls
        calls += 1
        if calls == 4:  # after this step has looked for a signal
            self.stop._receive(signal.SIGTERM, None)
        return plain(self, known)

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


def test_a_finished_run_is_not_done_again_and_without_resume_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    first = whole("finetune")
    monkeypatch.setattr(Trainer, "advance", None)
    assert pretrain(quick("finetune"), first.run, resume=True, console=QUIET) == first
    with pytest.raises(StellaError, match="holds a finished run; give this one another folder"):
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
        ("memory.bytes=1000", "memory.clips was 7 and is now none; memory.bytes was none and is now 1000"),
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
        "train.shard": "true",
        "train.keep_task_weights": "true",
    }
    assert {*changes, "stream.prefetch"} == set(FREE)
    overrides = ["train.lr=1e-3", *(f"{key}={value}" for key, value in changes.items())]
    assert resume(tmp_path, overrides, QUIET, recipe).finished
    assert same(outcome(tmp_path), outcome(whole("er").run))
    written = json.loads((tmp_path / "config.json").read_text())["stream"]
    assert (written["workers"], written["prefetch"]) == (2, 3)

"""The runner: configurations × seeds, in turn or in processes; finished runs are skipped, unfinished ones resumed."""

import contextlib
import csv
import io
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.small import quick, use_tasks
from rich.console import Console
from typer.testing import CliRunner

from stella.cli import app
from stella.errors import StellaError
from stella.experiments import pool
from stella.experiments.recipe import run_config
from stella.experiments.runner import run_all, with_methods
from stella.model import weights
from stella.report.tables import results_table
from stella.runs import build as build_module
from stella.runs import loop as run_module
from stella.runs.loop import pretrain
from stella.runs.record import group, read_run
from stella.train.trainer import Trainer

QUIET = Console(file=io.StringIO())
MINIATURE = (
    *("model.preset=tiny", "model.weights=base-tiny", "train.device=cpu", "train.warmup_steps=0"),
    *("memory.bytes=2000000", "data.clips=4", "data.eval_clips=4", "stream.epochs=1", "stream.batch_size=4"),
    *("evaluate.batch=4", "data.tasks=['task1','task2']"),
)


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_hyper_parameter_goes_to_the_methods_that_have_it() -> None:
    configs = with_methods(quick("finetune", "args.alpha=0.1"), ["er", "derpp", "stella"])
    assert {name: (config.method, config.args) for name, config in configs.items()} == {
        "er": ("er", {}),
        "derpp": ("derpp", {"alpha": 0.1}),
        "stella": ("stella", {"alpha": 0.1}),
    }
    with pytest.raises(StellaError, match=r"args\.alpah is a key of none of er, derpp: did you mean args\.alpha\?"):
        with_methods(quick("finetune", "args.alpah=0.1"), ["er", "derpp"])


def test_all_seeds_are_run_and_finished_runs_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)
    configs = {"plain": quick("finetune"), "replay": quick("er")}
    pretrain(quick("er", "seed=2"), tmp_path / "replay" / "seed-2", console=QUIET)
    started: list[Path] = []
    plain = Trainer.advance

    def advance(self: Trainer) -> bool:
        if self.counters.step == 0:
            started.append(Path())
        return plain(self)

    monkeypatch.setattr(Trainer, "advance", advance)
    outcome = run_all(configs, [1, 2], tmp_path, QUIET)
    assert len(started) == 3 and outcome.exit_code == 0
    assert [run.relative_to(tmp_path).as_posix() for run in outcome.runs] == [
        *("plain/seed-1", "replay/seed-1", "plain/seed-2", "replay/seed-2")
    ]
    assert not list(outcome.runs[0].glob("checkpoints")) and (outcome.runs[0] / "model.safetensors").exists()
    rows, groups = lines(tmp_path), group(map(read_run, outcome.runs))
    assert [(row["name"], row["seed"]) for row in rows] == [
        *(("plain", "1"), ("plain", "2"), ("replay", "1"), ("replay", "2"))
    ]
    for g in groups:
        own = [float(row["A"]) for row in rows if row["method"] == g.method]
        assert g.spread("A").mean == pytest.approx(sum(own) / 2)
        assert g.spread("A").deviation == pytest.approx(abs(own[0] - own[1]) / 2**0.5)
    assert all(row["commit"] and row["hardware"] and row["a2v_10_F"] for row in rows)
    for without in ("avm_accuracy", "avm_accuracy_last_task", "least_importance_ratio", "slow_A", "slow_F"):
        assert {row[without] for row in rows} == {""}
    table = Console(file=io.StringIO(), width=160)
    table.print(results_table(groups))
    assert "±" in table.file.getvalue()  # type: ignore[attr-defined]
    said, left = Console(file=io.StringIO()), outcome.runs[3] / "checkpoints"
    left.mkdir()  # a kill came between the end of the run and their removal
    assert run_all(configs, [1, 2], tmp_path, said).runs == outcome.runs and len(started) == 3 and not left.exists()
    assert "finished already: 4 of 4 runs" in said.file.getvalue()  # type: ignore[attr-defined]


def test_the_csv_has_the_scores_of_the_matching_module_and_of_slow_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tasks(monkeypatch)
    ratios = [[None, 9.0, 3.0], [7.0, None, 2.5], [8.0, 4.0, None], [8.0, 4.0, 6.0]]
    found = iter(each for ratio in ratios for each in (ratio, None))  # of the working and of the slow weights
    plain = run_module.evaluate_tasks
    monkeypatch.setattr(run_module, "evaluate_tasks", lambda *args: plain(*args) | {"importance_ratio": next(found)})
    result = run_all({"ours": quick("stella", "train.ema=0.9")}, [0], tmp_path, QUIET)
    [row], run = lines(tmp_path), read_run(result.runs[0])
    last, slow = run.evaluations[-1], run.lines("end")[0]["slow"]
    assert (float(row["slow_A"]), float(row["slow_F"])) == (slow["A"], slow["F"])
    assert float(row["avm_accuracy"]) == last["avm_accuracy"]
    assert float(row["avm_accuracy_last_task"]) == last["avm_accuracy_by_task"][2]
    assert row["least_importance_ratio"] == "2.5"


def test_a_stopped_comparison_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)
    configs = {"plain": quick("finetune"), "joint": quick("multitask")}
    plain = Trainer.advance

    def advance(self: Trainer) -> bool:
        if self.method.joint and self.counters.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", advance)
        stopped = run_all(configs, [0], tmp_path, QUIET)
    assert stopped.exit_code == 143 and [run.parent.name for run in stopped.runs] == ["plain"]
    whole = run_all(configs, [0], tmp_path, QUIET)
    assert whole.exit_code == 0 and len(whole.runs) == 2
    assert {row["name"]: row["F"] == "" for row in lines(tmp_path)} == {"plain": False, "joint": True}


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (
            ["method=finetune", "args.beta=1"],
            r"second: unknown key args\.beta: finetune takes no arguments; leave it out",
        ),
        (["method=stella", "args.betta=1"], r"second: unknown key args\.betta: did you mean args\.beta\?"),
        (["method=stela"], r"second: unknown method 'stela': did you mean stella"),
        (["memory.clips=1000000000", "stream.epochs=1000000000"], r"second: the rehearsal memory would take .* free"),
        (["memory.bytes=10"], r"second: memory\.clips=7 and memory\.bytes=10: set exactly one"),
        (["stream.size=64"], r"second: stream\.size=64 must be 32"),
        (["method=stella", "args.keep_ratio=0.1"], r"second: args\.keep_ratio=0\.1 keeps .* set it to at least 0\.2"),
        (["method=stella_plus", "args.keep_ratio=-0.5"], r"second: args\.keep_ratio=-0\.5 must lie between 0 and 1"),
        (["method=random", "args.keep_ratio=nan"], r"second: args.keep_ratio must be a finite number"),
        (["method=stella", "args.avm_heads=5"], r"second: args\.avm_heads=5 must divide"),
        (["method=stella", "args.beta=nan"], r"second: args.beta must be a finite number"),
        (["method=initial", "args.avm_heads=0"], r"second: args\.avm_heads=0 must divide"),
        (["objective.mask_ratio=0.99"], r"second: objective\.mask_ratio=0\.99 leaves none of"),
        (["model.weights=nowhere"], r"second: nowhere cannot be read .* base-small, base-tiny"),
        (["train.device=mps"], r"second: train\.device=mps is none of auto, cpu, cuda"),
    ],
)
def test_impossible_configurations_are_refused_before_the_first_run(
    bad: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tasks(monkeypatch)
    with pytest.raises(StellaError, match=told):
        run_all({"first": quick("finetune"), "second": quick("er", *bad)}, [0], tmp_path / "runs", QUIET)
    assert not (tmp_path / "runs").exists()


def test_before_the_first_run_it_is_known_whether_all_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that were started otherwise are refused; a finished run needs no room for its memory, others do."""
    use_tasks(monkeypatch)
    run_all({"replay": quick("er")}, [1], tmp_path, QUIET)
    with pytest.raises(StellaError, match=r"replay: .*seed-1 was .* otherwise: train\.lr was 0\.001 and is now 0\.1"):
        run_all({"replay": quick("er", "train.lr=0.1")}, [0, 1], tmp_path, QUIET)

    def refuse(*_: object) -> None:
        raise StellaError("the rehearsal memory does not fit")

    monkeypatch.setattr(build_module, "check_fits", refuse)
    assert len(run_all({"replay": quick("er")}, [1], tmp_path, QUIET).runs) == 1
    with pytest.raises(StellaError, match="replay: the rehearsal memory"):
        run_all({"replay": quick("er")}, [0, 1], tmp_path, QUIET)
    assert not (tmp_path / "replay" / "seed-0").exists()
    with pytest.raises(StellaError, match="nothing to run"):
        run_all({}, [0], tmp_path, QUIET)


def test_a_signal_while_a_run_ends_is_obeyed_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)
    configs = {"one": quick("finetune"), "two": quick("er")}
    with monkeypatch.context() as patch:
        packed = weights.packed
        patch.setattr(weights, "packed", lambda *args: (os.kill(os.getpid(), signal.SIGTERM), packed(*args))[1])
        stopped = run_all(configs, [0], tmp_path, QUIET)
    assert stopped.exit_code == 143 and [run.parent.name for run in stopped.runs] == ["one"]
    assert [row["name"] for row in lines(tmp_path)] == ["one"]
    assert not (tmp_path / "two").exists()
    assert run_all(configs, [0], tmp_path, QUIET).exit_code == 0


def compare(out: Path, processes: int, *values: str) -> list[str]:
    chosen = ["--methods", "finetune,er", "--seeds", "1", "--processes", str(processes), "--out", str(out)]
    return ["compare", "scenes", *MINIATURE, *values, *chosen]


@pytest.mark.slow
def test_runs_in_processes_equal_runs_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an error in one of them is the comparison's."""
    one, two = tmp_path / "one", tmp_path / "two"
    config = run_config("scenes", list(MINIATURE))
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # as each process has: it changes rounding
    run_all({method: replace(config, method=method) for method in ("finetune", "er")}, [0], one, QUIET)
    torch.set_num_threads(threads)
    done = CliRunner().invoke(app, compare(two, 2))
    assert done.exit_code == 0, (done.output, done.exception)
    assert "2 of 2: " in done.output and ", seed 0: A " in done.output
    for run in ("finetune/seed-0", "er/seed-0"):
        assert (one / run / "metrics.jsonl").read_text() == (two / run / "metrics.jsonl").read_text()
        assert not (two / run / "checkpoints").exists() and (two / run / "model.safetensors").exists()
    assert lines(one) == lines(two) and (two / "report.html").exists()
    assert "| ER | 1 | " in (two / "results.md").read_text()
    run = two / "er" / "seed-0"
    (run / "metrics.jsonl").write_text("")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-00000001-0123456789abcdef.pt").write_bytes(b"torn")
    monkeypatch.setattr(pool, "ProcessPoolExecutor", lambda number, _: ThreadPoolExecutor(number))  # quicker
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    failed = CliRunner().invoke(app, compare(two, 2))
    assert isinstance(failed.exception, StellaError) and "all checkpoints" in str(failed.exception)
    assert [line["name"] for line in lines(two)] == ["finetune"]


@pytest.mark.slow
def test_sigterm_reaches_the_runs_in_processes(tmp_path: Path) -> None:
    """A signal to the first process alone: the others save a checkpoint, and none goes on without it."""
    command = [sys.executable, "-m", "stella", *compare(tmp_path, 2, "stream.epochs=100000", "train.log_every=1")]
    runs = [tmp_path / name / "seed-0" for name in ("finetune", "er")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as first:
        try:
            while not all('"step"' in _read(run / "metrics.jsonl") for run in runs):
                assert first.poll() is None
                time.sleep(0.2)
            first.terminate()
            assert first.wait(timeout=60) == 128 + signal.SIGTERM
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)
    assert all(list((run / "checkpoints").glob("step-*.pt")) for run in runs)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""

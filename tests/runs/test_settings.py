"""The configuration of a run, and the machine it finds itself on."""

import csv
import io
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.small import quick, use_tasks
from rich.console import Console

from stella.config import build, resolve, to_tree
from stella.errors import ConfigError, StellaError
from stella.experiments.compare import compare
from stella.model import weights
from stella.report.tables import results_table
from stella.runs import loop as run_module
from stella.runs.config import RunConfig, model_config, settle
from stella.runs.environment import environment
from stella.runs.loop import pretrain
from stella.runs.record import read_run
from stella.train import device as device_module
from stella.train.config import TrainConfig
from stella.train.device import runtime
from stella.train.trainer import Trainer

QUIET = Console(file=io.StringIO())


def test_sizes_come_from_the_data_and_the_stream_follows() -> None:
    settled = settle(resolve(RunConfig, None, ["seed=4"]))
    c = model_config(settled)
    assert (c.image_size, c.spec_frames, c.frames) == (96, 256, 4)
    assert (settled.stream.size, settled.stream.spec_frames, settled.stream.mels) == (96, 256, 128)
    assert settled.stream.seed == 4
    videos = settle(resolve(RunConfig, None, ["data.source=folder", "data.path=x", "model.preset=base"]))
    assert (videos.stream.size, videos.stream.spec_frames) == (224, 1024)


def test_settling_twice_changes_nothing_and_a_settled_configuration_travels() -> None:
    settled = settle(quick("stella", "args.alpha=0.3", "memory.clips=none", "memory.bytes=1000"))
    assert settle(settled) == settled
    assert build(RunConfig, to_tree(settled)) == settled


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stream.size=64", r"stream\.size=64 would have to be 96"),
        ("stream.seed=9", r"stream\.seed=9 would have to be 0"),
        ("model.frames=8", r"model\.frames=8 but the clips have 4"),
        ("model.preset=huge", r"unknown model 'huge'"),
        ("model.image_size=50", r"image_size=50 must be a positive multiple"),
        ("objective.mask_ratio=1.5", r"mask_ratio=1\.5 must lie between 0 and 1"),
        ("objective.mask_ratio=nan", r"mask_ratio=nan must lie between 0 and 1"),
        ("objective.tau=0", r"tau=0\.0 above 0"),
        ("evaluate.batch=0", r"evaluate\.batch=0 must be at least 1"),
        ("seed=-1", r"seed=-1 must be at least 0"),
        ("seed=99999999999999999999", r"seed=99999999999999999999 .* below 2\^63"),
    ],
)
def test_what_cannot_be_is_told(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settle(resolve(RunConfig, None, [override]))


NAN = float("nan")


@pytest.mark.parametrize(
    "values",
    [{"lr": 0.0}, {"lr": NAN}, {"weight_decay": NAN}, {"beta1": 1.0}, {"accumulate": 0}, {"keep_checkpoints": 0}],
)
def test_training_settings_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(values))}"):
        TrainConfig(**values)  # type: ignore[arg-type]


def test_the_papers_settings_are_the_defaults() -> None:
    c = TrainConfig()
    assert (c.lr, c.beta1, c.beta2, c.weight_decay, c.warmup_steps) == (1e-4, 0.95, 0.999, 5e-7, 0)


def test_a_cpu_computes_in_float32() -> None:
    machine = runtime("cpu")
    with machine.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with pytest.raises(ConfigError, match="needs a GPU"):
        runtime("cpu", "bfloat16")
    assert machine.peak_bytes() > 50_000_000
    assert environment(machine)["precision"] == "float32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match=r"train\.device=cuda but no GPU"):
        runtime("cuda")


def test_a_comparison_runs_all_seeds_and_skips_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tasks(monkeypatch)
    configs = {"plain": quick("finetune"), "replay": quick("er")}
    pretrain(quick("er", "seed=2"), tmp_path / "replay" / "seed-2", console=QUIET)
    begun: list[Path] = []
    plain = Trainer.advance

    def advance(self: Trainer) -> bool:
        if self.counters.step == 0:
            begun.append(Path())
        return plain(self)

    monkeypatch.setattr(Trainer, "advance", advance)
    result = compare(configs, [1, 2], tmp_path, QUIET)
    assert len(begun) == 3 and result.exit_code == 0
    assert [(g.method, [run.seed for run in g.runs]) for g in result.groups] == [("finetune", [1, 2]), ("er", [1, 2])]
    rows = list(csv.DictReader(result.csv.open()))
    assert sorted((row["name"], row["seed"]) for row in rows) == [
        *(("plain", "1"), ("plain", "2"), ("replay", "1"), ("replay", "2"))
    ]
    for g in result.groups:
        own = [float(row["A"]) for row in rows if row["method"] == g.method]
        assert g.spread("A").mean == pytest.approx(sum(own) / 2)
        assert g.spread("A").deviation == pytest.approx(abs(own[0] - own[1]) / 2**0.5)
    assert all(row["commit"] and row["hardware"] and row["a2v_10_F"] for row in rows)
    assert {row["avm_accuracy"] + row["avm_accuracy_last_task"] + row["least_importance_ratio"] for row in rows} == {""}
    table = Console(file=io.StringIO(), width=160)
    table.print(results_table(result.groups))
    assert "±" in table.file.getvalue()  # type: ignore[attr-defined]
    assert len(begun) == 3 and compare(configs, [1, 2], tmp_path, QUIET).runs == result.runs and len(begun) == 3


def test_a_comparisons_csv_says_how_the_matching_module_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)
    found = iter([[None, 9.0, 3.0], [7.0, None, 2.5], [8.0, 4.0, None], [8.0, 4.0, 6.0]])
    plain = run_module.evaluate_tasks
    monkeypatch.setattr(run_module, "evaluate_tasks", lambda *args: plain(*args) | {"importance_ratio": next(found)})
    result = compare({"ours": quick("stella")}, [0], tmp_path, QUIET)
    [row], last = csv.DictReader(result.csv.open()), read_run(result.runs[0]).evaluations[-1]
    assert float(row["avm_accuracy"]) == last["avm_accuracy"]
    assert float(row["avm_accuracy_last_task"]) == last["avm_accuracy_by_task"][2]
    assert row["least_importance_ratio"] == "2.5"


def test_a_comparison_that_is_stopped_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)
    configs = {"plain": quick("finetune"), "joint": quick("multitask")}
    plain = Trainer.advance

    def advance(self: Trainer) -> bool:
        if self.method.joint and self.counters.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", advance)
        stopped = compare(configs, [0], tmp_path, QUIET)
    assert stopped.exit_code == 143 and [run.parent.name for run in stopped.runs] == ["plain"]
    whole = compare(configs, [0], tmp_path, QUIET)
    assert whole.exit_code == 0 and len(whole.runs) == 2
    assert [row["F"] == "" for row in csv.DictReader(whole.csv.open())] == [False, True]  # not defined for joint


def test_a_comparison_with_a_changed_configuration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)
    compare({"plain": quick("finetune")}, [0], tmp_path, QUIET)
    with pytest.raises(StellaError, match=r"train\.lr was 0\.001 and is now 0\.1"):
        compare({"plain": quick("finetune", "train.lr=0.1")}, [0], tmp_path, QUIET)
    with pytest.raises(StellaError, match="nothing to compare"):
        compare({}, [0], tmp_path, QUIET)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (["args.beta=1"], r"second: unknown key args\.beta: er takes no arguments; leave it out"),
        (["method=stella", "args.betta=1"], r"second: unknown key args\.betta: did you mean args\.beta\?"),
        (["method=stela"], r"second: unknown method 'stela'; choose one of"),
        (["memory.clips=1000000000"], r"second: the rehearsal memory would take .* free"),
        (["memory.bytes=10"], r"second: the memory's size is given as clips=7 and bytes=10"),
        (["stream.size=64"], r"second: stream\.size=64 would have to be 32"),
        (["method=stella", "args.keep_ratio=0.1"], r"second: keep_ratio keeps .* set it above 0\.2"),
        (["method=stella_plus", "args.keep_ratio=-0.5"], r"second: keep_ratio=-0\.5 is a share"),
        (["method=random", "args.keep_ratio=nan"], r"second: keep_ratio=nan is a share"),
        (["method=stella", "args.avm_heads=5"], r"second: the matching module's heads=5 must divide"),
        (["method=stella", "args.beta=nan"], r"second: beta=nan must be above 0"),
        (["method=initial", "args.avm_heads=0"], r"second: the matching module's heads=0 must divide"),
        (["objective.mask_ratio=0.99"], r"second: objective\.mask_ratio=0\.99 leaves none of"),
        (["model.weights=nowhere"], r"second: nowhere cannot be read .* base-small, base-tiny"),
        (["train.device=mps"], r"second: train\.device=mps is none of auto, cpu, cuda"),
    ],
)
def test_a_comparison_refuses_what_cannot_be_before_its_first_run(
    bad: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tasks(monkeypatch)
    with pytest.raises(StellaError, match=told):
        compare({"first": quick("finetune"), "second": quick("er", *bad)}, [0], tmp_path / "runs", QUIET)
    assert not (tmp_path / "runs").exists()


def test_a_comparison_looks_at_runs_begun_otherwise_before_its_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tasks(monkeypatch)
    compare({"plain": quick("finetune")}, [1], tmp_path, QUIET)
    with pytest.raises(StellaError, match=r"plain: .*seed-1 was started otherwise: train\.lr was 0\.001 and"):
        compare({"plain": quick("finetune", "train.lr=0.1")}, [0, 1], tmp_path, QUIET)
    assert not (tmp_path / "plain" / "seed-0").exists()


def test_what_is_finished_needs_no_room_for_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)
    compare({"replay": quick("er")}, [0], tmp_path, QUIET)
    monkeypatch.setattr(device_module, "_free_ram", lambda: 0)
    assert len(compare({"replay": quick("er")}, [0], tmp_path, QUIET).runs) == 1
    with pytest.raises(StellaError, match="replay: the rehearsal memory"):
        compare({"replay": quick("er")}, [0, 1], tmp_path, QUIET)


def test_a_signal_while_a_run_ends_ends_the_comparison_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tasks(monkeypatch)
    configs = {"one": quick("finetune"), "two": quick("er")}
    with monkeypatch.context() as patch:
        packed = weights.packed
        patch.setattr(weights, "packed", lambda *args: (os.kill(os.getpid(), signal.SIGTERM), packed(*args))[1])
        stopped = compare(configs, [0], tmp_path, QUIET)
    assert stopped.exit_code == 143 and [run.parent.name for run in stopped.runs] == ["one"]
    assert [row["name"] for row in csv.DictReader(stopped.csv.open())] == ["one"]
    assert not (tmp_path / "two").exists()
    assert compare(configs, [0], tmp_path, QUIET).exit_code == 0

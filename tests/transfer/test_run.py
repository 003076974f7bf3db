"""Downstream runs: what is trained and what is not, which epoch is tested, and what a kill leaves."""

import io
import os
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import downstream
from helpers.downstream import small_weights
from helpers.dying import child
from helpers.small import same
from rich.console import Console
from safetensors.torch import load_file

import stella
from stella.clip import Batch, names_of
from stella.data.pack import pack
from stella.data.scenes import Scenes, ScenesConfig
from stella.errors import ClipError, StellaError
from stella.files import read_json, read_lines
from stella.model import weights
from stella.report.predictions import _draw_events, predictions_sheet
from stella.runs import progress
from stella.runs.folder import RunFolder
from stella.runs.training import RunResult
from stella.train import trainer
from stella.train.checkpoint import Checkpoints
from stella.transfer.base import Downstream
from stella.transfer.classify import Classify
from stella.transfer.config import transfer_config
from stella.transfer.run import PREDICTIONS, TransferRun, _keep_predictions, resume, transfer
from stella.transfer.segment import Segment

SMALL = ("data.tasks=['task1']", "data.clips=12", "data.eval_clips=8", "stream.batch_size=4", "train.device=cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_weights(tmp_path_factory.mktemp("weights") / "small.safetensors")


def go(task: str, file: Path | str, run: Path, *more: str, again: bool = False) -> RunResult:
    return downstream.go(task, file, run, *SMALL, "stream.epochs=2", *more, again=again)


def trained(task: str, file: Path, run: Path, *more: str) -> TransferRun:
    """The run's object after its end, to look at its weights."""
    seen: list[TransferRun] = []
    plain = TransferRun.finish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransferRun, "finish", lambda self: (seen.append(self), plain(self))[1])
        assert go(task, file, run, *more).finished
    return seen[0]


@pytest.mark.parametrize("task", ["retrieval", "classify", "segment", "events", "localise", "matching"])
def test_every_task_runs_from_nothing_on_scenes(task: str, file: Path, tmp_path: Path) -> None:
    warmup = ["warmup_epochs=1"] if task in ("segment", "events") else []
    end = go(task, file, tmp_path, "data.clips=4", "data.eval_clips=4", *warmup).end
    assert end["task"] == task and end["parts"][1:] == ([40, 40] if task == "events" else [4, 4])
    assert 0 <= end["test"][end["figure"]] <= 100 and end["ceilings"] and not end["skipped"]
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "environment.json", "metrics.jsonl"}
    if task in ("segment", "events", "localise"):
        assert predictions_sheet(tmp_path, tmp_path / "a.png").stat().st_size > 8_000
    else:
        assert (tmp_path / "predictions.safetensors").exists() == (task == "classify")


def test_a_clip_with_a_skipped_segment_is_not_drawn(tmp_path: Path) -> None:
    parts = ScenesConfig(clips=2, eval_clips=2, tasks=("task1",)).downstream("events")
    ids = torch.tensor([i for i in range(20) if i != 7])
    batch = Batch(torch.zeros(19), torch.zeros(19), ids)
    scores = torch.rand(19, len(parts.classes))
    _keep_predictions(RunFolder(tmp_path), parts, lambda clips: clips, lambda _: [batch], lambda *_: {"scores": scores})
    said = load_file(tmp_path / PREDICTIONS)
    assert said["rows"].tolist() == list(range(10, 20)) and torch.equal(said["scores"], scores[9:])
    assert _draw_events(parts, said, tmp_path / "a.png").exists()


def test_a_frozen_backbone_stays_as_it_is_to_the_last_bit(file: Path, tmp_path: Path) -> None:
    before = weights.load(file).model.state_dict()
    done = trained("classify", file, tmp_path)
    assert same(dict(before), dict(done.task.model.state_dict()))
    assert not any(p.grad is not None for p in done.task.model.parameters())
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "best.safetensors"))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("task", ["retrieval", "classify"])
def test_a_trained_backbone_changes_and_is_kept(task: str, file: Path, tmp_path: Path) -> None:
    done = trained(task, file, tmp_path, "head.frozen=false")
    state = Checkpoints(tmp_path / "checkpoints").load()
    assert state is not None
    last = state["trainer"]["method"]
    before = dict(weights.load(file).model.named_parameters())
    moved = [name for name, p in before.items() if not torch.equal(p, last[f"model.{name}"])]
    assert any(name.startswith("blocks_a") for name in moved) and any(name.startswith("blocks_u") for name in moved)
    kept = weights.load(tmp_path / "model.safetensors").model.state_dict()
    assert same(dict(done.task.model.state_dict()), dict(kept))  # the best epoch's, which was tested


@pytest.mark.parametrize("task", ["retrieval", "matching"])
def test_kept_weights_say_how_their_inputs_are_made(task: str, file: Path, tmp_path: Path) -> None:
    go(task, file, tmp_path, "data.clips=4", "data.eval_clips=4", "stream.epochs=1")
    clips = ScenesConfig().inputs()
    assert stella.load(tmp_path / "model.safetensors").inputs == replace(clips, pixels=32, spec_frames=64)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("classify", ["features: 4 of 12", "features: 8 of 12", "features: 4 of 8", "features: 4 of 8"]),
        ("localise", ["localising: 4 of 8"]),
    ],
)
def test_what_takes_long_says_how_far_it_is(
    task: str, told: list[str], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SILENCE", -1.0)  # speaks at once
    given = [f"weights.source={file}", *SMALL, "stream.epochs=2", "evaluate.batch=4"]
    console = Console(file=(said := io.StringIO()), width=200)
    assert transfer(transfer_config(task, None, given), tmp_path / "run", console=console).finished
    found = [line for line in said.getvalue().splitlines() if " of " in line and line.endswith("about 1 minute left")]
    assert [line.partition(", about")[0] for line in found] == told


def test_features_of_a_frozen_backbone_are_computed_once(file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    seen: Counter[int] = Counter()
    plain = Classify.columns_of

    def counted(self: Classify, batch: Any, source: Any) -> Any:
        seen[id(source)] += len(batch)
        return plain(self, batch, source)

    monkeypatch.setattr(Classify, "columns_of", counted)
    go("classify", file, tmp_path, "stream.epochs=4")
    assert sorted(seen.values()) == [6, 8, 8, 12]  # six test clips once more, for the picture


def test_shared_features_tell_every_run_which_clips_were_skipped(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ScenesConfig.downstream

    class Holed:
        def __init__(self, source: Any) -> None:
            self.source = source

        def __len__(self) -> int:
            return len(self.source)

        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise ClipError("file", "damaged video", "fetch it again")
            return self.source[index]

        def class_of(self, index: int) -> str | None:
            return names_of(self.source, [index])[0]

    def downstream(self: ScenesConfig, task: str) -> Any:
        parts = plain(self, task)
        return replace(parts, train=Holed(parts.train))

    monkeypatch.setattr(ScenesConfig, "downstream", downstream)
    for run in ("first", "second"):
        end = go("classify", file, tmp_path / run, f"features={tmp_path / 'features'}").end
        assert end["skipped"] == {"damaged video": 1}
        assert [line["id"] for line in read_lines(tmp_path / run / "skipped.jsonl")] == ["train/3"]


@pytest.mark.parametrize("task", ["classify", "segment"])
def test_a_learning_rate_reaches_every_weight_of_the_head(task: str, file: Path, tmp_path: Path) -> None:
    """The published decoder was never given to its optimiser."""
    first: dict[str, Any] = {}
    plain = Downstream.groups

    def groups(self: Downstream) -> Any:
        first.update({name: p.detach().clone() for name, p in self.head.named_parameters()})
        return plain(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Downstream, "groups", groups)
        done = trained(task, file, tmp_path, "stream.epochs=3", "head.mask_frames=0", "warmup_epochs=1")
    still = [name for name, p in done.task.head.named_parameters() if torch.equal(p, first[name])]
    assert len(first) > 5 and not still


def test_the_head_has_a_rate_of_its_own(file: Path, tmp_path: Path) -> None:
    more = ("head.frozen=false", "stream.augment=false", "train.schedule=linear")
    rates = trained("classify", file, tmp_path, *more, "head.head_rate=10", "train.lr=1e-5").trainer.optimizer
    assert [float(group["lr"]) for group in rates.param_groups] == pytest.approx([1e-5, 1e-4])
    assert isinstance(rates, torch.optim.AdamW)


def test_the_rate_warms_up_then_falls_along_a_cosine(file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    found: list[float] = []
    plain = trainer.Trainer.advance

    def advance(self: trainer.Trainer) -> bool:
        more = plain(self)
        found.append(float(self.optimizer.param_groups[0]["lr"]))
        return more

    monkeypatch.setattr(trainer.Trainer, "advance", advance)
    go("classify", file, tmp_path, "stream.epochs=4", "warmup_epochs=1", "train.lr=1")
    assert len(found) == 13  # three steps an epoch, and the one that found no batch
    assert found[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert found[7] == pytest.approx(0.5 * (1 + torch.cos(torch.tensor(4 * torch.pi / 9)).item()))
    assert found[11] == pytest.approx(0.5 * (1 + torch.cos(torch.tensor(8 * torch.pi / 9)).item()))  # above 0


def test_the_best_epoch_is_chosen_on_validation_and_tested_once(file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[str] = []
    heads: list[Any] = []
    values = iter([10.0, 30.0, 30.0, 20.0])

    def measure(self: TransferRun, part: str) -> dict[str, float]:
        asked.append(part)
        heads.append({name: tensor.clone() for name, tensor in self.task.head.state_dict().items()})
        return {"accuracy": next(values) if part == "validation" else 99.0}

    monkeypatch.setattr(TransferRun, "measure", measure)
    end = go("classify", file, tmp_path, "stream.epochs=4").end
    assert asked == ["validation"] * 4 + ["test"]
    assert end["best_epoch"] == 2 and end["validation"] == 30 and end["test"] == {"accuracy": 99.0}
    assert same(heads[4], heads[1]) and not same(heads[4], heads[3])


def outcome(run: Path) -> dict[str, Any]:
    state = Checkpoints(run / "checkpoints").load()
    return {
        "metrics": (run / "metrics.jsonl").read_bytes(),
        "best": load_file(run / "best.safetensors"),
        "state": state,
    }


def killed(task: str, file: Path, run: Path, owner: Any, name: str, call: int, *more: str) -> None:
    """Do the run in a process that kills itself at a call of a function."""

    def work() -> None:
        go(task, file, run, *more, again=True)

    assert os.waitpid(child(work, (owner, name), call), 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("task", ["classify", pytest.param("retrieval", marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_if_it_had_not_been(task: str, file: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    more = ("train.checkpoint_minutes=0", "stream.epochs=3")
    go(task, file, tmp_path / "whole", *more)
    expected = outcome(tmp_path / "whole")
    run = tmp_path / "killed"
    killed(task, file, run, trainer, "get_total_norm", 2, *more)  # in a step
    killed(task, file, run, TransferRun, "measure", 2, *more)  # before a validation
    killed(task, file, run, Downstream, "load_state_dict", 2, *more)  # before the test
    assert resume(run, console=Console(file=io.StringIO())).finished
    assert same(outcome(run), expected)
    assert [line["epoch"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "evaluation"][-3:] == [
        1,
        2,
        3,
    ]


def test_a_run_on_files_means_the_same_from_elsewhere_and_refuses_other_clips(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are stored as what they meant; clips that were exchanged are named."""
    sizes: dict[str, Any] = {"pixels": 32, "spec_frames": 64, "size": 36, "workers": 0, "progress": False}
    pack(Scenes("task1", "train", 24), tmp_path / "clips", **sizes)
    monkeypatch.chdir(tmp_path)
    data = ["data.source=packed", "data.path=clips", "data.eval_share=0.4", "stream.epochs=1", "train.device=cpu"]
    weight_file = os.path.relpath(file, tmp_path)
    config = transfer_config("retrieval", None, [f"weights.source={weight_file}", *data])
    console = Console(file=io.StringIO())
    assert transfer(config, tmp_path / "run", console=console).finished
    stored = read_json(tmp_path / "run" / "config.json")
    assert stored["data"]["path"] == str(tmp_path / "clips")
    assert Path(stored["weights"]["source"]).is_absolute() and file.samefile(stored["weights"]["source"])
    monkeypatch.chdir("/")
    assert resume(tmp_path / "run", console=console).finished
    (tmp_path / "run" / "metrics.jsonl").unlink()  # as if it had been killed early
    for path in (tmp_path / "run" / "checkpoints", tmp_path / "run" / "speed.jsonl"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(tmp_path / "clips")
    pack(Scenes("task2", "train", 24), tmp_path / "clips", **sizes)
    with pytest.raises(StellaError, match="the clips are not those that this run was started with"):
        resume(tmp_path / "run", console=console)


def test_a_run_says_what_is_too_little(file: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=500)
    config = transfer_config("classify", None, [f"weights.source={file}", *SMALL, "stream.epochs=2"])
    steps = transfer(config, tmp_path / "run", console=console).end["step"]
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"only {steps} steps: a model learns next to nothing in so few; set stream.epochs=" in told
    assert "few clips to evaluate on: validation (" in told and "epoch 2 of 2: accuracy" in told


def test_a_finished_run_is_not_done_again(file: Path, tmp_path: Path) -> None:
    end = go("classify", file, tmp_path).end
    before = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert go("classify", file, tmp_path, again=True).end == end
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == before
    with pytest.raises(StellaError, match="already holds a run"):
        go("classify", file, tmp_path)
    with pytest.raises(StellaError, match=r"started otherwise: train\.lr was"):
        go("classify", file, tmp_path, "train.lr=1", again=True)


def test_a_run_resumes_with_the_weights_it_was_started_with(file: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.safetensors"
    own.write_bytes(file.read_bytes())
    killed("classify", own, tmp_path / "run", trainer, "get_total_norm", 4, "train.checkpoint_minutes=0")
    loaded = weights.load(file)
    loaded.model.modality_a.data += 1
    weights.save(own, loaded.model, loaded.avm)
    with pytest.raises(StellaError, match="not the file that this run was started with"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("task", "more", "sentence"),
    [
        ("sing", (), r"unknown task 'sing' \(known: retrieval, "),
        ("clasify", (), r"unknown task 'clasify': did you mean classify\? \(known: "),
        ("retrieval", ("head.frozen=true",), "retrieval trains the backbone"),
        ("matching", ("head.frozen=false",), "frozen backbone"),
        ("classify", ("views=3",), "all the same without augmentation"),
        ("classify", ("warmup_epochs=9",), "more than stream.epochs=2; set warmup_epochs=2 or less"),
        ("classify", ("train.warmup_epochs=0",), "did you mean warmup_epochs\\?"),
        ("classify", ("weights.slow=true",), "is not a run"),
        ("classify", ("weights.source=nowhere.safetensors",), "cannot be read"),
        ("classify", ("weights.source=random:huge",), "unknown model 'huge'"),
    ],
)
def test_what_cannot_be_is_refused(task: str, more: tuple[str, ...], sentence: str, file: Path, tmp_path: Path) -> None:
    with pytest.raises(StellaError, match=sentence):
        go(task, file, tmp_path / "run", *more)
    assert not (tmp_path / "run").exists()


def test_a_module_that_replaces_another_is_told(file: Path, tmp_path: Path) -> None:
    def said(model: Path | str) -> str:
        values = [f"weights.source={model}", *SMALL, "data.clips=4", "stream.epochs=1"]
        console = Console(file=io.StringIO(), width=500)
        transfer(transfer_config("matching", None, values), tmp_path / Path(model).stem, console=console)
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    assert f"{file} has a matching module; this trains a new one" in said(file)
    weights.save(tmp_path / "none.safetensors", weights.load(file).model, None)
    assert "matching module" not in said(tmp_path / "none.safetensors")


def test_without_kept_views_every_epoch_has_another_crop(file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[torch.Tensor] = []
    plain = Classify.columns_of

    def noted(self: Classify, batch: Any, source: Any) -> Any:
        seen.append(batch.video[batch.ids.argsort()])
        return plain(self, batch, source)

    monkeypatch.setattr(Classify, "columns_of", noted)
    more = ("views=0", "stream.augment=true", "stream.epochs=3", "stream.batch_size=12")
    done = trained("classify", file, tmp_path, *more)
    train = [video for video in seen if len(video) == 12]
    assert done.task.table is None and len(train) == 3
    assert not any(torch.equal(a, b) for a, b in ((train[0], train[1]), (train[1], train[2])))


def test_views_are_other_crops_and_sounds_of_the_same_clips(file: Path, tmp_path: Path) -> None:
    done = trained("classify", file, tmp_path, "views=3", "stream.augment=true", "stream.epochs=4")
    table = done.task.table
    assert table is not None and len(table) == 12 and table.views == 3
    z, target = table.columns["z"].view(3, 12, -1), table.columns["target"].view(3, 12)
    assert torch.equal(target[0], target[1]) and not torch.equal(z[0], z[1]) and not torch.equal(z[1], z[2])


def test_large_features_are_memory_mapped_and_found_again(file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from stella.transfer import features

    go("segment", file, tmp_path / "memory", "warmup_epochs=0")
    monkeypatch.setattr(features, "IN_MEMORY", 0)
    more = ("warmup_epochs=0", "train.checkpoint_minutes=0")
    killed("segment", file, tmp_path / "mapped", trainer, "get_total_norm", 4, *more)
    assert (tmp_path / "mapped" / "features" / "train" / "table.json").exists()
    seen: Counter[str] = Counter()
    plain = Segment.columns_of
    monkeypatch.setattr(
        Segment, "columns_of", lambda self, batch, source: (seen.update(["batch"]), plain(self, batch, source))[1]
    )
    assert resume(tmp_path / "mapped", console=Console(file=io.StringIO())).finished
    assert seen["batch"] == 2  # the test part and its picture: train and validation are on the disk
    ends = [read_lines(tmp_path / run / "metrics.jsonl")[-1] for run in ("memory", "mapped")]
    assert ends[0] == ends[1]

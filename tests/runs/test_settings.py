"""The configuration of a run, and the machine it finds itself on."""

import io
from pathlib import Path

import pytest
import torch
from helpers.small import quick, use_tasks
from rich.console import Console

from stella.config import build, resolve, to_tree
from stella.data.folder import FolderConfig
from stella.errors import ConfigError, StellaError
from stella.runs.build import check, without_effect
from stella.runs.config import RunConfig, machine, model_config, settle
from stella.runs.environment import environment
from stella.runs.folder import RunFolder
from stella.runs.loop import pretrain
from stella.train.config import TrainConfig
from stella.train.device import runtime
from stella.train.trainer import Trainer


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
        ("stream.size=64", r"stream\.size=64 must be 96"),
        ("stream.seed=9", r"stream\.seed=9 must be 0"),
        ("model.frames=8", r"model\.frames=8 but the clips have 4"),
        ("model.preset=huge", r"unknown model 'huge'"),
        ("model.image_size=50", r"image_size=50 must be a positive multiple"),
        ("objective.mask_ratio=1.5", r"mask_ratio=1\.5 must lie between 0 and 1"),
        ("objective.mask_ratio=nan", r"mask_ratio must be a finite number, not nan"),
        ("objective.tau=0", r"objective\.tau=0\.0 must be above 0$"),
        ("evaluate.batch=0", r"evaluate\.batch=0 must be at least 1"),
        ("seed=-1", r"seed=-1 must be at least 0"),
        ("seed=99999999999999999999", r"seed must be an integer of at most 63 bits, not 99999999999999999999"),
    ],
)
def test_what_cannot_be_is_told(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settle(resolve(RunConfig, None, [override]))


WRONG = (
    *("stream.batch_size=0", "stream.epochs=0", "stream.workers=-1", "train.lr=-1", "train.beta1=2", "train.beta2=1"),
    *("train.weight_decay=-1", "train.ema=2", "train.log_every=0", "memory.clips=-5", "memory.clips=none"),
    *("objective.tau=0", "objective.mask_ratio=1", "objective.contrast_weight=-1", "model.image_size=33"),
    *("method=stella args.beta=0", "method=stella args.chunk=0", "method=stella args.score_every=0"),
    *("method=stella args.avm_heads=0", "method=stella args.keep_ratio_a=2", "method=random args.keep_ratio=2"),
    *("method=esmer args.beta=0", "method=esmer args.gamma=-1", "method=esmer args.rate=2"),
    *("method=cls_er args.weight=-1", "method=cls_er args.rate_plastic=2", "method=er args.draws=0"),
    *("method=lump args.concentration=0", "method=mir args.candidates=0", "method=chorus args.keep_ratio=-1"),
)


@pytest.mark.parametrize("values", WRONG)
def test_a_wrong_value_is_told_with_the_key_that_was_typed(values: str) -> None:
    key, _, value = values.split()[-1].partition("=")
    with pytest.raises(StellaError) as refused:
        check(settle(resolve(RunConfig, None, values.split())))
    assert str(refused.value).startswith(key) and value in str(refused.value)


def test_values_of_a_memory_that_a_method_does_not_have_are_told() -> None:
    values = ["memory.codec=dct", "train.lr=1", "memory.clips=5"]
    told = "without effect: memory.codec=dct, memory.clips=5, since multitask has no rehearsal memory"
    for method, said in (("multitask", [told]), ("er", [])):
        assert without_effect(resolve(RunConfig, None, [f"method={method}", *values]), values) == said
    assert without_effect(resolve(RunConfig, None, ["method=multitask"]), ["train.lr=1"]) == []


NAN = float("nan")


@pytest.mark.parametrize(
    "values",
    [
        *({"lr": 0.0}, {"lr": NAN}, {"weight_decay": NAN}, {"beta1": 1.0}, {"ema": 1.5}),
        *({"accumulate": 0}, {"keep_checkpoints": 0}),
    ],
)
def test_training_settings_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(values))}"):
        TrainConfig(**values)  # type: ignore[arg-type]


def test_the_papers_settings_are_the_defaults() -> None:
    c = TrainConfig()
    assert (c.lr, c.beta1, c.beta2, c.weight_decay, c.warmup_steps) == (1e-4, 0.95, 0.999, 5e-7, 0)


def test_a_cpu_computes_in_float32_as_written() -> None:
    here = runtime("cpu", "auto", "auto")
    assert (here.device.type, here.autocast_to, here.compile, here.remark) == ("cpu", None, False, "")
    with here.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with pytest.raises(ConfigError, match="needs a GPU"):
        runtime("cpu", "bfloat16")
    assert here.peak_bytes() > 50_000_000
    assert environment(here)["precision"] == "float32"


HUGE = "9" * 400
NUMBERS = {
    "train.lr=1e400": "train.lr must be a finite number, not inf",
    "train.lr=nan": "train.lr must be a finite number, not nan",
    f"train.lr={HUGE}": "train.lr must be a finite number, not 999",
    "train.weight_decay=inf": "train.weight_decay must be a finite number",
    "train.checkpoint_minutes=nan": "train.checkpoint_minutes must be a finite number",
    "stream.time_limit=nan": "stream.time_limit must be a finite number",
    "stream.most_bad=nan": "stream.most_bad must be a finite number",
    "stream.worker_gb=0": "stream.worker_gb=0.0 must be above 0",
    "stream.workers=100000": "stream.workers=100000 must be at most 1000",
    f"stream.batch_size={HUGE}": "stream.batch_size must be an integer of at most 63 bits",
    f"memory.clips={HUGE}": "memory.clips must be an integer of at most 63 bits",
    f"seed=-{HUGE}": "seed must be an integer of at most 63 bits",
    f"data.clips={'9' * 5000}": "data.clips must be an integer",
    "objective.tau=nan": "objective.tau must be a finite number",
    f"train.device=cuda:{'9' * 30}": "is none of auto, cpu, cuda and cuda:0",
    "train.device=cuda:999": "no GPU is available|the last GPU is",
}


@pytest.mark.parametrize("override", NUMBERS)
def test_numbers_that_make_no_sense_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=NUMBERS[override]) as caught:
        machine(resolve(RunConfig, None, [override]).train)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1e300", "1e5"])
@pytest.mark.parametrize("key", ["duration", "pixels", "frames", "span"])
def test_clips_of_impossible_sizes_are_refused(key: str, value: str, tmp_path: Path) -> None:
    if key == "span" and value.startswith("1e"):  # it may be longer than the clip
        value = "-1e5"
    with pytest.raises(ConfigError, match=rf"data\.{key}"):
        resolve(RunConfig, None, ["data.source=folder", f"data.path={tmp_path}", f"data.{key}={value}"])


@pytest.mark.parametrize("name", ["2024", "2024-01-01", "007", "-5"])
def test_a_folder_may_be_named_like_a_number(name: str) -> None:
    data = resolve(RunConfig, None, ["data.source=folder", f"data.path={name}"]).data
    assert isinstance(data, FolderConfig) and data.path == name


def test_a_run_that_ends_with_weights_that_are_not_finite_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tasks(monkeypatch)
    config = quick("finetune")
    plain = Trainer.advance

    def advance(self: Trainer) -> bool:
        if not plain(self):
            return False
        if self.counters.step == 9:  # the last: no loss tells of it any more
            next(self.method.parameters()).data[0] = float("inf")
        return True

    monkeypatch.setattr(Trainer, "advance", advance)
    with pytest.raises(StellaError, match="the weights of this run are not finite, so it is no success"):
        pretrain(config, tmp_path, console=Console(file=io.StringIO()))
    assert not RunFolder(tmp_path).weights.exists() and RunFolder(tmp_path).end is None

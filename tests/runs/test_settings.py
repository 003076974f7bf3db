"""The configuration of a run, and the machine it finds itself on."""

import pytest
import torch
from helpers.small import quick

from stella.config import build, resolve, to_tree
from stella.errors import ConfigError
from stella.runs.config import RunConfig, model_config, settle
from stella.runs.environment import environment
from stella.train.config import TrainConfig
from stella.train.device import runtime


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
    machine = runtime("cpu", "auto", "auto")
    assert (machine.device.type, machine.autocast_to, machine.compile, machine.remark) == ("cpu", None, False, "")
    with machine.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with pytest.raises(ConfigError, match="needs a GPU"):
        runtime("cpu", "bfloat16")
    assert machine.peak_bytes() > 50_000_000
    assert environment(machine)["precision"] == "float32"

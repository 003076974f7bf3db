"""The configuration of a run: everything that its result depends on."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stella.config import build
from stella.data.config import DataConfig
from stella.data.scenes import ScenesConfig
from stella.data.stream import StreamConfig
from stella.errors import ConfigError, StellaError
from stella.methods.base import MemoryConfig, ObjectiveConfig
from stella.model.cav import CAVConfig, preset
from stella.runs.folder import RunFolder
from stella.train.config import TrainConfig
from stella.train.device import Runtime, runtime

# Keys that may change on resume, because no result depends on them (compiling changes rounding only).
FREE = (
    *("stream.workers", "stream.prefetch", "stream.time_limit", "stream.worker_gb", "data.cache"),
    *("train.checkpoint_minutes", "train.keep_checkpoints", "train.tensorboard"),
    *("train.graph", "train.compile", "train.activations"),
)


@dataclass(frozen=True)
class ModelConfig:
    """A preset, its initial weights, and sizes where they differ from the data's."""

    preset: str = "tiny"  # tiny, small or base
    weights: str | None = None  # initial weights: a file in any format of `stella weights`, or a shipped name
    image_size: int | None = None  # pixels; none: the data's
    spec_frames: int | None = None  # time steps of the spectrogram; none: the data's
    frames: int | None = None  # video frames of a clip; none: the data's


@dataclass(frozen=True)
class EvaluateConfig:
    batch: int = 64  # clips per batch of an evaluation

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"evaluate.batch={self.batch} must be at least 1")


@dataclass(frozen=True)
class RunConfig:
    seed: int = 0  # of initial weights, order, augmentation, masks and memory; data.seed is another
    method: str = "stella"  # a name from `stella methods`, or FILE.py:CLASS with a method of your own
    args: dict[str, Any] = field(default_factory=dict)  # hyper-parameters of the method
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=ScenesConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed} must be at least 0 and below 2^63")


def settle(config: RunConfig) -> RunConfig:
    """The configuration with derived values filled in: sizes, absolute paths, the stream's seed and its workers."""
    own_file = ".py:" in config.method
    method = str(Path(config.method).absolute()) if own_file else config.method
    config = replace(config, data=config.data.absolute(), method=method)
    data, model = config.data.sizes(), config.model
    if model.frames not in (None, data.frames):
        raise ConfigError(f"model.frames={model.frames} but the clips have {data.frames}; leave model.frames out")
    sizes: dict[str, Any] = {"image_size": data.pixels, "spec_frames": data.spec_frames, "frames": data.frames}
    unset = {name: size for name, size in sizes.items() if getattr(model, name) is None}
    if model.weights and Path(model.weights).exists():
        unset["weights"] = str(Path(model.weights).absolute())
    sized = replace(config, model=replace(model, **unset))
    c = model_config(sized)
    follows: dict[str, Any] = {"size": c.image_size, "spec_frames": c.spec_frames, "mels": c.mel_bins}
    follows["seed"] = config.seed
    for name, value in follows.items():
        given = getattr(config.stream, name)
        if given not in (value, getattr(StreamConfig, name)):
            cause = "seed" if name == "seed" else "the model's and the data's sizes"
            raise ConfigError(f"stream.{name}={given} must be {value}, which follows from {cause}; leave it out")
    workers = max(config.data.least_workers, config.stream.workers)
    return replace(sized, stream=replace(config.stream, workers=workers, **follows))


def stored_config(folder: RunFolder) -> RunConfig:
    """The configuration of a run, refused if another version wrote it."""
    try:
        return build(RunConfig, folder.read_config())
    except ConfigError as error:
        raise StellaError(
            f"{folder.root} was written by another version of stella ({error}); start a new run, or use its weights, "
            f"{folder.weights.name}, with a recipe"
        ) from error


def model_config(config: RunConfig) -> CAVConfig:
    m = config.model
    given = {"image_size": m.image_size, "spec_frames": m.spec_frames, "frames": m.frames}
    return preset(m.preset, **{name: value for name, value in given.items() if value is not None})


def machine(train: TrainConfig) -> Runtime:
    return runtime(train.device, train.precision, train.compile, train.activations)

"""The configuration of a run: everything that its result depends on."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stella.config import build
from stella.data.config import DataConfig
from stella.data.lengths import ENOUGH
from stella.data.scenes import ScenesConfig
from stella.data.stream import StreamConfig
from stella.errors import ConfigError, StellaError
from stella.media.inputs import PER_SECOND, Inputs, time_steps
from stella.methods.base import MemoryConfig, ObjectiveConfig
from stella.model import weights
from stella.model.cav import CAVConfig, preset
from stella.runs.folder import RunFolder, is_downstream
from stella.train.config import TrainConfig
from stella.train.device import Runtime, runtime

# Keys that may change on resume, because no result depends on them (compiling changes rounding only).
FREE = (
    *("stream.workers", "stream.prefetch", "stream.time_limit", "stream.worker_gb", "data.cache"),
    *("train.checkpoint_minutes", "train.keep_checkpoints", "train.tensorboard", "train.patience_minutes"),
    *("train.keep_task_weights", "train.graph", "train.compile", "train.activations", "train.shard"),
)


@dataclass(frozen=True)
class ModelConfig:
    """A preset, its initial weights, and sizes where they differ from the data's."""

    preset: str | None = None  # tiny, small, base or large; none: that of the weights, or tiny
    weights: str | None = None  # initial weights: a shipped name, a finished run, or a file that `stella weights` reads
    grow: bool = False  # make the weights' model into this larger one, or one for larger clips, as `stella grow` does
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


def with_weights(config: RunConfig) -> tuple[RunConfig, Inputs]:
    """The configuration with the preset and the data's sizes that follow from its weights, and the run's inputs."""
    m = config.model
    inputs = weights.read_inputs(m.weights) if m.weights and _open_sizes(config) else None
    follows = config.data.following(inputs)
    from_data = follows.inputs()
    if inputs and from_data.size == inputs.size:  # frames are made as they were for the weights: so are the crops
        from_data = replace(from_data, pixels=inputs.pixels)
    if inputs and from_data.duration == inputs.duration:
        from_data = replace(from_data, spec_frames=inputs.spec_frames)
    name = m.preset or (weights.preset_of(m.weights) if m.weights else None) or "tiny"
    return replace(config, data=follows, model=replace(m, preset=name)), from_data


def _open_sizes(config: RunConfig) -> bool:
    """Whether some size is still to be found. A settled run is resumed without its initial weights."""
    return None in (config.model.image_size, config.model.preset) or config.data.following(None) != config.data


def settle(config: RunConfig) -> RunConfig:
    """The configuration with derived values filled in: sizes, absolute paths, the stream's seed and its workers."""
    own_file = ".py:" in config.method
    method = str(Path(config.method).absolute()) if own_file else config.method
    config, data = with_weights(replace(config, data=config.data.absolute(), method=method))
    model = config.model
    if model.frames not in (None, data.frames):
        raise ConfigError(f"model.frames={model.frames} but the clips have {data.frames}; leave model.frames out")
    sizes: dict[str, Any] = {"image_size": data.pixels, "spec_frames": data.spec_frames, "frames": data.frames}
    unset = {name: size for name, size in sizes.items() if getattr(model, name) is None}
    if model.weights and model.weights not in weights.shipped() and Path(model.weights).exists():
        unset["weights"] = str(Path(model.weights).absolute())
    sized = replace(config, model=replace(model, **unset))
    if (shown := inputs_of(sized).seconds) > max(data.duration / ENOUGH, time_steps(data.duration) / PER_SECOND):
        raise ConfigError(
            f"the model's spectrograms show {shown:g} s and the clips have {data.duration:g} s, so that the rest would "
            f"be padding; leave out model.spec_frames, or set data.duration={shown:g}"
        )
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
    """The configuration of a run, refused if another version wrote it, or if it is no pre-training."""
    if is_downstream(folder):
        raise StellaError(
            f"{folder.root} is a run of stella transfer; give the run that it began with, "
            f"or continue this one with stella transfer --resume {folder.root}"
        )
    try:
        return build(RunConfig, folder.read_config())
    except ConfigError as error:
        raise StellaError(
            f"{folder.root} was written by another version of stella ({error}); start a new run, or use its weights, "
            f"{folder.weights.name}, with a recipe"
        ) from error


def inputs_of(config: RunConfig) -> Inputs:
    """How a settled run's clips are made, for its weight file."""
    c = model_config(config)
    return replace(config.data.inputs(), pixels=c.image_size, spec_frames=c.spec_frames, mels=c.mel_bins)


def model_config(config: RunConfig) -> CAVConfig:
    m = config.model
    given = {"image_size": m.image_size, "spec_frames": m.spec_frames, "frames": m.frames}
    return preset(m.preset or "tiny", **{name: value for name, value in given.items() if value is not None})


def machine(train: TrainConfig) -> Runtime:
    return runtime(train.device, train.precision, train.compile, train.activations)

"""The configuration of a downstream run. The defaults of each task are the paper's (Tab. 6)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stella.config import build, check_values, merged, nearest, overridden, to_tree
from stella.data.config import DataConfig, is_embedded
from stella.data.downstream import DOWNSTREAM, Downstream
from stella.data.scenes import ScenesConfig
from stella.data.stream import StreamConfig
from stella.data.tasks import SizedConfig
from stella.errors import ConfigError
from stella.media.inputs import PATCH, PER_SECOND, Inputs
from stella.model.weights import Loaded, from_anywhere, inputs_for
from stella.rng import seed_for
from stella.runs.config import EvaluateConfig
from stella.train.config import TrainConfig
from stella.transfer.base import Options


@dataclass(frozen=True)
class WeightsConfig:
    """Where the backbone comes from."""

    source: str = ""  # a run, a weight file, a shipped name, or random:PRESET
    after: int | None = None  # the weights of a run after this task, counted from 1; none: the last
    slow: bool = False  # the slow weights of a run
    digest: str = ""  # of the file, so that a resumed run meets the same weights


@dataclass(frozen=True)
class TransferConfig:
    task: Downstream = "classify"  # the first argument of the command
    seed: int = 0  # of the head, the order, augmentation and masks
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    head: Options = field(default_factory=Options)
    warmup_epochs: int = 0  # in which the learning rate rises; segment has 3, events 2
    features: str | None = None  # folder of a frozen backbone's features, shared by runs; none: the run's own
    views: int = 1  # augmented versions of a clip whose features are kept, for epochs in turn; 0: a new one every epoch
    data: DataConfig = field(default_factory=ScenesConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        check_values(
            self,
            "",
            warmup_epochs=(self.warmup_epochs >= 0, "be at least 0"),
            views=(self.views >= 0, "be at least 0"),
        )
        if self.warmup_epochs > self.stream.epochs:
            epochs = self.stream.epochs
            raise ConfigError(
                f"warmup_epochs={self.warmup_epochs} is more than stream.epochs={epochs}; "
                f"set warmup_epochs={epochs} or less"
            )
        if self.views > 1 and not self.stream.augment:
            raise ConfigError(f"views={self.views} are all the same without augmentation; set stream.augment=true")
        if self.task == "retrieval" and self.head.frozen:
            raise ConfigError("retrieval trains the backbone: leave out --frozen (stella evaluate is without training)")
        if self.task == "matching" and not self.head.frozen:
            raise ConfigError("matching trains a module on a frozen backbone: leave out --trained")


def _paper(
    epochs: int, batch: int, lr: float, decay: float, warmup: int = 0, frozen: bool = True, augment: bool | str = True
) -> dict[str, Any]:
    return {
        "warmup_epochs": warmup,
        "views": 0,
        "head": {"frozen": frozen},
        "stream": {"epochs": epochs, "batch_size": batch, "augment": augment},
        "train": {
            "optimizer": "adamw",
            "schedule": "cosine",
            "lr": lr,
            "weight_decay": decay,
            "graph": False,
            "compile": "off",
        },
    }


PAPER: dict[str, dict[str, Any]] = {
    "retrieval": _paper(15, 48, 1e-4, 5e-7, frozen=False),
    "classify": _paper(10, 48, 1e-4, 5e-7),
    "segment": _paper(20, 48, 5e-4, 5e-6, warmup=3, augment="crop"),
    "events": merged(_paper(15, 12, 1e-3, 5e-6, warmup=2, augment="crop"), {"head": {"probe": True}}),
    "localise": _paper(1, 48, 1e-4, 0.0, augment=False),  # trains nothing
    "matching": _paper(15, 48, 1e-4, 5e-7, augment=False),
}
OWN = ("folder", "shards", "packed")  # a user's own clips, for which no paper sets a protocol
KEPT: dict[str, Any] = {"views": 1, "stream": {"augment": False}}  # a frozen backbone's features are computed once
MS3: dict[str, Any] = {"head": {"align": 0.5}}  # AVSBench's own weight of the KL term where several sources sound
# What differs on embedded data: few clips, and rates for models of a million parameters (as in base-tiny's recipe).
_EMBEDDED: dict[str, Any] = KEPT | {"data": {"clips": 200, "eval_clips": 60}}
EMBEDDED: dict[str, dict[str, Any]] = {
    "retrieval": {"data": {"clips": 1600, "eval_clips": 240}, "train": {"lr": 5e-4}},
    "classify": {"stream": {"epochs": 40}, "train": {"lr": 1e-3}},
    "segment": {
        "head": {"mask_frames": 1},
        "data": {"clips": 80, "eval_clips": 20},
        "stream": {"epochs": 12, "batch_size": 16},
        "train": {"lr": 1e-3},
    },
    "events": {"data": {"clips": 60, "eval_clips": 20}, "stream": {"batch_size": 48}, "train": {"lr": 5e-3}},
    "localise": {"data": {"clips": 60, "eval_clips": 60}},
    "matching": {"train": {"lr": 1e-3}},
}


def transfer_config(task: str, data: Mapping[str, Any] | None = None, values: Sequence[str] = ()) -> TransferConfig:
    """The configuration of a task on `data` (None: scenes), with `key.sub=value` overrides."""
    if task not in DOWNSTREAM:
        raise ConfigError(f"unknown task {task!r}{nearest(task, DOWNSTREAM)} (known: {', '.join(DOWNSTREAM)})")
    given = overridden({"data": dict(data or {})}, values)
    tree = merged({"task": task}, PAPER[task])
    if is_embedded(given["data"].get("source")):
        tree = merged(merged(tree, _EMBEDDED), EMBEDDED[task])
    if given["data"].get("source") in OWN and merged(tree, given)["head"]["frozen"]:
        tree = merged(tree, KEPT)
    if task == "segment" and given["data"].get("subset") == "ms3":
        tree = merged(tree, MS3)
    return build(TransferConfig, merged(tree, given))


def settle(config: TransferConfig, loaded: Loaded, digest: str) -> TransferConfig:
    """The configuration with what follows from the model: sizes of the data and the stream, and the file's digest."""
    model = loaded.model.config
    data = config.data.absolute().alike(loaded.inputs or inputs_for(model))
    frames = data.inputs().frames
    if frames != model.frames:
        raise ConfigError(f"the clips have {frames} frames and the model takes {model.frames}; set data.frames")
    most = model.spec_frames / PER_SECOND
    if isinstance(data, SizedConfig) and data.inputs().duration > most + PATCH / PER_SECOND:
        seconds = data.inputs().duration
        raise ConfigError(f"the clips last {seconds:g} s and the model takes {most:g}; leave data.duration out")
    stream = replace(
        config.stream,
        size=model.image_size,
        spec_frames=model.spec_frames,
        mels=model.mel_bins,
        seed=config.seed,
        workers=max(config.data.least_workers, config.stream.workers),
    )
    weights = replace(config.weights, source=from_anywhere(config.weights.source), digest=digest)
    return replace(config, data=data, stream=stream, weights=weights)


def inputs_of(config: TransferConfig) -> Inputs:
    """How a settled run's clips are made, for its weight file."""
    s = config.stream
    return replace(config.data.inputs(), pixels=s.size, spec_frames=s.spec_frames, mels=s.mels)


def features_key(config: TransferConfig, part: str, clips: str) -> str:
    """A name for what the features of a part depend on; `clips` is the fingerprint of its clips."""
    s, own = config.stream, config.views if part == "train" else 1
    drawn = config.seed if s.augment or not config.weights.digest else None  # crops, or random weights
    facts = [
        config.task,
        to_tree(config.weights),
        to_tree(config.data),
        s.size,
        s.spec_frames,
        s.augment,
        own,
        drawn,
        clips,
    ]
    return f"{config.task}-{part}-{seed_for(json.dumps(facts)):016x}"


def run_name(config: TransferConfig) -> str:
    """The default folder's name: task and model; of a run of a comparison its method too."""
    source = Path(config.weights.source)
    model = f"{source.parent.name}-{source.name}" if source.name.startswith("seed-") else source.stem
    return f"{config.task}-{model.replace(':', '-') or 'model'}"

"""How a method is trained."""

from dataclasses import dataclass
from typing import Literal

from stella.config import check_values
from stella.errors import ConfigError
from stella.fast.activations import Activations
from stella.train.device import Compile, Precision


@dataclass(frozen=True)
class TrainConfig:
    """The defaults are the paper's (Tab. 6)."""

    optimizer: Literal["adam", "adamw"] = "adam"  # adamw: weight decay apart from the gradient
    lr: float = 1e-4  # learning rate
    beta1: float = 0.95  # Adam's decay of the mean gradient
    beta2: float = 0.999  # Adam's decay of the mean squared gradient
    weight_decay: float = 5e-7  # L2 penalty, added to the gradient (adamw: taken from the weights)
    warmup_steps: int = 0  # steps of linear warm-up
    schedule: Literal["linear", "cosine"] = "linear"  # after the warm-up; cosine: towards 0, without decay
    decay: float = 0.0  # share of all steps, at the end, over which the learning rate falls to 0; not for streams
    accumulate: int = 1  # batches per step, equally weighted
    ema: float | None = None  # decay of slow weights, evaluated beside the working weights; none: no slow weights
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    precision: Precision = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    compile: Compile = "auto"  # compile parts of a step; auto: on a GPU
    activations: Activations = "products"  # what compiled parts keep for the backward pass
    shard: bool = False  # several processes: divide weights, gradients and optimiser among them (FSDP)
    graph: bool = True  # replay whole steps as CUDA graphs, if the memory is on the GPU too
    checkpoint_minutes: float = 10.0  # minutes between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints kept
    keep_task_weights: bool = False  # write the weights after every task, in half precision
    log_every: int = 10  # steps between lines of metrics.jsonl
    patience_minutes: float = 10.0  # several processes: how long one waits for the others before the run ends
    tensorboard: bool = False  # write TensorBoard curves into the run's folder

    def __post_init__(self) -> None:
        least = {"warmup_steps": 0, "accumulate": 1, "checkpoint_minutes": 0, "keep_checkpoints": 1, "log_every": 1}
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise ConfigError(f"train.{name} must be at least {value}, not {getattr(self, name)}")
        if not 0 < self.patience_minutes < float("inf"):
            raise ConfigError(f"train.patience_minutes={self.patience_minutes} must be above 0 and finite")
        for name in ("decay", "ema"):
            if (share := getattr(self, name)) is not None and not 0 <= share <= 1:
                raise ConfigError(f"train.{name}={share} must lie in 0…1")
        check_values(
            self,
            "train.",
            lr=(0 < self.lr < float("inf"), "be above 0 and finite"),
            beta1=(0 <= self.beta1 < 1, "be at least 0 and below 1"),
            beta2=(0 <= self.beta2 < 1, "be at least 0 and below 1"),
            weight_decay=(0 <= self.weight_decay < float("inf"), "be at least 0 and finite"),
        )

"""How a method is trained."""

from dataclasses import dataclass

from stella.errors import ConfigError
from stella.fast.compile import Activations
from stella.train.device import Compile, Precision


@dataclass(frozen=True)
class TrainConfig:
    """The defaults are the paper's (Tab. training_hyp)."""

    lr: float = 1e-4
    beta1: float = 0.95
    beta2: float = 0.999
    weight_decay: float = 5e-7
    warmup_steps: int = 0
    decay: float = 0.0  # the last share of all steps over which the learning rate falls to nothing; not for streams
    accumulate: int = 1  # batches a step, each of the same weight; the last step of a task takes those that are left
    device: str = "auto"
    precision: Precision = "auto"
    compile: Compile = "auto"  # a step's parts, on a GPU: a minute or two at the first start, and faster steps
    activations: Activations = "products"  # what compiled parts keep for the backward pass; the rest is redone there
    graph: bool = True  # on a GPU with the memory on it, whole steps as CUDA graphs
    checkpoint_minutes: float = 10.0
    keep_checkpoints: int = 2
    log_every: int = 10  # steps
    tensorboard: bool = False

    def __post_init__(self) -> None:
        least = {"warmup_steps": 0, "accumulate": 1, "checkpoint_minutes": 0, "keep_checkpoints": 1, "log_every": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"train.{name} must be at least {value}, not {getattr(self, name)}")
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"train.decay={self.decay} is a share of all steps; it must lie in 0…1")
        if not (self.lr > 0 and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.weight_decay >= 0):
            raise ConfigError(
                f"train.lr={self.lr} must be above 0, beta1={self.beta1} and beta2={self.beta2} in 0…1 and "
                f"weight_decay={self.weight_decay} not below 0"
            )

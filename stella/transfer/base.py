"""What a downstream task is: which columns a backbone makes of clips, what a head makes of them, and what is measured.

A task is a `Method`, so that it is trained by the trainer of all methods. With a frozen backbone the columns of all
clips are computed once (`features.py`) and a step is the head's alone; else a step goes through the backbone.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stella.clip import Batch, Source
from stella.data.downstream import Parts
from stella.methods.base import Losses, MemoryConfig, Method, NoConfig, ObjectiveConfig
from stella.model.cav import CAV
from stella.transfer.features import Table

Columns = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """What a task's head and training depend on besides the model and the data."""

    frozen: bool = True  # keep the backbone as it is; false: train it too (--trained)
    probe: bool = False  # one linear layer instead of the task's head (--probe)
    head_rate: float = 1.0  # the head's learning rate, as a multiple of train.lr
    channels: int | None = None  # of the mask decoder; none: a third of the model's
    align: float = 0.0  # weight of the alignment of masked features with the sound; 0.5 with data.subset=ms3
    mask_frames: int = 0  # frames of a clip to train masks on; 0: all whose mask is known
    mean_of: int = 0  # mIoU and F as means over batches of so many pictures, as AVSBench's code has; 0: over all


class Downstream(Method):
    """A head on a backbone. `table` holds the training clips' columns if the backbone is frozen."""

    figure: ClassVar[str]  # the one that chooses the best model
    cached: ClassVar[bool] = True  # whether a frozen backbone's columns can be kept
    summary = citation = cost = ""

    head: nn.Module
    table: Table | None = None

    def __init__(self, model: CAV, parts: Parts, options: Options, seed: int) -> None:
        nn.Module.__init__(self)
        self.data, self.options = parts, options
        self.source = self.clips(parts.train)
        super().__init__(model, NoConfig(), ObjectiveConfig(), MemoryConfig(), seed)
        if options.frozen:
            self.model.requires_grad_(False)

    @property
    def rates(self) -> tuple[float, ...]:  # type: ignore[override]
        return (self.options.head_rate,) if self.options.frozen else (1.0, self.options.head_rate)

    def groups(self) -> list[list[nn.Parameter]]:
        """The backbone, unless it is frozen, and the head."""
        head = [p for p in self.head.parameters() if p.requires_grad]
        return [head] if self.options.frozen else [list(self.model.parameters()), head]

    def clips(self, source: Source, test: bool = False) -> Source:
        """The clips of a part as this task reads them."""
        return source

    @abstractmethod
    def columns_of(self, batch: Batch, source: Source) -> Columns:
        """What the head takes of a batch of these clips, and what it should say: rows of tensors."""

    @abstractmethod
    def objective_of(self, columns: Columns) -> dict[str, Tensor]:
        """The parts of the loss."""

    @abstractmethod
    def judged(self, columns: Columns) -> Columns:
        """What the figures need of each row, without gradient."""

    @abstractmethod
    def figures(self, judged: Columns) -> dict[str, float]:
        """The figures of all rows of a part, in percent."""

    def shown(self, columns: Columns) -> Columns:
        """What is predicted of each row, for pictures; nothing by default."""
        return {}

    def loss(self, batch: Batch) -> Losses:
        columns = self.columns_of(batch, self.source) if self.table is None else self.table.rows(batch.ids)
        return Losses(self.objective_of(columns))

    @torch.no_grad()
    def measure(self, rows: Iterable[Columns]) -> dict[str, float]:
        """The figures over rows given in batches."""
        judged = [self.judged(columns) for columns in rows]
        return self.figures({name: torch.cat([each[name] for each in judged]) for name in judged[0]})

    # A frozen backbone is in no checkpoint: its weights are those of the configuration.

    def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:  # type: ignore[override]
        state: dict[str, Any] = super().state_dict(*args, **more)
        return {k: v for k, v in state.items() if not (self.options.frozen and k.startswith("model."))}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict and not self.options.frozen, assign)


def joint_means(model: CAV, batch: Batch) -> Tensor:
    """The means of the joint audio tokens and of the joint video tokens after the joint norm, side by side: [B, 2D]."""
    x_a, x_v = model.encode_a(model.patches_a(batch.audio)), model.encode_v(model.patches_v(batch.video))
    o_a, o_v = model.fuse_joint(x_a, x_v)
    return torch.cat([model.norm(o_a).mean(1), model.norm(o_v).mean(1)], 1)

"""CLS-ER: ER with a penalty on the distance of drawn clips' outputs to the better of two slow copies of the model."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stella.clip import Batch
from stella.config import check_values
from stella.losses import pair_nll
from stella.methods.base import Losses, ReplayConfig, clip_rows, penalty
from stella.methods.er import Replay
from stella.model.cav import CAV, Patches, Split
from stella.model.slow import SlowWeights, check_shares


@dataclass(frozen=True)
class CLSERConfig(ReplayConfig):
    """The paper's values, the same on Continual-VS and Continual-AS."""

    weight: float = 0.1  # λ, weight of the distance to the teacher
    alpha_stable: float = 0.999  # α_S, largest decay of the stable copy
    alpha_plastic: float = 0.999  # α_P, largest decay of the plastic copy
    rate_stable: float = 0.6  # r_S, probability of an update after a step
    rate_plastic: float = 0.8  # r_P
    evaluate: Literal["working", "stable"] = "working"  # the original publication evaluates the stable copy

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, "args.", weight=(self.weight >= 0, "not be negative"))
        check_shares("args.", alpha_stable=self.alpha_stable, alpha_plastic=self.alpha_plastic)
        check_shares("args.", rate_stable=self.rate_stable, rate_plastic=self.rate_plastic)


class CLSER(Replay):
    Config = CLSERConfig
    title = "CLS-ER"
    summary = "ER with a penalty on memory's distance to the better of two slow copies of the model"
    citation = (
        "Arani et al., Learning Fast, Learning Slow: A General Continual Learning Method based on Complementary "
        "Learning System, ICLR 2022"
    )
    cost = "twice the clips a step, + two passes without gradient over memory's clips, + two copies of the model"
    random = ("ema",)

    config: CLSERConfig

    def setup(self) -> None:
        c, draws = self.config, self.generators["ema"]
        self.stable = SlowWeights(self.model, c.alpha_stable, c.rate_stable, draws)
        self.plastic = SlowWeights(self.model, c.alpha_plastic, c.rate_plastic, draws)

    def loss(self, batch: Batch) -> Losses:
        a, v, drawn = self.with_memory(batch)
        split_a, split_v = self.splits(a, v)
        out = self.model.pretrain(a, v, split_a, split_v)
        distance = out.z_a.new_zeros(())
        if drawn is not None:
            past = slice(len(batch), None)
            distance = penalty(out, *self.teach(a[past], v[past], split_a[past], split_v[past]))
        return Losses(self.parts(out) | {"consistency": self.config.weight * distance}, clip_rows(batch))

    @torch.no_grad()
    def teach(self, a: Patches, v: Patches, split_a: Split, split_v: Split) -> tuple[Tensor, Tensor]:
        """Targets z_a, z_v of the drawn clips, each from the copy that gives the true pair the higher probability:
        z_v by the audio-to-video softmax, z_a by the video-to-audio one."""
        stable, plastic = (each.model.pretrain(a, v, split_a, split_v) for each in (self.stable, self.plastic))
        stable_v, stable_a = pair_nll(stable.z_a, stable.z_v, self.objective.tau)  # negatives: the drawn clips
        plastic_v, plastic_a = pair_nll(plastic.z_a, plastic.z_v, self.objective.tau)
        z_a = torch.where((stable_a < plastic_a)[:, None], stable.z_a, plastic.z_a)
        z_v = torch.where((stable_v < plastic_v)[:, None], stable.z_v, plastic.z_v)
        return z_a, z_v

    @property
    def eval_model(self) -> CAV:
        return self.stable.model if self.config.evaluate == "stable" else self.model

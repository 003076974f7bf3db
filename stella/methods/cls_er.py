"""CLS-ER: ER, and two slow copies of the model say what memory's clips should look like.

`generators` beside "mask": "ema" decides after each step whether the stable copy follows, then the plastic one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stella.clip import Batch
from stella.errors import ConfigError
from stella.methods.base import Losses, MemoryConfig, ObjectiveConfig, clip_rows
from stella.methods.ema import Average, check_shares, clip_loss, consistency, rows
from stella.methods.er import ER
from stella.model.cav import CAV, Patches, Split
from stella.rng import generator


@dataclass(frozen=True)
class CLSERConfig:
    """The paper's values, the same on Continual-VS and Continual-AS."""

    weight: float = 0.1  # λ, of the distance to the teacher
    alpha_stable: float = 0.999  # α_S, the most a copy keeps of itself
    alpha_plastic: float = 0.999  # α_P
    rate_stable: float = 0.6  # r_S, how often a copy follows
    rate_plastic: float = 0.8  # r_P

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise ConfigError(f"weight={self.weight} must be 0 or more")
        check_shares(**{name: value for name, value in vars(self).items() if name != "weight"})


class CLSER(ER):
    Config = CLSERConfig
    title = "CLS-ER"
    summary = "ER with a penalty on memory's distance to the better of two slow copies of the model"
    citation = (
        "Arani et al., Learning Fast, Learning Slow: A General Continual Learning Method based on Complementary "
        "Learning System, ICLR 2022"
    )
    cost = "twice the clips a step, + two passes without gradient over memory's clips, + two copies of the model"

    config: CLSERConfig

    def __init__(
        self, model: CAV, config: CLSERConfig, objective: ObjectiveConfig, memory: MemoryConfig, seed: int
    ) -> None:
        super().__init__(model, config, objective, memory, seed)
        self.stable = Average(model, config.alpha_stable, config.rate_stable)
        self.plastic = Average(model, config.alpha_plastic, config.rate_plastic)
        self.generators["ema"] = generator(seed, "ema", device=self.device)

    def loss(self, batch: Batch) -> Losses:
        a, v, drawn = self.with_memory(batch)
        split_a, split_v = self.splits(a, v)
        out = self.model.pretrain(a, v, split_a, split_v)
        distance = out.z_a.new_zeros(())
        if drawn is not None:
            past = slice(len(batch), None)
            taught = self.teach(rows(a, past), rows(v, past), rows(split_a, past), rows(split_v, past))
            distance = consistency(out, *taught)
        return Losses(self.parts(out) | {"consistency": self.config.weight * distance}, clip_rows(batch))

    @torch.no_grad()
    def teach(self, a: Patches, v: Patches, split_a: Split, split_v: Split) -> tuple[Tensor, Tensor]:
        """z_a and z_v of each clip from the copy with the lower loss on it; the clips are one another's negatives."""
        stable, plastic = (each.model.pretrain(a, v, split_a, split_v) for each in (self.stable, self.plastic))
        better = clip_loss(self.clip_parts(stable)) < clip_loss(self.clip_parts(plastic))
        better = better[:, None]
        return torch.where(better, stable.z_a, plastic.z_a), torch.where(better, stable.z_v, plastic.z_v)

    def follow(self, taken: Tensor) -> None:
        for each in (self.stable, self.plastic):
            each.follow(self.model, self.generators["ema"], taken)

    @property
    def eval_model(self) -> CAV:
        return self.stable.model

"""LUMP: trains on mixtures of current and memory's clips instead of on both.

`generators` beside "mask": "mix" gives the weight of each batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stella.clip import Batch
from stella.errors import ConfigError
from stella.methods.base import Losses, MemoryConfig, ObjectiveConfig, clip_rows
from stella.methods.er import ER
from stella.model.cav import CAV
from stella.rng import generator
from stella.selection import pair_past


@dataclass(frozen=True)
class LUMPConfig:
    concentration: float = 0.1  # λ of Beta(λ, λ) (0.05 on Continual-AS)

    def __post_init__(self) -> None:
        if not 0 < self.concentration < float("inf"):
            raise ConfigError(f"concentration={self.concentration} must be above 0, and finite")


class LUMP(ER):
    Config = LUMPConfig
    title = "LUMP"
    summary = "mixes each clip with one from memory, pixels and spectrogram by the same weight"
    citation = "Madaan et al., Representational Continuity for Unsupervised Continual Learning, ICLR 2022"
    cost = "as Finetune"

    config: LUMPConfig

    def __init__(
        self, model: CAV, config: LUMPConfig, objective: ObjectiveConfig, memory: MemoryConfig, seed: int
    ) -> None:
        super().__init__(model, config, objective, memory, seed)
        self.generators["mix"] = generator(seed, "mix", device=self.device)

    def loss(self, batch: Batch) -> Losses:
        """L(mix·x + (1 − mix)·m), and L(x) while the memory is empty. Where m is shorter than x it starts again."""
        audio, video = batch.audio, self.model.normalise(batch.video)
        drawn = self.draw(batch)
        if drawn is not None:
            mix = beta(self.config.concentration, self.generators["mix"])
            audio = mix * audio + (1 - mix) * pair_past(drawn["audio"], len(batch)).to(audio.dtype)
            video = mix * video + (1 - mix) * self.model.normalise(pair_past(drawn["video"], len(batch)))
        out = self.pretrain(self.model.patches_a(audio), self.model.patches_v(video))
        return Losses(self.parts(out), clip_rows(batch))


def beta(concentration: float, generator: torch.Generator) -> Tensor:
    """A draw from Beta(λ, λ), a scalar: the share of the first of two Gamma(λ) variables in their sum.

    These are Gamma(λ + 1) · U^(1/λ), which is 0 in floating point where λ is small: hence in logarithms.
    """
    shape = torch.full((2,), concentration + 1, dtype=torch.float64, device=generator.device)
    uniform = torch.rand(2, dtype=torch.float64, generator=generator, device=generator.device)
    log_gamma = torch._standard_gamma(shape, generator).log() + torch.log1p(-uniform) / concentration
    return log_gamma.softmax(0)[0]

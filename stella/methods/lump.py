"""LUMP: trains on mixtures of current clips and clips from memory, instead of on both."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stella.clip import Batch
from stella.config import check_values
from stella.methods.base import Losses, clip_rows
from stella.methods.er import Replay
from stella.selection import pair_past


@dataclass(frozen=True)
class LUMPConfig:
    concentration: float = 0.1  # λ of Beta(λ, λ), from which the mixing weight is drawn (0.05 on Continual-AS)

    def __post_init__(self) -> None:
        fits = 0 < self.concentration < float("inf")
        check_values(self, "args.", concentration=(fits, "be above 0 and finite"))


class LUMP(Replay):
    Config = LUMPConfig
    title = "LUMP"
    summary = "mixes each clip with one from memory, pixels and spectrogram by the same weight"
    citation = "Madaan et al., Representational Continuity for Unsupervised Continual Learning, ICLR 2022"
    cost = "as Finetune"
    random = ("mix",)

    config: LUMPConfig

    def loss(self, batch: Batch) -> Losses:
        """L(mix·x + (1 − mix)·m), or L(x) while the memory is empty. If m is shorter than x, its clips repeat."""
        audio, video = batch.audio, self.model.normalise(batch.video)
        drawn = self.draw(batch)
        if drawn is not None:
            mix = beta(self.config.concentration, self.generators["mix"])
            audio = mix * audio + (1 - mix) * pair_past(drawn["audio"], len(batch)).to(audio.dtype)
            video = mix * video + (1 - mix) * self.model.normalise(pair_past(drawn["video"], len(batch)))
        out = self.pretrain(self.model.patches_a(audio), self.model.patches_v(video))
        return Losses(self.parts(out), clip_rows(batch))


def beta(concentration: float, generator: torch.Generator) -> Tensor:
    """A scalar from Beta(λ, λ): the share of the first of two Gamma(λ) variables in their sum.

    Gamma(λ) = Gamma(λ + 1) · U^(1/λ) underflows for small λ, so the computation is in logarithms.
    """
    shape = torch.full((2,), concentration + 1, dtype=torch.float64, device=generator.device)
    uniform = torch.rand(2, dtype=torch.float64, generator=generator, device=generator.device)
    log_gamma = torch._standard_gamma(shape, generator).log() + torch.log1p(-uniform) / concentration
    return log_gamma.softmax(0)[0]

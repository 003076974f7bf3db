"""The matching module alone, on a frozen backbone: the second stage of initial pre-training (App. D)."""

from typing import ClassVar

from stella.clip import Batch
from stella.methods.base import Losses
from stella.methods.initial import Initial
from stella.model.avm import draw_pairs, score


class Matching(Initial):
    """Trains the module by Eq. 11. The backbone, and so every embedding, stays as it is."""

    title: ClassVar[str] = "Matching"
    summary: ClassVar[str] = "trains the matching module alone on a frozen backbone, before the stream starts"
    citation: ClassVar[str] = "STELLA (Lee et al., ICML 2024), App. D"
    cost: ClassVar[str] = "one pass without gradient over all patches, and the matching module"

    def setup(self) -> None:
        super().setup()
        self.model.requires_grad_(False)

    def loss(self, batch: Batch) -> Losses:
        scored = score(self.model, self.avm, self.model.patches_a(batch.audio), self.model.patches_v(batch.video))
        return Losses({"avm": self.avm.loss(self.model, scored, draw_pairs(len(batch), self.generators["pairs"]))})

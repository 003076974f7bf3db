"""Finetune: L on the current batch alone."""

from stella.clip import Batch
from stella.methods.base import Losses, Method


class Finetune(Method):
    title = "Finetune"
    summary = "learns from the current batch alone: the lower bound"
    citation = "STELLA (Lee et al., ICML 2024), Sec. 5"
    cost = "one pass forward and back"

    def loss(self, batch: Batch) -> Losses:
        return Losses(self.parts(self.pretrain(self.model.patches_a(batch.audio), self.model.patches_v(batch.video))))

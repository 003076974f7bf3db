"""A matching module for a finished backbone that has none: trained on it, frozen, as in App. D."""

import torch
from torch import Tensor

from stella.clip import Batch, Source
from stella.methods.base import Losses
from stella.model.avm import AVM, Pairs, draw_pairs, match, score
from stella.transfer.base import Columns, Downstream


class MatchingModule(Downstream):
    """Eq. 11 on matched and mismatched pairs. The figure is the accuracy on both, half of each."""

    title = "Matching module"
    figure = "accuracy"
    cached = False
    random = ("pairs",)
    head: AVM

    def setup(self) -> None:
        c = self.model.config
        self.head = AVM(c.dim, c.heads, eps=c.eps).to(self.device)

    def columns_of(self, batch: Batch, source: Source) -> Columns:
        scored = score(self.model, self.head, self.model.patches_a(batch.audio), self.model.patches_v(batch.video))
        every = torch.arange(len(batch), device=batch.ids.device)
        wrong = every if len(batch) > 1 else every[:0]  # each clip with the video of the next
        found = match(self.model, self.head, scored, Pairs(every, wrong, wrong.roll(-1)))
        return {"logits": found.logits, "labels": found.labels}

    def objective_of(self, columns: Columns) -> dict[str, Tensor]:
        raise NotImplementedError("the pairs of training are drawn")

    def loss(self, batch: Batch) -> Losses:
        scored = score(self.model, self.head, self.model.patches_a(batch.audio), self.model.patches_v(batch.video))
        return Losses({"avm": self.head.loss(self.model, scored, draw_pairs(len(batch), self.generators["pairs"]))})

    def judged(self, columns: Columns) -> Columns:
        return {"right": (columns["logits"] > 0) == (columns["labels"] > 0)}

    def figures(self, judged: Columns) -> dict[str, float]:
        return {"accuracy": 100 * judged["right"].double().mean().item()}

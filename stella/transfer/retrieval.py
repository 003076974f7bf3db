"""Retrieval on another corpus: pre-train further with L on its clips, then find each test clip's other half."""

from torch import Tensor, nn

from stella.clip import Batch, Source
from stella.evaluate.retrieval import DIRECTIONS, KS, Embeddings, task_recall
from stella.methods.base import Losses
from stella.transfer.base import Columns, Downstream


class Retrieval(Downstream):
    """L on the new clips, all weights trained. The figures are R@1, R@5 and R@10 in both directions."""

    title = "Retrieval"
    figure = "recall"
    cached = False

    def setup(self) -> None:
        self.head = nn.Identity()

    def columns_of(self, batch: Batch, source: Source) -> Columns:
        return {"a": self.model.represent_a(batch.audio), "v": self.model.represent_v(batch.video), "id": batch.ids}

    def objective_of(self, columns: Columns) -> dict[str, Tensor]:
        raise NotImplementedError("the loss of retrieval is that of pre-training")

    def loss(self, batch: Batch) -> Losses:
        return Losses(self.parts(self.pretrain(self.model.patches_a(batch.audio), self.model.patches_v(batch.video))))

    def judged(self, columns: Columns) -> Columns:
        return {"a": nn.functional.normalize(columns["a"].float()), "v": nn.functional.normalize(columns["v"].float())}

    def figures(self, judged: Columns) -> dict[str, float]:
        table = task_recall([Embeddings(judged["a"], judged["v"], judged["a"].new_zeros(len(judged["a"])).long())])
        by_k = {f"{way}_{k}": float(table[way][str(k)][0]) for way in DIRECTIONS for k in KS}
        return {"recall": sum(by_k.values()) / len(by_k), **by_k}

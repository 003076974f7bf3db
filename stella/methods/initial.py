"""Initial pre-training: what continual pre-training starts from (paper, App. B and D)."""

from dataclasses import dataclass

from stella.clip import Batch
from stella.methods.base import Losses, MemoryConfig, Method, ObjectiveConfig
from stella.model.avm import AVM, draw_pairs, matching_loss, score
from stella.model.cav import CAV
from stella.rng import generator


@dataclass(frozen=True)
class InitialConfig:
    avm_heads: int | None = None  # none: as many as the model has


class Initial(Method):
    """Finetune's loss, and beside it the matching module's, so that both are there when the first task begins."""

    Config = InitialConfig
    title = "Initial"
    summary = "pre-trains backbone and matching module on one set of clips, before the stream begins"
    citation = "STELLA (Lee et al., ICML 2024), App. B and D"
    cost = "+ one pass without gradient over all patches, + the matching module"

    config: InitialConfig
    avm: AVM

    def __init__(
        self, model: CAV, config: InitialConfig, objective: ObjectiveConfig, memory: MemoryConfig, seed: int
    ) -> None:
        super().__init__(model, config, objective, memory, seed)
        self.avm = AVM(model.config.dim, config.avm_heads or model.config.heads, model.config.eps).to(self.device)
        self.generators["pairs"] = generator(seed, "pairs", device=self.device)

    def loss(self, batch: Batch) -> Losses:
        a, v = self.model.patches_a(batch.audio), self.model.patches_v(batch.video)
        scored = score(self.model, self.avm, a, v)
        pairs = draw_pairs(len(batch), self.generators["pairs"])
        matching = matching_loss(self.model, self.avm, scored, pairs)
        del scored  # large, and not needed any more
        return Losses(self.parts(self.pretrain(a, v)) | {"avm": matching})

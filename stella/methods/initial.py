"""Initial pre-training: what continual pre-training starts from (paper, App. B and D)."""

from dataclasses import dataclass

from stella.clip import Batch
from stella.methods.base import Losses, MemoryConfig, Method, ObjectiveConfig
from stella.model.avm import AVM, check_heads, draw_pairs, matching_loss, score
from stella.model.cav import CAV, CAVConfig
from stella.rng import generator


@dataclass(frozen=True)
class InitialConfig:
    avm_heads: int | None = None  # none: as many as the model has

    def heads(self, model: CAVConfig) -> int:
        return model.heads if self.avm_heads is None else self.avm_heads


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
        c = model.config
        self.avm = AVM(c.dim, config.heads(c), c.eps).to(next(model.parameters()))  # its device and precision
        self.generators["pairs"] = generator(seed, "pairs", device=self.device)

    @classmethod
    def check(cls, model_config: CAVConfig, config: InitialConfig, objective: ObjectiveConfig) -> None:
        super().check(model_config, config, objective)
        check_heads(model_config.dim, config.heads(model_config))

    def loss(self, batch: Batch) -> Losses:
        a, v = self.model.patches_a(batch.audio), self.model.patches_v(batch.video)
        scored = score(self.model, self.avm, a, v)
        pairs = draw_pairs(len(batch), self.generators["pairs"])
        matching = matching_loss(self.model, self.avm, scored, pairs)
        del scored  # large, and not needed any more
        return Losses(self.parts(self.pretrain(a, v)) | {"avm": matching})

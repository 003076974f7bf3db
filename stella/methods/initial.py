"""Initial pre-training of backbone and matching module, before the stream starts (App. A and D)."""

from dataclasses import dataclass

from stella.clip import Batch
from stella.methods.base import Losses, Method, ObjectiveConfig
from stella.model.avm import AVM, check_heads, draw_pairs, score
from stella.model.cav import CAVConfig


@dataclass(frozen=True)
class InitialConfig:
    avm_heads: int | None = None  # heads of the matching module; none: as many as the model has

    def heads(self, model: CAVConfig) -> int:
        return model.heads if self.avm_heads is None else self.avm_heads


class Initial(Method):
    """Finetune's loss plus the matching loss, so that both parts are trained when the first task starts."""

    Config = InitialConfig
    title = "Initial"
    summary = "pre-trains backbone and matching module on one set of clips, before the stream starts"
    citation = "STELLA (Lee et al., ICML 2024), App. A and D"
    cost = "+ one pass without gradient over all patches, + the matching module"
    random = ("pairs",)

    config: InitialConfig
    avm: AVM

    @classmethod
    def check(cls, model: CAVConfig, config: InitialConfig, objective: ObjectiveConfig) -> None:
        super().check(model, config, objective)
        check_heads(model.dim, config.heads(model))

    def setup(self) -> None:
        c = self.model.config
        self.avm = AVM(c.dim, self.config.heads(c), eps=c.eps).to(next(self.model.parameters()))  # device and dtype

    def loss(self, batch: Batch) -> Losses:
        a, v = self.model.patches_a(batch.audio), self.model.patches_v(batch.video)
        scored = score(self.model, self.avm, a, v)
        matching = self.avm.loss(self.model, scored, draw_pairs(len(batch), self.generators["pairs"]))
        del scored  # large, and no longer needed
        return Losses(self.parts(self.pretrain(a, v)) | {"avm": matching})

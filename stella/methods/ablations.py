"""Other ways to choose patches (Tab. 3): DER++ on κ patches of each clip, chosen without a matching module."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from stella import selection
from stella.errors import ConfigError
from stella.methods.base import ObjectiveConfig, check_kept
from stella.methods.derpp import DERpp, DERppConfig
from stella.model.cav import CAVConfig, Patches
from stella.model.slow import check_shares


@dataclass(frozen=True)
class AblationConfig(DERppConfig):
    # Repeated so that its help text does not mention Continual-AS, on which the paper does not run these.
    alpha: float = 0.5  # weight of the penalty
    keep_ratio: float = 0.5  # ρ, share of the patches kept, both modalities

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares("args.", keep_ratio=self.keep_ratio)


class SomePatches(DERpp):
    """DER++ on the first κ patches of an order of each clip's patches."""

    Config = AblationConfig
    cost = "twice the clips a step, the decoder on half their patches"

    random = ("select",)

    config: AblationConfig

    @classmethod
    def check(cls, model: CAVConfig, config: AblationConfig, objective: ObjectiveConfig) -> None:
        check_kept(objective, (model.patches_a, model.patches_v), config.keep_ratio)

    @abstractmethod
    def order_a(self, a: Patches) -> Tensor:
        """[B, La], the patches to keep first."""

    @abstractmethod
    def order_v(self, v: Patches) -> Tensor:
        """[B, Lv], the patches to keep first."""

    def choose(self, a: Patches, v: Patches) -> tuple[Patches, Patches]:
        return self._first(a, self.order_a(a)), self._first(v, self.order_v(v))

    def _first(self, patches: Patches, order: Tensor) -> Patches:
        return patches.take(order[:, : selection.kappa(order.shape[1], self.config.keep_ratio)])


class RandomPatches(SomePatches):
    title = "Random"
    summary = "DER++ on patches chosen at random"
    citation = "STELLA (Lee et al., ICML 2024), Tab. 3"

    def order_a(self, a: Patches) -> Tensor:
        return selection.random_order(selection.uniform(*a.positions.shape, generator=self.generators["select"]))

    def order_v(self, v: Patches) -> Tensor:
        return selection.random_order(selection.uniform(*v.positions.shape, generator=self.generators["select"]))


class MATS(SomePatches):
    title = "MATS"
    summary = "DER++ on the patches that change most between adjacent frames or time steps"
    citation = "Hwang et al., Efficient Video Representation Learning via Motion-Aware Token Selection, 2023"
    cost = f"{SomePatches.cost}, + embedding all of them without gradient"

    @classmethod
    def check(cls, model: CAVConfig, config: AblationConfig, objective: ObjectiveConfig) -> None:
        if min(model.grid_a[0], model.grid_v[0]) < 2:
            raise ConfigError(
                f"mats compares adjacent frames and time steps; clips have {model.grid_v[0]} and {model.grid_a[0]}: "
                "give them two or more of both with data.frames and data.duration"
            )
        super().check(model, config, objective)

    # Without positions, which would add the same change to all patches of a step.

    @torch.no_grad()
    def order_a(self, a: Patches) -> Tensor:
        return selection.mats(self.model.patch_embed_a(self.model.input_a(a)), self.model.config.grid_a[0])

    @torch.no_grad()
    def order_v(self, v: Patches) -> Tensor:
        return selection.mats(self.model.patch_embed_v(self.model.input_v(v)), self.model.config.grid_v[0])

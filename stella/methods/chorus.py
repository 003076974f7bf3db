"""Chorus: contrasts each batch with many past clips, of which memory keeps a random half of the patches.

x are the current clips, m the clips drawn from memory, three for each current one:
1. keep a random share ρ of the patches of each current clip;
2. reconstruct x alone, with 20% of *all* patches visible;
3. contrast x ∪ m: the encoders see as many of m's stored patches, chosen anew at each draw;
4. store the kept patches of x.

Nothing of m is decoded and half of x is, which pays for three times as many past clips. Give the memory
`memory.codec=dct`: it must hold thousands of clips to be drawn from so often. docs/chorus.md has the equations.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stella import losses, selection
from stella.clip import Batch
from stella.columns import Column
from stella.methods.base import (
    Losses,
    Method,
    ObjectiveConfig,
    ReplayConfig,
    check_kept,
    drawn_patches,
    patch_columns,
    patch_rows,
)
from stella.model.cav import CAVConfig, Patches
from stella.model.slow import check_shares


@dataclass(frozen=True)
class ChorusConfig(ReplayConfig):
    draws: float = 3.0  # past clips for each current one
    keep_ratio: float = 0.5  # ρ, share of the patches stored, and of the current clips' trained on

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares("args.", keep_ratio=self.keep_ratio)

    def kappa(self, length: int) -> int:
        return selection.kappa(length, self.keep_ratio)


class Chorus(Method):
    Config = ChorusConfig
    title = "Chorus"
    summary = "contrasts three past clips for each current one; memory keeps a random half of each clip's patches"
    citation = "this project, docs/chorus.md"
    cost = "four times the clips a step through the encoders, the decoder on half the patches of the current ones"
    random = ("select",)

    config: ChorusConfig

    @classmethod
    def check(cls, model: CAVConfig, config: ChorusConfig, objective: ObjectiveConfig) -> None:
        check_kept(objective, (model.patches_a, model.patches_v), config.keep_ratio)

    @classmethod
    def columns(cls, model: CAVConfig, config: ChorusConfig) -> dict[str, Column]:
        return patch_columns(model, config.kappa(model.patches_a), config.kappa(model.patches_v))

    def loss(self, batch: Batch) -> Losses:
        drawn = self.draw(batch)
        a, v = self.some(self.model.patches_a(batch.audio)), self.some(self.model.patches_v(batch.video))
        out = self.pretrain(a, v)
        parts, z_a, z_v = self.recon_means(out), out.z_a, out.z_v
        if drawn is not None:
            past_a, past_v = drawn_patches(drawn)
            split_a, split_v = self.splits(past_a, past_v)
            z_a = torch.cat([z_a, self.model.pooled_a(past_a.take(split_a.visible))])
            z_v = torch.cat([z_v, self.model.pooled_v(past_v.take(split_v.visible))])
        parts |= {"contrastive": losses.mean(self.contrastive_part(z_a, z_v))}
        return Losses(parts, patch_rows(a, v))

    def some(self, patches: Patches) -> Patches:
        """κ patches of each clip, at random."""
        noise: Tensor = selection.uniform(*patches.positions.shape, generator=self.generators["select"])
        return patches.take(selection.random_order(noise)[:, : self.config.kappa(noise.shape[1])])

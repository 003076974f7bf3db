"""A virtual step: the weights after one step of plain SGD on the current clips, which are never the model's own.

The passes that look ahead are run with given weights and leave the model, its gradients and "mask" alone: their masks
come from a generator of their own, "virtual" (noise [clips, L], audio first), so that what is trained on afterwards is
masked as ER masks it. First come the masks of the current clips, then those of memory's.

The step's gradient is in the run's precision, as any step's. What is compared before and after the step is in float32
(`full_precision`): the step is smaller than what half precision, or TF32, tells apart.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stella import selection
from stella.clip import Batch
from stella.errors import ConfigError
from stella.methods.base import MemoryConfig, ObjectiveConfig
from stella.methods.er import ER
from stella.model.cav import CAV, Pretrained, Split, split_by_noise
from stella.model.linear import exact_products
from stella.rng import generator

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class VirtualConfig:
    virtual_lr: float | None = None  # of the step that is looked at; none: the learning rate, train.lr

    def __post_init__(self) -> None:
        if self.virtual_lr is not None and not self.virtual_lr > 0:
            raise ConfigError(f"virtual_lr={self.virtual_lr} must be above 0: nothing can be seen of a step of none")


class LooksAhead(ER):
    """ER whose memory part depends on what a step on the current clips alone would do."""

    Config = VirtualConfig
    config: VirtualConfig

    def __init__(
        self, model: CAV, config: VirtualConfig, objective: ObjectiveConfig, memory: MemoryConfig, seed: int
    ) -> None:
        super().__init__(model, config, objective, memory, seed)
        self.generators["virtual"] = generator(seed, "virtual", device=self.device)

    def weights(self) -> Weights:
        """θ, as values: no gradient reaches them."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def virtual_weights(self, batch: Batch) -> Weights:
        """θ' = θ − lr·∇L(x; θ)."""
        # Parameters, as the model's own are: so what is compiled for a step on these clips is for this one too.
        theta = {name: nn.Parameter(p.detach()) for name, p in self.model.named_parameters() if p.requires_grad}
        loss = self.clip_losses(theta, batch.audio, batch.video, self.virtual_splits(len(batch))).mean()
        gradients = self.gradients(loss, list(theta.values()))
        lr = self.lr if self.config.virtual_lr is None else self.config.virtual_lr
        with torch.no_grad():
            return {name: p - lr * g for (name, p), g in zip(theta.items(), gradients, strict=True)}

    def clip_losses(
        self,
        weights: Weights,
        audio: Tensor,
        video: Tensor,
        splits: tuple[Split, Split],
        at_once: int | None = None,
    ) -> Tensor:
        """L of each clip [n], at these weights; the clips are one another's negatives.

        So many of them go through the model `at_once`: it takes a batch's memory, and knows a batch's shapes alone.
        """
        recon, z_a, z_v = [], [], []
        size = at_once or len(audio)
        for start in range(0, len(audio), size):
            part = slice(start, start + size)
            patches = self.model.patches_a(audio[part]), self.model.patches_v(video[part])
            split = [Split(each.visible[part], each.masked[part]) for each in splits]
            out: Pretrained = functional_call(self.model, dict(weights), (*patches, *split))
            recon.append(torch.stack(list(self.recon_parts(out).values())).sum(0))
            z_a.append(out.z_a)
            z_v.append(out.z_v)
        return torch.cat(recon) + self.contrastive_part(torch.cat(z_a), torch.cat(z_v))

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Float32; where the run is in half precision, on a GPU, with products on tensor cores."""
        half = torch.is_autocast_enabled(self.device.type)
        with torch.autocast(self.device.type, enabled=False), exact_products(half):
            yield

    def virtual_splits(self, clips: int) -> tuple[Split, Split]:
        c = self.model.config
        return self._virtual_split(clips, c.patches_a), self._virtual_split(clips, c.patches_v)

    def _virtual_split(self, clips: int, length: int) -> Split:
        noise = selection.uniform(clips, length, generator=self.generators["virtual"])
        return split_by_noise(noise, selection.visible(length, self.objective.mask_ratio))

    def gradients(self, loss: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """In the precision of the pass before (inside autocast, parts of the way back would be rounded)."""
        with torch.autocast(self.device.type, enabled=False):
            return torch.autograd.grad(loss, inputs, materialize_grads=True)

"""A virtual step: the weights after the optimiser's own step on the current clips, without taking it.

Passes at virtual weights leave the model, its gradients and the "mask" generator alone. Their masks come from the
generator "virtual", first those of the current clips, then those of the drawn ones, so that the training pass is
masked as in ER. Everything runs in the run's own precision: Adam moves every weight by about the learning rate, which
bfloat16 passes can tell apart (`tests/methods/test_virtual.py`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stella.clip import Batch
from stella.losses import mean
from stella.methods.er import Replay
from stella.model.cav import Pretrained, Split

Weights = Mapping[str, Tensor]


class LooksAhead(Replay):
    """ER whose replay depends on what a step on the current clips alone would do."""

    random = ("virtual",)
    optimizer: torch.optim.Adam

    def attach(self, optimizer: torch.optim.Adam) -> None:
        self.optimizer = optimizer

    def weights(self) -> Weights:
        """θ, detached."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def virtual_weights(self, batch: Batch) -> Weights:
        """θ' after Adam's step on ∇L(x; θ)."""
        # As parameters: compiled code for the training pass on these shapes is then reused.
        theta = {name: nn.Parameter(p.detach()) for name, p in self.model.named_parameters() if p.requires_grad}
        loss = mean(self.clip_losses(theta, batch.audio, batch.video))
        gradients = self.gradients(loss, list(theta.values()))
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        stepped = adam_step(self.optimizer, parameters, gradients)
        return dict(zip(theta, stepped, strict=True))

    def clip_losses(
        self,
        weights: Weights,
        audio: Tensor,
        video: Tensor,
        splits: tuple[Split, Split] | None = None,
        at_once: int | None = None,
    ) -> Tensor:
        """L of each clip [n] at these weights; all clips are negatives of one another.

        At most `at_once` clips go through the model together, which bounds memory and keeps a batch's shapes.
        """
        splits = self.virtual_splits(audio, video) if splits is None else splits
        recon, z_a, z_v = [], [], []
        size = at_once or len(audio)
        for start in range(0, len(audio), size):
            some = slice(start, start + size)
            patches = self.model.patches_a(audio[some]), self.model.patches_v(video[some])
            out: Pretrained = functional_call(self.model, dict(weights), (*patches, splits[0][some], splits[1][some]))
            recon.append(torch.stack(list(self.recon_parts(out).values())).sum(0))
            z_a.append(out.z_a)
            z_v.append(out.z_v)
        return torch.cat(recon) + self.contrastive_part(torch.cat(z_a), torch.cat(z_v))

    def virtual_splits(self, audio: Tensor, video: Tensor) -> tuple[Split, Split]:
        return self.splits(self.model.patches_a(audio), self.model.patches_v(video), noise="virtual")

    def gradients(self, loss: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast(self.device.type, enabled=False):  # as in any backward pass
            return torch.autograd.grad(loss, inputs, materialize_grads=True)


@torch.no_grad()
def adam_step(
    optimizer: torch.optim.Adam, parameters: list[nn.Parameter], gradients: tuple[Tensor, ...]
) -> list[Tensor]:
    """What `optimizer.step()` would make of these parameters with these gradients. Nothing is stored.

    The first step starts from zero moments. All tensor operations: the step can be recorded in a CUDA graph.
    """
    (group,) = optimizer.param_groups
    (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
    states = [optimizer.state.get(p, {}) for p in parameters]
    step = 1 + (states[0]["step"] if states and states[0] else torch.zeros((), device=gradients[0].device))
    apart = isinstance(optimizer, torch.optim.AdamW)  # weight decay apart from the gradient
    decay, now = group["weight_decay"], list[Tensor](parameters)
    grads = list(gradients) if apart else torch._foreach_add(list(gradients), now, alpha=decay)
    m = torch._foreach_mul(grads, 1 - beta1)
    v = torch._foreach_mul(grads, grads)
    torch._foreach_mul_(v, 1 - beta2)
    if states and states[0]:
        torch._foreach_add_(m, [s["exp_avg"] for s in states], alpha=beta1)
        torch._foreach_add_(v, [s["exp_avg_sq"] for s in states], alpha=beta2)
    del grads
    torch._foreach_sqrt_(v)
    step = step.to(gradients[0])
    torch._foreach_div_(v, (1 - beta2**step).sqrt())
    torch._foreach_add_(v, eps)
    torch._foreach_div_(m, v)
    torch._foreach_mul_(m, -lr / (1 - beta1**step))
    kept = torch._foreach_mul(now, 1 - lr * decay) if apart else now
    return list(torch._foreach_add(kept, m))

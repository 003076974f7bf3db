"""The audio-video matching module (App. D): cross-attention that learns which patches belong together.

Nothing here sends a gradient into the backbone: the backbone's outputs are detached where they enter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stella import losses
from stella.errors import ConfigError
from stella.fast.compile import compilable, lean
from stella.model.cav import CAV, Patches
from stella.model.vit import init_linear


@dataclass(frozen=True)
class QueriesKeys:
    """Eq. cross_att_compute: what importance and correlation are computed from, each [B, H, L, d]."""

    q_a: Tensor
    k_a: Tensor
    q_v: Tensor
    k_v: Tensor


def check_heads(dim: int, heads: int) -> None:
    if heads < 1 or dim % heads:
        raise ConfigError(f"the matching module's heads={heads} must divide dim={dim}; choose another number")


class AVM(nn.Module):
    """Takes the joint fusion outputs o_a [B, La, D] and o_v [B, Lv, D], before the backbone's last norm."""

    def __init__(self, dim: int, heads: int, eps: float = 1e-5) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.dim, self.heads = dim, heads
        self.norm_a, self.norm_v = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.to_a_q, self.to_a_k, self.to_a_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_v_q, self.to_v_k, self.to_v_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.dense = nn.Linear(2 * dim, 2 * dim)
        self.fc = nn.Linear(2 * dim, 1)
        self.apply(init_linear)

    @compilable
    def project(self, o_a: Tensor, o_v: Tensor) -> QueriesKeys:
        return self._project(self.norm_a(o_a.detach()), self.norm_v(o_v.detach()))

    @compilable
    @lean
    def forward(self, o_a: Tensor, o_v: Tensor) -> Tensor:
        """Logits [B] that audio and video belong together (Eq. avm_process, avm_loss)."""
        a, v = self.norm_a(o_a.detach()), self.norm_v(o_v.detach())
        qk = self._project(a, v)
        seen_a = F.scaled_dot_product_attention(qk.q_v, qk.k_a, self._heads(self.to_a_v(a)))  # [B, H, Lv, d]
        seen_v = F.scaled_dot_product_attention(qk.q_a, qk.k_v, self._heads(self.to_v_v(v)))  # [B, H, La, d]
        # Mean over patches, heads side by side. (The release's reshape mixes heads and patches.)
        pooled = torch.cat([seen_a.mean(2).flatten(1), seen_v.mean(2).flatten(1)], 1)  # [B, 2D]
        logits: Tensor = self.fc(self.dense(pooled).tanh()).squeeze(1)
        return logits

    def _project(self, a: Tensor, v: Tensor) -> QueriesKeys:
        return QueriesKeys(
            q_a=self._heads(self.to_a_q(a)),
            k_a=self._heads(self.to_a_k(a)),
            q_v=self._heads(self.to_v_q(v)),
            k_v=self._heads(self.to_v_k(v)),
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # [B, H, L, d]


@dataclass(frozen=True)
class Scored:
    """One pass over all patches without gradient: what selection needs, and what matching uses again."""

    x_a: Tensor  # [B, La, D] encoder outputs
    x_v: Tensor  # [B, Lv, D]
    o_a: Tensor  # [B, La, D] joint fusion outputs
    o_v: Tensor  # [B, Lv, D]
    positions_a: Tensor | None  # [La] of the patches looked at; None: all
    positions_v: Tensor | None  # [Lv]
    qk: QueriesKeys  # of all patches


@torch.no_grad()
def score(model: CAV, avm: AVM, a: Patches, v: Patches, every: int = 1) -> Scored:
    """Queries and keys of whole clips: `score(model, avm, model.patches_a(audio), model.patches_v(video))`.

    Cheaper scoring: of `every` neighbouring patches (mel bins of a time step, columns of a frame) only the first is
    looked at, and the others have its query and key.
    """
    a, at_a, stands_a = _thin(a, model.config.grid_a[-1], every)
    v, at_v, stands_v = _thin(v, model.config.grid_v[-1], every)
    x_a, x_v = model.encode_a(a), model.encode_v(v)
    o_a, o_v = model.fuse_joint(x_a, x_v, at_a, at_v)
    qk = avm.project(o_a, o_v)
    q_a, k_a, q_v, k_v = (
        _spread(qk.q_a, stands_a),
        _spread(qk.k_a, stands_a),
        _spread(qk.q_v, stands_v),
        _spread(qk.k_v, stands_v),
    )
    return Scored(x_a, x_v, o_a, o_v, at_a, at_v, QueriesKeys(q_a, k_a, q_v, k_v))


def _thin(patches: Patches, row: int, every: int) -> tuple[Patches, Tensor | None, Tensor | None]:
    """The patches to look at, in rows of so many, and for each of all which of these stands for it."""
    if every == 1:
        return patches, None, None
    batch, length = patches.positions.shape
    some = torch.arange(length, device=patches.positions.device).view(-1, row)[:, ::every]  # [rows, groups]
    order = torch.arange(some.numel(), device=some.device).view(some.shape)
    stands = order.repeat_interleave(every, 1)[:, :row]
    return patches.take(some.flatten().expand(batch, -1)), some.flatten(), stands.flatten()


def _spread(x: Tensor, stands: Tensor | None) -> Tensor:
    return x if stands is None else x.index_select(2, stands)


@dataclass(frozen=True)
class Pairs:
    """How a batch is matched and mismatched, as indices of clips."""

    matched: Tensor  # [B - B//2] keep their own video
    audio: Tensor  # [B//2] clips whose audio meets
    video: Tensor  # [B//2] another clip's video, never their own


def draw_pairs(batch: int, generator: torch.Generator) -> Pairs:
    """Half of the clips, drawn anew, pass their videos on in a circle; an odd clip stays matched.

    Two or three clips leave one to mismatch: it meets a matched clip's video. One clip stays matched. The indices are
    on the generator's device: one on the model's device needs no copy.
    """
    order = torch.rand(batch, generator=generator, device=generator.device).argsort()
    half = batch // 2
    video = order[:half].roll(-1) if half != 1 else order[1:2]
    return Pairs(order[half:], order[:half], video)


@dataclass(frozen=True)
class Matching:
    """Both sides of Eq. avm_loss, for `losses.matching`."""

    logits: Tensor  # [B], the matched pairs first
    labels: Tensor  # [B], 1 for matched, 0 for mismatched


def match(model: CAV, avm: AVM, scored: Scored, pairs: Pairs) -> Matching:
    """Matched pairs take their fusion outputs as scored; only the mismatched half goes through fusion again."""
    with torch.no_grad():
        o_a, o_v = scored.o_a[pairs.matched], scored.o_v[pairs.matched]
        if len(pairs.audio):  # a single clip has no mismatch, and fused attention no answer to an empty batch
            x_a, x_v = scored.x_a[pairs.audio], scored.x_v[pairs.video]
            wrong_a, wrong_v = model.fuse_joint(x_a, x_v, scored.positions_a, scored.positions_v)
            o_a, o_v = torch.cat([o_a, wrong_a]), torch.cat([o_v, wrong_v])  # [B, La, D], [B, Lv, D]
    labels = o_a.new_zeros(len(o_a))
    labels[: len(pairs.matched)] = 1
    return Matching(avm(o_a, o_v), labels)


def matching_loss(model: CAV, avm: AVM, scored: Scored, pairs: Pairs) -> Tensor:
    """Eq. avm_loss, a scalar that reaches nothing but the module.

    Its gradients are taken at once: what they need is large, and would be kept all through the backbone's step.
    """
    found = match(model, avm, scored, pairs)
    return _at_once(losses.matching(found.logits, found.labels).mean(), avm.parameters())


def _at_once(loss: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """The same loss with the same gradients, already known."""
    if not loss.requires_grad:
        return loss
    reached = [p for p in parameters if p.requires_grad]
    with torch.autocast(loss.device.type, enabled=False):  # as any backward pass
        gradients = torch.autograd.grad(loss, reached)
    known: Tensor = _Known.apply(loss.detach(), gradients, *reached)  # type: ignore[no-untyped-call]
    return known


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor, ...], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *weight: Tensor) -> Any:
        return None, None, *(weight[0] * gradient for gradient in ctx.gradients)

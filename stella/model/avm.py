"""The audio-video matching module (App. D): cross-attention that learns which patches belong together.

No gradient reaches the backbone: its outputs are detached where they enter the module.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stella import losses
from stella.errors import ConfigError
from stella.model.cav import CAV, Patches
from stella.model.vit import init_linear


@dataclass(frozen=True)
class QueriesKeys:
    """Queries and keys of all patches (Eq. 1), each [B, H, L, d]."""

    q_a: Tensor
    k_a: Tensor
    q_v: Tensor
    k_v: Tensor


@dataclass(frozen=True)
class Scored:
    """One pass over all patches without gradient: input of selection and of the matching loss."""

    x_a: Tensor  # [B, La, D] encoder outputs
    x_v: Tensor  # [B, Lv, D]
    o_a: Tensor  # [B, La, D] joint fusion outputs
    o_v: Tensor  # [B, Lv, D]
    positions_a: Tensor | None  # [La] of the patches encoded; None: all
    positions_v: Tensor | None  # [Lv]
    qk: QueriesKeys  # of all patches


@dataclass(frozen=True)
class Pairs:
    """Which clips are matched and mismatched, as indices into the batch."""

    matched: Tensor  # [B - B//2] keep their own video
    audio: Tensor  # [B//2] the audio of these clips …
    video: Tensor  # [B//2] … meets the video of another clip


@dataclass(frozen=True)
class PairLogits:
    logits: Tensor  # [B]
    labels: Tensor  # [B], 1 for matched, 0 for mismatched


def check_heads(dim: int, heads: int) -> None:
    if heads < 1 or dim % heads:
        raise ConfigError(f"args.avm_heads={heads} must divide the model's dim={dim}; choose another number")


class AVM(nn.Module):
    """Takes the joint fusion outputs o_a [B, La, D] and o_v [B, Lv, D], before the backbone's last norm.

    `beta` is the temperature at which its attention is read as importance (Eq. 1); it changes no weight.
    """

    def __init__(self, dim: int, heads: int, beta: float = 0.4, eps: float = 1e-5) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.dim, self.heads, self.beta = dim, heads, beta
        self.norm_a, self.norm_v = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.to_a_q, self.to_a_k, self.to_a_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_v_q, self.to_v_k, self.to_v_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.dense = nn.Linear(2 * dim, 2 * dim)
        self.fc = nn.Linear(2 * dim, 1)
        self.apply(init_linear)

    def project(self, o_a: Tensor, o_v: Tensor) -> QueriesKeys:
        return self._project(self.norm_a(o_a.detach()), self.norm_v(o_v.detach()))

    def forward(self, o_a: Tensor, o_v: Tensor) -> Tensor:
        """Logits [B] that audio and video belong together (Eq. 10 and 11)."""
        a, v = self.norm_a(o_a.detach()), self.norm_v(o_v.detach())
        qk = self._project(a, v)
        seen_a = F.scaled_dot_product_attention(qk.q_v, qk.k_a, self._heads(self.to_a_v(a)))  # [B, H, Lv, d]
        seen_v = F.scaled_dot_product_attention(qk.q_a, qk.k_v, self._heads(self.to_v_v(v)))  # [B, H, La, d]
        # Mean over patches, heads concatenated. (The release's reshape mixes heads and patches.)
        pooled = torch.cat([seen_a.mean(2).flatten(1), seen_v.mean(2).flatten(1)], 1)  # [B, 2D]
        logits: Tensor = self.fc(self.dense(pooled).tanh()).squeeze(1)
        return logits

    def loss(self, model: CAV, scored: Scored, pairs: Pairs) -> Tensor:
        """Eq. 11, a scalar whose gradient reaches this module only."""
        found = match(model, self, scored, pairs)
        return losses.mean(losses.matching(found.logits, found.labels))

    def _project(self, a: Tensor, v: Tensor) -> QueriesKeys:
        return QueriesKeys(
            q_a=self._heads(self.to_a_q(a)),
            k_a=self._heads(self.to_a_k(a)),
            q_v=self._heads(self.to_v_q(v)),
            k_v=self._heads(self.to_v_k(v)),
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # [B, H, L, d]


@torch.no_grad()
def score(model: CAV, avm: AVM, a: Patches, v: Patches, every: int = 1) -> Scored:
    """Queries and keys of whole clips: `score(model, avm, model.patches_a(audio), model.patches_v(video))`.

    With `every` > 1 only the first of `every` neighbouring patches (mel bins of a time step, columns of a frame) is
    encoded; its neighbours share its query and key.
    """
    a, at_a, of_a = _subsample(a, model.config.grid_a[-1], every)
    v, at_v, of_v = _subsample(v, model.config.grid_v[-1], every)
    x_a, x_v = model.encode_a(a), model.encode_v(v)
    o_a, o_v = model.fuse_joint(x_a, x_v, at_a, at_v)
    qk = avm.project(o_a, o_v)
    if of_a is not None and of_v is not None:
        q_a, k_a = qk.q_a.index_select(2, of_a), qk.k_a.index_select(2, of_a)
        q_v, k_v = qk.q_v.index_select(2, of_v), qk.k_v.index_select(2, of_v)
        qk = QueriesKeys(q_a, k_a, q_v, k_v)
    return Scored(x_a, x_v, o_a, o_v, at_a, at_v, qk)


def _subsample(patches: Patches, row: int, every: int) -> tuple[Patches, Tensor | None, Tensor | None]:
    """Every n-th patch of each row, their positions, and for each of all patches the index of its representative."""
    if every == 1:
        return patches, None, None
    batch, length = patches.positions.shape
    some = torch.arange(length, device=patches.positions.device).view(-1, row)[:, ::every]  # [rows, groups]
    group = torch.arange(some.numel(), device=some.device).view(some.shape).repeat_interleave(every, 1)[:, :row]
    return patches.take(some.flatten().expand(batch, -1)), some.flatten(), group.flatten()


def draw_pairs(batch: int, generator: torch.Generator) -> Pairs:
    """Mismatch half of the clips by rotating their videos among them; an odd clip stays matched.

    With two or three clips the one mismatched clip takes a matched clip's video. A single clip stays matched. The
    indices are on the generator's device.
    """
    order = torch.rand(batch, generator=generator, device=generator.device).argsort()
    half = batch // 2
    video = order[:half].roll(-1) if half != 1 else order[1:2]
    return Pairs(order[half:], order[:half], video)


def match(model: CAV, avm: AVM, scored: Scored, pairs: Pairs) -> PairLogits:
    """Logits and labels. Matched pairs come first and reuse their fusion outputs; only mismatched ones are fused again.

    (Where processes share a batch, clips stay in order, and all are fused: `train/sharing.py`.)
    """
    with torch.no_grad():
        o_a, o_v = scored.o_a[pairs.matched], scored.o_v[pairs.matched]
        if len(pairs.audio):  # a single clip has no mismatch, and fused attention rejects an empty batch
            x_a, x_v = scored.x_a[pairs.audio], scored.x_v[pairs.video]
            wrong_a, wrong_v = model.fuse_joint(x_a, x_v, scored.positions_a, scored.positions_v)
            o_a, o_v = torch.cat([o_a, wrong_a]), torch.cat([o_v, wrong_v])  # [B, La, D], [B, Lv, D]
    labels = o_a.new_zeros(len(o_a))
    labels[: len(pairs.matched)] = 1
    return PairLogits(avm(o_a, o_v), labels)

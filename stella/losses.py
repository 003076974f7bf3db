"""Training objectives, one function per equation. Each returns one value per clip [B]; a batch's loss is their mean."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.fast.compile import compilable


@compilable
def norm_pix(patches: Tensor) -> Tensor:
    """Reconstruction targets normalised per patch [B, K, patch]: what `norm_pix` pre-training predicts."""
    # (x - mean) / sqrt(var + 1e-6) with the unbiased var that MAE has, by the kernel that has the biased one.
    size = patches.shape[-1]
    bias = (size - 1) / size
    return F.layer_norm(patches, (size,), patches.new_full((size,), math.sqrt(bias)), eps=1e-6 * bias)


@compilable
def reconstruction(recon: Tensor, target: Tensor) -> Tensor:
    """Eq. recon-loss, one modality: mean squared error over each clip's masked patches [B, Kmask, patch]."""
    return F.mse_loss(recon, target, reduction="none").mean((1, 2))


def contrastive(
    z_a: Tensor,
    z_v: Tensor,
    tau: float = 0.05,
    all_a: Tensor | None = None,
    all_v: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Eq. contr-loss, symmetric InfoNCE: the average of audio-to-video and video-to-audio.

    `z_a`, `z_v` [B, D] need not be normalised. With several processes, `all_a` and `all_v` [N, D] are the embeddings
    of all of them (gathered with gradients) and row `first` of these is this process's first clip.
    """
    # Similarities over τ = 0.05 reach 20, where bfloat16 steps by 0.125: this small product stays in full precision.
    with torch.autocast(z_a.device.type, enabled=False):
        a, v = _unit(z_a), _unit(z_v)
        to_v = a @ (v if all_v is None else _unit(all_v)).T / tau  # [B, N]
        to_a = v @ (a if all_a is None else _unit(all_a)).T / tau  # [B, N]
        return (_nll(to_v, first) + _nll(to_a, first)) / 2


def _unit(z: Tensor) -> Tensor:
    return F.normalize(_full(z), dim=-1)


def _full(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _nll(logits: Tensor, first: int) -> Tensor:
    return logits.logsumexp(1) - logits.diagonal(first)  # clip i's own pair is column first + i


def matching(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. avm_loss: binary cross-entropy of logits [B] with labels [B], 1 for a matched pair and 0 for a mismatched."""
    logits = _full(logits)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


def feature_penalty(z: Tensor, stored: Tensor) -> Tensor:
    """DER++'s and STELLA's penalty, one modality: mean squared distance of pooled outputs [B, D] to the stored ones."""
    return (z - stored).square().mean(1)

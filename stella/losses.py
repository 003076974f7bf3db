"""Training objectives, one function per equation. Each returns one value per clip [B]; a batch's loss is their mean."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_pix(patches: Tensor) -> Tensor:
    """Normalise each target patch [B, K, patch] to zero mean and unit variance (MAE's `norm_pix`)."""
    # (x - mean) / sqrt(var + 1e-6) with MAE's unbiased variance, as a layer norm, whose variance is biased.
    size = patches.shape[-1]
    bias = (size - 1) / size
    return F.layer_norm(patches, (size,), patches.new_full((size,), math.sqrt(bias)), eps=1e-6 * bias)


def reconstruction(recon: Tensor, target: Tensor) -> Tensor:
    """Eq. 8, one modality: mean squared error over each clip's masked patches [B, Kmask, patch]."""
    return F.mse_loss(recon, target, reduction="none").mean((1, 2))


def contrastive(z_a: Tensor, z_v: Tensor, tau: float = 0.05) -> Tensor:
    """Eq. 9, symmetric InfoNCE: the average of both directions of `pair_nll`."""
    to_v, to_a = pair_nll(z_a, z_v, tau)
    return (to_v + to_a) / 2


def pair_nll(z_a: Tensor, z_v: Tensor, tau: float = 0.05) -> tuple[Tensor, Tensor]:
    """Negative log-probability [B] of each clip's own video given its audio, and of its own audio given its video.
    `z_a` and `z_v` [B, D] need not be normalised."""
    # Similarities over τ = 0.05 reach 20, where bfloat16 has steps of 0.125: this small product stays in float32.
    with torch.autocast(z_a.device.type, enabled=False):
        a, v = (F.normalize(wide(z), dim=-1) for z in (z_a, z_v))
        to_v, to_a = a @ v.T / tau, v @ a.T / tau  # [B, B]
        return to_v.logsumexp(1) - to_v.diagonal(), to_a.logsumexp(1) - to_a.diagonal()


def mean(values: Tensor) -> Tensor:
    """The loss of a batch from those of its clips [B]. Where processes share a batch, the mean over *all* its clips:
    each has a part of it, and their average is the mean."""
    return values.mean()


def every(values: Tensor) -> Tensor:
    """Values of the clips [B, …], without gradient, for statistics. Where processes share a batch: of all its clips."""
    return values.detach()


def matching(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. 11: binary cross-entropy of logits [B] with labels [B], 1 for matched pairs and 0 for mismatched ones."""
    logits = wide(logits)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


def feature_penalty(z: Tensor, stored: Tensor) -> Tensor:
    """DER++'s and STELLA's penalty, one modality: mean squared distance of pooled outputs [B, D] to stored ones."""
    return (z - stored).square().mean(1)


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

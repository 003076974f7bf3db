"""The modality gap: how far apart audio and video embeddings are in their shared space."""

from torch import Tensor


def modality_gap(a: Tensor, v: Tensor) -> float:
    """Euclidean distance between the centroids of normalised audio [N, D] and video [M, D] embeddings: 0 to 2."""
    return (a.double().mean(0) - v.double().mean(0)).square().sum().sqrt().item()

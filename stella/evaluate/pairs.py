"""Audio and video embeddings of the same clips in two dimensions: what the modality gap looks like."""

import torch

from stella.evaluate.retrieval import Embeddings
from stella.files import Line

CLIPS = 60  # pairs that are drawn


@torch.no_grad()
def plane(task: str, found: Embeddings) -> Line:
    """The first clips of a task in the plane of their two largest principal components, ready for JSON.

    `pairs` are [audio x, audio y, video x, video y]; `share` is the part of the variance that the plane shows. Video is
    to the right of audio, and the first pair's audio above the second axis' zero, so that the picture is unique.
    """
    a, v = (rows[:CLIPS].double().cpu().nan_to_num() for rows in (found.a, found.v))
    both = torch.cat([a, v])
    both = both - both.mean(0)
    _, values, axes = torch.linalg.svd(both, full_matrices=False)
    flat = both @ axes[:2].T  # [2N, 2]
    away = flat[len(a) :, 0].mean() - flat[: len(a), 0].mean()
    sign = torch.stack([away, flat[0, 1]]).sign()
    flat = flat * torch.where(sign == 0, 1.0, sign)
    share = values[:2].square().sum() / values.square().sum().clamp_min(1e-12)
    points = torch.cat([flat[: len(a)], flat[len(a) :]], 1)
    return {"task": task, "share": share.item(), "pairs": [[round(x, 4) for x in row] for row in points.tolist()]}

"""What embeddings say about the classes of clips: class-level retrieval, and classification by nearest neighbours."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.evaluate.retrieval import DIRECTIONS, KS, Embeddings

NEIGHBOURS = 5  # that vote on a clip's class


def class_measures(tasks: Sequence[Embeddings], names: Sequence[Sequence[str | None]]) -> dict[str, Any] | None:
    """Measures in percent over the clips of all tasks that have a label, ready for JSON; None without two classes.

    `recall`: the share of queries with another clip of their class among the first k of the gallery, in which the
    query's own clip does not count. `knn`: accuracy of the vote of a clip's nearest neighbours among all other clips,
    by sound, by picture and by both. `majority`: the share of the largest class, for comparison.
    """
    of_clips = [name for task in names for name in task]
    classes = sorted({name for name in of_clips if name is not None})
    if len(classes) < 2:
        return None
    labelled = [row for row, name in enumerate(of_clips) if name is not None]
    label = torch.tensor([classes.index(of_clips[row] or "") for row in labelled])  # [N]
    a, v = (torch.cat([getattr(task, kind) for task in tasks])[labelled].float().cpu() for kind in "av")  # [N, D]
    found = {d: _neighbours(*pair, max(KS)) for d, pair in zip(DIRECTIONS, ((a, v), (v, a)), strict=True)}
    both = torch.cat([a, v], 1)
    return {
        "classes": len(classes),
        "recall": {
            d: {str(k): 100 * (label[near[:, :k]] == label[:, None]).any(1).double().mean().item() for k in KS}
            for d, near in found.items()
        },
        "knn": {
            kind: 100 * (_vote(label[_neighbours(x, x, NEIGHBOURS)], len(classes)) == label).double().mean().item()
            for kind, x in (("a", a), ("v", v), ("av", both))
        },
        "majority": 100 * label.bincount().max().item() / len(label),
    }


def _neighbours(query: Tensor, gallery: Tensor, count: int, chunk: int = 512) -> Tensor:
    """The most similar rows of the gallery for each query except its own row, nearest first; int64 [N, count]."""
    found = []
    for start in range(0, len(query), chunk):
        scores = query[start : start + chunk] @ gallery.T
        own = torch.arange(start, start + len(scores))
        scores[torch.arange(len(scores)), own] = -torch.inf
        found.append(scores.topk(min(count, len(gallery) - 1), dim=1).indices)
    return torch.cat(found)


def _vote(neighbours: Tensor, classes: int) -> Tensor:
    """The most frequent class of each row; among equals, that of the nearer neighbour."""
    votes = F.one_hot(neighbours, classes).double()  # [N, k, classes]
    rank = torch.arange(neighbours.shape[1], dtype=torch.double)[:, None]
    nearer = 1e-6 * 0.5**rank  # breaks ties alone: the nearest outweighs all behind it
    return (votes * (1 + nearer)).sum(1).argmax(1)

"""Class-level retrieval and nearest neighbours against plain loops."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stella.evaluate.classes import NEIGHBOURS, _neighbours, _vote, class_measures
from stella.evaluate.retrieval import Embeddings

NAMES = ["cat", "dog", "owl"]


def made(clips: int, seed: int) -> tuple[Embeddings, list[str | None]]:
    """Noisy embeddings of classes; every seventh clip has no label."""
    gen = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 3, (clips,), generator=gen)
    centres = torch.randn(3, 8, generator=gen)
    a, v = (F.normalize(centres[label] + torch.randn(clips, 8, generator=gen), dim=1) for _ in range(2))
    names = [None if i % 7 == 3 else NAMES[c] for i, c in enumerate(label.tolist())]
    return Embeddings(a, v, torch.arange(clips)), names


def nearest(query: Tensor, gallery: Tensor, row: int, count: int) -> list[int]:
    scores = {other: float(query[row] @ gallery[other]) for other in range(len(gallery)) if other != row}
    return sorted(scores, key=lambda other: -scores[other])[:count]


def test_measures_equal_a_plain_loop() -> None:
    (first, names), (second, more) = made(41, 0), made(60, 1)
    found = class_measures([first, second], [names, more])
    assert found is not None
    every = [*names, *more]
    rows = [i for i, name in enumerate(every) if name is not None]
    a, v = (torch.cat([getattr(e, kind) for e in (first, second)])[rows] for kind in "av")
    label = [every[i] for i in rows]
    for direction, (q, g) in {"a2v": (a, v), "v2a": (v, a)}.items():
        for k in (1, 5, 10):
            hits = [any(label[j] == label[i] for j in nearest(q, g, i, k)) for i in range(len(rows))]
            assert found["recall"][direction][str(k)] == pytest.approx(100 * sum(hits) / len(hits))
    for kind, x in (("a", a), ("v", v), ("av", torch.cat([a, v], 1))):
        right = 0
        for i in range(len(rows)):
            votes = [label[j] for j in nearest(x, x, i, NEIGHBOURS)]
            most = max(Counter(votes).values())
            right += next(name for name in votes if votes.count(name) == most) == label[i]  # the nearest of equals
        assert found["knn"][kind] == pytest.approx(100 * right / len(rows))
    assert found["classes"] == 3
    assert found["majority"] == pytest.approx(100 * max(Counter(label).values()) / len(label))
    assert found["knn"]["av"] > found["majority"]


def test_chunks_find_the_same_neighbours() -> None:
    e, _ = made(50, 2)
    assert torch.equal(_neighbours(e.a, e.v, 5, chunk=7), _neighbours(e.a, e.v, 5))


def test_of_classes_with_as_many_votes_that_of_the_nearest_neighbour_wins() -> None:
    """Also where the other's neighbours are nearer on average."""
    rows = torch.tensor([[0, 1, 1, 2, 0], [1, 0, 0, 1, 2], [2, 0, 1, 1, 0]])
    assert _vote(rows, 3).tolist() == [0, 1, 0]


def test_without_two_classes_there_is_nothing_to_measure() -> None:
    e, _ = made(10, 0)
    assert class_measures([e], [[None] * 10]) is None
    assert class_measures([e], [["cat"] * 10]) is None


def test_perfect_and_few_clips() -> None:
    x = F.normalize(torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]]), dim=1)
    found = class_measures([Embeddings(x, x, torch.arange(4))], [["a", "a", "b", "b"]])
    assert found is not None and found["recall"]["a2v"]["1"] == 100.0 and found["majority"] == 50.0

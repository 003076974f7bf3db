"""Pairs in two dimensions."""

import json

import pytest
import torch
from torch import Tensor

from stella.evaluate.pairs import CLIPS, plane
from stella.evaluate.retrieval import Embeddings


def embeddings(a: Tensor, v: Tensor) -> Embeddings:
    return Embeddings(a, v, torch.arange(len(a)))


def noise(clips: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    scale = torch.tensor([3.0, 2.0, 1.0, 0.5, 0.2])
    a, v = (torch.randn(clips, 5, generator=draw) * scale for _ in range(2))
    return a, v + torch.tensor([4.0, 0, 0, 0, 0])


def test_points_are_those_of_principal_components() -> None:
    """Against the eigenvectors of the covariance, up to the sign of an axis."""
    a, v = noise(20)
    found = plane("task1", embeddings(a, v))
    both = torch.cat([a, v]).double()
    centred = both - both.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    expected = centred @ vectors.flip(1)[:, :2]
    points = torch.tensor(found["pairs"]).double()
    flat = torch.cat([points[:, :2], points[:, 2:]])
    for axis in range(2):
        sign = torch.sign((flat[:, axis] * expected[:, axis]).sum())
        assert torch.allclose(flat[:, axis], sign * expected[:, axis], atol=1e-3)
    assert found["share"] == pytest.approx((values[-2:].sum() / values.sum()).item()) and found["task"] == "task1"


def test_the_picture_does_not_depend_on_how_the_space_is_turned() -> None:
    a, v = noise(20)
    turn, _ = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1)))
    one = torch.tensor(plane("t", embeddings(a, v))["pairs"])
    other = torch.tensor(plane("t", embeddings(a @ turn, v @ turn))["pairs"])
    assert torch.allclose(one, other, atol=1e-3)
    assert one[:, 2].mean() > one[:, 0].mean() and one[0, 1] >= 0  # video on the right, the first sound above


def test_few_clips_equal_clips_and_a_broken_model_have_a_picture() -> None:
    assert len(plane("t", embeddings(*noise(CLIPS + 5)))["pairs"]) == CLIPS
    same = torch.ones(3, 5)
    for a, v in ((noise(1)), (same, same), (torch.full((3, 5), torch.nan), same)):
        found = plane("t", embeddings(a, v))
        assert len(found["pairs"]) == len(a) and json.loads(json.dumps(found, allow_nan=False)) == found

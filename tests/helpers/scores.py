"""Scores of patches for the tests of selection."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from stella.rng import generator

seeds = st.integers(0, 2**31)
quick = settings(max_examples=40, deadline=None)


def rand(*shape: int, seed: object = 0) -> Tensor:
    return torch.rand(shape, generator=generator("test", seed), dtype=torch.float64)


def randn(*shape: int, seed: object = 0) -> Tensor:
    return torch.randn(shape, generator=generator("test", seed), dtype=torch.float64)


def scores(batch: int, length: int, seed: object = 0) -> Tensor:
    return (3 * randn(batch, length, seed=seed)).softmax(1)


def by_importance(patches: list[int], importance: list[float]) -> list[int]:
    return sorted(patches, key=lambda i: (-importance[i], i))


def assert_permutation(order: Tensor) -> None:
    assert order.dtype == torch.int64
    assert torch.equal(order.sort(1).values, torch.arange(order.shape[1]).expand_as(order))

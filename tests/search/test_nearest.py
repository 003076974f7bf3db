"""Exact search equals a naive float64 search, whatever half precision does to the first pass."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stella.search.nearest import FIRST, error_bound, ranked


def unit(n: int, dim: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    """Unit rows; a small spread puts them close to one another."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(dim, generator=generator) + spread * torch.randn(n, dim, generator=generator)
    return rows / rows.norm(dim=1, keepdim=True)


def naive(shards: dict[int, torch.Tensor], query: torch.Tensor) -> list[tuple[tuple[int, int], float]]:
    scored = [
        ((shard, row), float((vector.double() * query.double()).sum()))
        for shard, rows in shards.items()
        for row, vector in enumerate(rows)
    ]
    return sorted(scored, key=lambda pair: -pair[1])


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    dim=st.sampled_from([1, 3, 96, 768]),
    spread=st.sampled_from([1.0, 0.05, 0.001, 0.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_the_order_is_that_of_exact_products(lengths: list[int], dim: int, spread: float, seed: int) -> None:
    """Also where thousands of scores are closer together than half precision can tell, or equal."""
    rows = unit(sum(lengths), dim, seed, spread).half()
    shards = {5 + number: part for number, part in enumerate(rows.split(lengths))}
    query = unit(1, dim, seed + 1)[0]
    found, expected = list(ranked(shards, query)), naive(shards, query)
    assert [place for place, _ in found] == [place for place, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-14)
    for k in (1, 10):
        assert list(islice(ranked(shards, query), k)) == found[:k]


def test_the_bound_holds_and_is_tight_enough() -> None:
    rows, query = unit(20_000, 768, 1).half(), unit(1, 768, 2)[0]
    exact = rows.double() @ query.double()
    off = ((rows @ query.half()).double() - exact).abs()
    bounds = torch.tensor([error_bound(query, float(score)) for score in exact.abs()[:500]])
    assert bool((off[:500] < bounds).all())
    assert int((exact > exact.topk(10).values[-1] - 2 * error_bound(query, float(exact.max()))).sum()) < FIRST


def test_the_bound_covers_the_rounding_of_the_result() -> None:
    """Of scores near 1, by a query that half precision holds exactly."""
    query = unit(1, 4, 5)[0].half().float()
    rows = (query + 0.01 * unit(2000, 4, 6, 100.0)).half()
    exact = rows.double() @ query.double()
    off = ((rows @ query.half()).double() - exact).abs()
    assert off.max() > 2.0**-12.5 and all(off[i] < error_bound(query, float(exact[i])) for i in range(len(rows)))


def test_rows_that_are_not_allowed_are_left_out() -> None:
    rows = unit(400, 16, 3).half()
    shards = {1: rows[:150], 2: rows[150:]}
    allowed = torch.arange(400) % 3 == 0
    query = unit(1, 16, 4)[0]
    expected = [place for place, _ in naive(shards, query) if (place[1] + 150 * (place[0] == 2)) % 3 == 0]
    assert [place for place, _ in ranked(shards, query, allowed)] == expected
    assert list(ranked(shards, query, torch.zeros(400, dtype=torch.bool))) == [] == list(ranked({}, query))

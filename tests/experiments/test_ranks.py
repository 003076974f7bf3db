"""Mean ranks over shared seeds, and Kendall's τ against counting pairs."""

import math
from itertools import combinations
from random import Random
from statistics import stdev

import pytest

from stella.experiments.ranks import kendall, mean_ranks, shared_seeds


def rows(*values: float | None) -> list[dict[str, str]]:
    return [{"seed": str(seed), "A": "" if value is None else str(value)} for seed, value in enumerate(values)]


def test_ranks_are_paired_over_the_seeds_that_all_have() -> None:
    """Of four seeds only three are shared, and one method leads with two of them."""
    found = {"a": rows(5, 5, 1, 9), "b": rows(4, 4, 4, None), "c": rows(3, 3, 3, 8)}
    assert shared_seeds(found, "A") == ["0", "1", "2"]
    ranks = mean_ranks(found)
    assert {name: rank.mean for name, rank in ranks.items()} == pytest.approx({"a": 5 / 3, "b": 5 / 3, "c": 8 / 3})
    # Ranks of a: 1, 1, 3, deviation √(4/3); the half interval is t(2) · deviation / √3.
    assert ranks["a"].around == pytest.approx(4.30 * math.sqrt(4 / 3) / math.sqrt(3))
    assert str(ranks["c"]) == "2.7 ± 1.4"


@pytest.mark.parametrize(("seeds", "t"), [(10, 2.26), (11, 2.23), (21, 2.09), (31, 2.04), (50, 2.04)])
def test_the_interval_is_that_of_students_t(seeds: int, t: float) -> None:
    first = [seed % 2 for seed in range(seeds)]  # ranks 1 and 2 in turn
    ranks = mean_ranks({"a": rows(*first), "b": rows(*(1 - value for value in first)), "c": rows(*[-1] * seeds)})
    assert ranks["a"].around == pytest.approx(t * stdev(first) / math.sqrt(seeds))


def test_equal_figures_share_their_ranks_and_a_sure_order_has_no_doubt() -> None:
    ranks = mean_ranks({"a": rows(2, 2, 2), "b": rows(2, 2, 2), "c": rows(1, 1, 1), "d": rows(3, 3, 3)})
    assert [(rank.mean, rank.around) for rank in ranks.values()] == [(2.5, 0), (2.5, 0), (4, 0), (1, 0)]


def test_too_few_seeds_or_methods_are_not_ranked() -> None:
    assert mean_ranks({"a": rows(1, 2), "b": rows(1, 2), "c": rows(1, 2)}) == {}
    assert mean_ranks({"a": rows(1, 2, 3), "b": rows(1, 2, 3)}) == {}
    assert mean_ranks({}) == {}


def test_kendall_counts_pairs_that_agree_and_pairs_that_do_not() -> None:
    random = Random(0)
    for _ in range(20):
        pairs = [(random.random(), random.random()) for _ in range(7)]
        agree = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in combinations(pairs, 2)]
        assert kendall(pairs) == pytest.approx((2 * sum(agree) - len(agree)) / len(agree))
    assert kendall([(1, 1), (2, 2), (3, 3)]) == 1 and kendall([(1, 3), (2, 2), (3, 1)]) == -1
    assert kendall([(1, 1), (1, 2), (2, 3)]) == pytest.approx(2 / math.sqrt(2 * 3))  # a tie on one side: τ-b
    assert math.isnan(kendall([(1, 1), (1, 2)]))

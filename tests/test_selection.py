"""Patch selection against loop versions of the paper's equations (test_golden: the recorded scores of the release)."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from helpers.scores import assert_permutation, by_importance, quick, rand, randn, scores, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stella import selection
from stella.errors import ConfigError
from stella.rng import generator


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Relative to the largest entry, as the golden tensors ask."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


# Counts


def test_counts_are_rounded_in_floating_point_as_written() -> None:
    ratios = ((512, 0.375), (784, 0.375), (35, 0.625), (7, 0.5), (100, 0.29))
    assert [selection.kappa(n, ratio) for n, ratio in ratios] == [192, 294, 21, 3, 28]
    assert [selection.visible(n, 0.8) for n in (5, 10, 35, 128, 144, 512, 784)] == [0, 1, 6, 25, 28, 102, 156]


# Scores


def naive_importance(q: Tensor, k: Tensor, beta: float) -> Tensor:
    (batch, heads, len_q, d), len_k = q.shape, k.shape[2]
    out = torch.zeros(batch, len_k, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(len_q):
                weights = [math.exp(float(q[b, h, i] @ k[b, h, j]) / (beta * math.sqrt(d))) for j in range(len_k)]
                out[b] += torch.tensor(weights, dtype=torch.float64) / sum(weights) / (heads * len_q)
    return out


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.sampled_from([0.1, 0.4]), seeds)
def test_importance_is_the_mean_attention_a_key_receives(
    batch: int, heads: int, len_q: int, len_k: int, beta: float, seed: int
) -> None:
    q, k = randn(batch, heads, len_q, 4, seed=(seed, "q")), randn(batch, heads, len_k, 4, seed=(seed, "k"))
    actual = selection.importance(q, k, beta)
    assert_close(actual, naive_importance(q, k, beta))
    assert_close(actual.sum(1), torch.ones(batch, dtype=torch.float64))


def test_importance_carries_no_gradient_and_survives_huge_logits() -> None:
    q, k = 1e4 * randn(2, 2, 5, 4).requires_grad_(), 1e4 * randn(2, 2, 7, 4, seed=1)
    actual = selection.importance(q, k, 0.1)
    assert not actual.requires_grad
    assert torch.isfinite(actual).all()


def test_scores_stay_float32_under_bfloat16_autocast() -> None:
    q, k = (4 * randn(2, 3, 9, 8, seed=i).bfloat16() for i in range(2))
    past, score = randn(2, 3, 8, seed=2).bfloat16(), scores(2, 9).float()

    def compute(q: Tensor, k: Tensor, past: Tensor, score: Tensor) -> list[Tensor]:
        query = selection.weighted_query(q, score, 4)
        return [selection.importance(q, k, 0.1), query, selection.correlation(k, query, past, score, 4)]

    expected = compute(q.double(), k.double(), past.double(), score.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = compute(q, k, past, score)
    for narrow, wide in zip(actual, expected, strict=True):
        assert_close(narrow, wide.float(), 1e-5)


def naive_query(q: Tensor, importance: Tensor, kappa: int) -> Tensor:
    out = torch.zeros(q.shape[0], q.shape[1], q.shape[3], dtype=torch.float64)
    for b, row in enumerate(importance.tolist()):
        top = by_importance(list(range(len(row))), row)[:kappa]
        for i in top:
            out[b] += row[i] / sum(row[j] for j in top) * q[b, :, i]
    return out


def naive_correlation(k: Tensor, now: Tensor, past: Tensor, importance: Tensor, kappa: int) -> Tensor:
    out = torch.zeros_like(importance)
    heads, d = k.shape[1], k.shape[3]
    for b, row in enumerate(importance.tolist()):
        for i in by_importance(list(range(len(row))), row)[:kappa]:
            for h in range(heads):
                a, p = (
                    math.exp(float(query[h] @ k[b, h, i]) / math.sqrt(d)) for query in (now[b], past[b % len(past)])
                )
                out[b, i] += p / (a + p) / heads
    return out


@quick
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.integers(1, 6), st.floats(0.2, 1), seeds)
def test_query_and_correlation_are_their_equations(
    batch: int, heads: int, length: int, drawn: int, keep: float, seed: int
) -> None:
    kappa = max(1, selection.kappa(length, keep))
    q, k = (randn(batch, heads, length, 4, seed=(seed, i)) for i in range(2))
    importance, past = scores(batch, length, seed), randn(drawn, heads, 4, seed=(seed, "past"))
    query = selection.weighted_query(q, importance, kappa)
    assert_close(query, naive_query(q, importance, kappa))
    actual = selection.correlation(k, query, past, importance, kappa)
    assert_close(actual, naive_correlation(k, query, past, importance, kappa))
    assert ((actual > 0).sum(1) == kappa).all()


def test_an_empty_memory_correlates_with_nothing() -> None:
    actual = selection.correlation(randn(2, 3, 6, 4), randn(2, 3, 4), None, scores(2, 6), 3)
    assert torch.equal(actual, torch.zeros(2, 6, dtype=torch.float64))


def test_a_query_of_patches_without_importance_is_their_mean() -> None:
    q = randn(2, 3, 6, 4)
    assert_close(selection.weighted_query(q, torch.zeros(2, 6).double(), 6), q.mean(2))


# MATS


@quick
@given(st.integers(1, 3), st.integers(2, 5), st.integers(1, 6), seeds)
def test_mats_puts_what_moves_most_first(batch: int, num_steps: int, per_step: int, seed: int) -> None:
    tokens = randn(batch, num_steps * per_step, 3, seed=seed)
    order = selection.mats(tokens, num_steps)
    assert_permutation(order)
    for b, row in enumerate(order.tolist()):
        change = []
        for i in range(num_steps * per_step):
            now = i + per_step if i < per_step else i
            change.append(math.dist(tokens[b, now].tolist(), tokens[b, now - per_step].tolist()))
        assert all(change[i] >= change[j] - 1e-12 for i, j in pairwise(row))


def test_mats_of_a_single_frame_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="has 1; use at least two frames"):
        selection.mats(randn(1, 4, 3), 1)


# Visible, reconstructed, dropped


@quick
@given(st.integers(1, 3), st.integers(1, 40), st.floats(0, 1), st.floats(0, 1), seeds)
def test_masking_has_exact_counts_and_loses_nothing(
    batch: int, length: int, keep: float, share: float, seed: int
) -> None:
    kappa = selection.kappa(length, keep)
    num_visible = int(kappa * share)
    noise = rand(batch, kappa, seed=(seed, 1))
    seen, masked = selection.random_mask(noise, num_visible)
    assert seen.shape == (batch, num_visible)
    assert masked.shape == (batch, kappa - num_visible)
    for b in range(batch):
        ranked = sorted(range(kappa), key=lambda i: float(noise[b, i]))
        assert set(seen[b].tolist()) == set(ranked[:num_visible])
        assert set(masked[b].tolist()) == set(ranked[num_visible:])


# Generators, rows, graphs

Select = Callable[[Tensor, Tensor, torch.Generator], Tensor]
selects: list[Select] = [
    selection.select_patches,
    lambda i, c, g: selection.select_time_chunks(i, c, g, num_freq=4, chunk=4),
    lambda i, c, g: selection.select_freq_chunks(i, c, g, num_freq=4, chunk=1),
]


@pytest.mark.parametrize("select", selects)
def test_the_same_generator_gives_the_same_order(select: Select) -> None:
    importance, correlation = scores(3, 60).float(), rand(3, 60).float()
    first, again, other = (select(importance, correlation, generator(seed)) for seed in (1, 1, 2))
    assert_permutation(first)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    certain = select(importance, torch.ones(3, 60), generator(1))  # all pruned: importance alone decides
    assert torch.equal(certain, importance.argsort(1, descending=True))


def graph(
    q: Tensor, k: Tensor, past: Tensor, prune_noise: Tensor, draw_noise: Tensor, mask_noise: Tensor
) -> dict[str, Tensor]:
    """Everything that decides, in one graph: [B, H, 60, 4] queries and keys to visible and masked patches."""
    score = selection.importance(q, k, 0.4)
    kappa = selection.kappa(60, 0.5)
    query = selection.weighted_query(q, score, kappa)
    pruned = selection.prune(selection.correlation(k, query, past, score, kappa), prune_noise)
    orders = {
        "patches": selection.draw_patches(score, pruned, draw_noise),
        "time": selection.draw_time_chunks(score, pruned, draw_noise[:, :4], 4, 4),
        "freq": selection.draw_freq_chunks(score, pruned, draw_noise[:, :4], 4, 1),
        "mats": selection.mats(q.transpose(1, 2).flatten(2), 15),
        "random": selection.random_order(draw_noise),
    }
    seen, masked = selection.random_mask(mask_noise, selection.visible(60, 0.8))
    return orders | {"seen": seen, "masked": masked}


def graph_inputs() -> tuple[Tensor, ...]:
    q, k, past = (randn(3, 2, 60, 4, seed=i) for i in range(3))
    return q, k, past[:2, :, 0], rand(3, 60), rand(3, 60, seed=1), rand(3, 30, seed=2)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_into_one_graph_with_the_same_result(backend: str) -> None:
    """In float64, so that no two scores are near enough to change places by rounding."""
    expected = graph(*graph_inputs())
    actual = torch.compile(graph, fullgraph=True, backend=backend)(*graph_inputs())
    for name, order in expected.items():
        assert torch.equal(actual[name], order), name


@pytest.mark.slow
def test_compiled_code_draws_the_same_chunks() -> None:
    """Through Inductor, with a short last chunk and pruned patches in it."""
    importance, pruned, noise = scores(3, 60).float(), rand(3, 60) < 0.3, rand(3, 4, seed=1)
    compiled = torch.compile(selection.draw_time_chunks, fullgraph=True)
    expected = selection.draw_time_chunks(importance, pruned, noise, 4, 4)
    assert torch.equal(compiled(importance, pruned, noise, 4, 4), expected)


def test_rows_do_not_see_each_other() -> None:
    whole, inputs = graph(*graph_inputs()), graph_inputs()
    alone = [x[1:2] for x in inputs]  # row 1 also meets past row 1
    for name, order in graph(*alone).items():
        assert torch.equal(order, whole[name][1:2]), name


def test_a_chunk_without_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunk=0 must be at least 1"):
        selection.select_time_chunks(scores(1, 8), torch.zeros(1, 8), generator(1), num_freq=2, chunk=0)

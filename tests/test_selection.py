"""Patch selection against loop versions of the paper's equations (test_golden: the recorded scores of the release)."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stella import selection
from stella.errors import ConfigError
from stella.rng import generator

seeds = st.integers(0, 2**31)
quick = settings(max_examples=40, deadline=None)


def rand(*shape: int, seed: object = 0) -> Tensor:
    return torch.rand(shape, generator=generator("test", seed), dtype=torch.float64)


def randn(*shape: int, seed: object = 0) -> Tensor:
    return torch.randn(shape, generator=generator("test", seed), dtype=torch.float64)


def scores(batch: int, length: int, seed: object = 0) -> Tensor:
    return (3 * randn(batch, length, seed=seed)).softmax(1)


def exponential(noise: float) -> float:
    return -math.log1p(-noise)


def by_importance(patches: list[int], importance: list[float]) -> list[int]:
    return sorted(patches, key=lambda i: (-importance[i], i))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Relative to the largest entry, as the golden tensors ask."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def assert_permutation(order: Tensor) -> None:
    assert order.dtype == torch.int64
    assert torch.equal(order.sort(1).values, torch.arange(order.shape[1]).expand_as(order))


def p_value(observed: Tensor, probability: Tensor) -> float:
    """Of a chi-square test that these counts come from these probabilities."""
    expected = probability * observed.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2).double(), statistic / 2))


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


# Draws

levels = st.sampled_from([0.0, 5e-324, 1e-310, 1e-200, 1e-6, 1e-3, 0.5, 1.0])


@st.composite
def clips(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Importances with zeros, denormals and ties, pruned flags and noise: each [B, L], float64."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    cells = batch * length
    importance = torch.tensor(draw(st.lists(levels, min_size=cells, max_size=cells)), dtype=torch.float64)
    pruned = torch.tensor(draw(st.lists(st.booleans(), min_size=cells, max_size=cells)))
    noise = rand(cells, seed=draw(seeds)) * draw(st.sampled_from([0.0, 1e-12, 1.0]))
    return importance.view(batch, -1), pruned.view(batch, -1), noise.view(batch, -1)


@quick
@given(clips(), st.sampled_from([torch.float16, torch.float32, torch.float64]))
def test_each_patch_once_and_the_pruned_last_whatever_the_scores(
    clip: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> None:
    importance, pruned, noise = clip[0].to(dtype), clip[1], clip[2]
    length = importance.shape[1]
    num_freq = next(n for n in (4, 3, 2, 1) if length % n == 0)
    orders = [
        selection.draw_patches(importance, pruned, noise),
        selection.draw_time_chunks(importance, pruned, noise[:, : -(-length // num_freq // 2)], num_freq, 2),
        selection.draw_freq_chunks(importance, pruned, noise[:, :num_freq], num_freq, 1),
    ]
    # Scores under the least normal number count as equal; float16 is computed in float32.
    scored = importance.to(torch.promote_types(dtype, torch.float32))
    scored = scored.clamp_min(torch.finfo(scored.dtype).tiny)
    for order in orders:
        assert_permutation(order)
        flags = pruned.gather(1, order).int()
        assert (flags.diff(dim=1) >= 0).all()
        for row, flag, score in zip(order, flags.bool(), scored, strict=True):
            assert (score[row[flag]].diff() <= 0).all()


@quick
@given(st.integers(1, 3), st.integers(1, 30), seeds)
def test_patches_arrive_by_exponential_race(batch: int, length: int, seed: int) -> None:
    importance, pruned, noise = (
        scores(batch, length, seed),
        rand(batch, length, seed=(seed, 1)) < 0.3,
        rand(batch, length),
    )
    for b, row in enumerate(selection.draw_patches(importance, pruned, noise).tolist()):
        score = importance[b].tolist()
        out = [i for i in range(length) if pruned[b, i]]
        kept = [i for i in range(length) if not pruned[b, i]]
        assert row == sorted(kept, key=lambda i: exponential(float(noise[b, i])) / score[i]) + by_importance(out, score)


def drawn_chunks(importance: list[float], noise: list[float], num_freq: int, chunk: int) -> list[int]:
    size = chunk * num_freq
    parts = [importance[at : at + size] for at in range(0, len(importance), size)]
    return sorted(range(len(parts)), key=lambda c: exponential(noise[c]) / (sum(parts[c]) / len(parts[c])))


def paper_kept(chunks: list[int], pruned: Tensor, num_freq: int, chunk: int, kappa: int) -> set[int]:
    """Alg. audio_time_chunk_select for one clip and drawn chunks: what `argsort(F_a)` puts first, as a set."""
    flags = pruned.clone().view(-1, num_freq)
    num_tokens = 0
    for j, t in enumerate(chunks):
        steps = slice(t * chunk, (t + 1) * chunk)
        num_tokens += int((~flags[steps]).sum())
        if num_tokens > kappa:
            last = flags[steps].reshape(-1)
            counted = (~last).flip(0).cumsum(0).tolist()
            tail = counted.index(num_tokens - kappa) + 1  # the shortest tail that holds all there is too many
            last[-tail:] = True
            flags[steps] = last.view(-1, num_freq)
            for other in chunks[j + 1 :]:
                flags[other * chunk : (other + 1) * chunk] = True
            break
    return set((~flags.view(-1)).nonzero().flatten().tolist())


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 14),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.floats(0, 1),
    seeds,
)
def test_audio_keeps_what_the_papers_algorithm_keeps(
    num_time: int, num_freq: int, chunk: int, rate: float, keep: float, seed: int
) -> None:
    length = num_time * num_freq
    importance, pruned = scores(2, length, seed), rand(2, length, seed=(seed, 1)) < rate
    noise = rand(2, selection.num_chunks(length, num_freq, chunk), seed=(seed, 2))
    order = selection.draw_time_chunks(importance, pruned, noise, num_freq, chunk)
    kappa = selection.kappa(length, keep)
    for b, row in enumerate(order.tolist()):
        score = importance[b].tolist()
        chunks = drawn_chunks(score, noise[b].tolist(), num_freq, chunk)
        unpruned = int((~pruned[b]).sum())
        expected = paper_kept(chunks, pruned[b], num_freq, chunk, kappa)
        assert set(row[: min(kappa, unpruned)]) == expected
        # Chunk by chunk as drawn, in order inside each, then the pruned.
        places = [(chunks.index(i // (chunk * num_freq)), i) for i in row[:unpruned]]
        assert places == sorted(places)
        assert row[unpruned:] == by_importance([i for i in range(length) if pruned[b, i]], score)


@quick
@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 4), seeds)
def test_by_frequency_is_by_time_with_axes_exchanged(num_time: int, num_freq: int, chunk: int, seed: int) -> None:
    length = num_time * num_freq
    importance, pruned = scores(2, length, seed), rand(2, length, seed=(seed, 1)) < 0.3
    noise = rand(2, selection.num_chunks(length, num_time, chunk), seed=(seed, 2))
    order = selection.draw_freq_chunks(importance, pruned, noise, num_freq, chunk)
    turned = [t * num_freq + f for f in range(num_freq) for t in range(num_time)]
    for b, row in enumerate(order.tolist()):
        score = importance[b].tolist()
        chunks = drawn_chunks([score[i] for i in turned], noise[b].tolist(), num_time, chunk)
        by_place = sorted(
            range(length), key=lambda i: (chunks.index(i % num_freq // chunk), i % num_freq, i // num_freq)
        )
        kept = [i for i in by_place if not pruned[b, i]]
        assert row == kept + by_importance([i for i in range(length) if pruned[b, i]], score)


@quick
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), seeds)
def test_blocks_of_neighbours_stay_together(frames: int, rows: int, columns: int, seed: int) -> None:
    grid, length = (frames, rows, columns), frames * rows * columns
    importance, pruned = scores(2, length, seed), rand(2, length, seed=(seed, 1)) < 0.3
    noise = rand(2, selection.num_blocks(grid), seed=(seed, 2))
    order = selection.draw_blocks(importance, pruned, noise, grid)
    place = [(i // (rows * columns), i // columns % rows // 2, i % columns // 2) for i in range(length)]
    blocks = sorted(set(place))
    assert len(blocks) == noise.shape[1]
    for b, row in enumerate(order.tolist()):
        score = importance[b].tolist()
        race = {
            block: -sum(s for s, at in zip(score, place, strict=True) if at == block) / exponential(float(noise[b, n]))
            for n, block in enumerate(blocks)
        }
        by_place = sorted(range(length), key=lambda i: (race[place[i]], i))
        kept = [i for i in by_place if not pruned[b, i]]
        assert row == kept + by_importance([i for i in range(length) if pruned[b, i]], score)


ROWS = 40_000


def test_first_and_second_patch_follow_the_importances() -> None:
    weights = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    pruned = torch.tensor([False, False, False, True, False]).expand(ROWS, 5)
    noise = selection.uniform(ROWS, 5, generator=generator("chi", 1))
    order = selection.draw_patches(weights.expand(ROWS, 5), pruned, noise)
    rest = weights.clone().double()
    rest[3] = 0
    pairs = torch.stack([rest / rest.sum() * rest[j] / (rest.sum() - rest) for j in range(5)], 1)  # [first, second]
    possible = [i * 5 + j for i in range(5) for j in range(5) if i != j and 3 not in (i, j)]
    observed = (order[:, 0] * 5 + order[:, 1]).bincount(minlength=25)
    assert observed[possible].sum() == ROWS
    assert p_value(observed[possible], pairs.flatten()[possible]) > 1e-3
    assert p_value(observed[possible], torch.full((12,), 1 / 12)) < 1e-9  # the test can tell


def test_chunks_follow_their_mean_importance_also_the_shorter_last_one() -> None:
    importance = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.1, 0.1, 0.1, 0.1, 0.9, 0.3])  # five time steps of two patches
    noise = selection.uniform(ROWS, 3, generator=generator("chi", 2))
    pruned = torch.zeros(ROWS, 10, dtype=torch.bool)
    order = selection.draw_time_chunks(importance.expand(ROWS, 10), pruned, noise, num_freq=2, chunk=2)
    means = torch.tensor([0.25, 0.1, 0.6], dtype=torch.float64)
    observed = (order[:, 0] // 4).bincount(minlength=3)
    assert p_value(observed, means / means.sum()) > 1e-3


def test_pruning_is_bernoulli() -> None:
    noise = selection.uniform(ROWS, 3, generator=generator("chi", 3))
    noise[0] = 0  # the least that uniform noise can be
    rate = selection.prune(torch.tensor([0.0, 0.3, 1.0]).expand(ROWS, 3), noise).double().mean(0)
    assert rate[0] == 0
    assert rate[2] == 1
    assert abs(rate[1] - 0.3) < 4 * math.sqrt(0.21 / ROWS)


def test_random_orders_are_equally_likely() -> None:
    order = selection.random_order(selection.uniform(ROWS, 3, generator=generator("chi", 4)))
    assert_permutation(order)
    observed = (order * torch.tensor([9, 3, 1])).sum(1).bincount(minlength=27)
    assert p_value(observed[observed > 0], torch.full((6,), 1 / 6)) > 1e-3


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

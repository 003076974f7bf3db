"""Patches drawn by their scores: order, chunks and frequencies against loop versions of the paper's algorithms."""

import math

import torch
from helpers.scores import assert_permutation, by_importance, quick, rand, scores, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stella import selection
from stella.rng import generator


def exponential(noise: float) -> float:
    return -math.log1p(-noise)


def p_value(observed: Tensor, probability: Tensor) -> float:
    """Of a chi-square test that these counts come from these probabilities."""
    expected = probability * observed.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2).double(), statistic / 2))


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

"""Patch selection: the vectorised functions of `stella.selection` against loops written from the paper.

    python benchmarks/selection.py            # a minute on one thread; measures CPU time

Both sides have the same inputs: batch 48 at the shapes of `base` (12 heads of 64, 512 audio patches = 64 times × 8
mels, 784 video patches), κ half of the patches, chunks of 4 times, float32.
- *audio rule*: from I_a and C_a to the order of audio patches, random numbers included. The loop is the paper's
  algorithm for audio patches, per clip and per chunk.
- *video rule*: from I_v and C_v to the order of video patches. The loop runs per clip and calls `torch.multinomial`,
  which sorts as ours does, so only the overhead of the calls can be saved.
- *correlation*: from q, k, I and past queries to C of both modalities. Both sides are bound by reading q and k.
- *importance*: from q and k to I of both modalities: the same matrix products on both sides.

Two runs on two shared cores (AVX-512), torch 2.13: audio rule 24.4, 23.1×; video rule 1.8, 1.7×; both rules 8.9, 8.2×;
correlation 2.9, 2.9×; importance 1.0, 0.8×.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stella import selection
from stella.rng import generator

BATCH, HEADS, DIM = 48, 12, 64
NUM_TIME, NUM_FREQ, CHUNK = 64, 8, 4
LEN_A, LEN_V = NUM_TIME * NUM_FREQ, 784
KAPPA_A, KAPPA_V = selection.kappa(LEN_A, 0.5), selection.kappa(LEN_V, 0.5)
BETA = 0.4
SCALE = 1 / (BETA * DIM**0.5)

Pair = tuple[Tensor, Tensor]  # audio, video


def loop_audio(importance: Tensor, correlation: Tensor, rng: torch.Generator) -> Tensor:
    """The paper's algorithm for one clip, with two slips corrected (a shape, and the tail of the last chunk)."""
    pruned = torch.bernoulli(correlation, generator=rng).bool().reshape(NUM_TIME, NUM_FREQ)
    pruned_t = pruned.sum(dim=1)
    by_time = importance.reshape(NUM_TIME, NUM_FREQ).sum(dim=1)
    by_chunk = F.avg_pool1d(by_time[None], kernel_size=CHUNK)[0]
    num_chunk = len(by_chunk)
    t_select = torch.multinomial(by_chunk, num_samples=num_chunk, generator=rng)
    num_tokens = torch.tensor(0)
    for j in range(num_chunk):
        t = t_select[j]
        num_prune = pruned_t[t * CHUNK : (t + 1) * CHUNK].sum()
        num_tokens = num_tokens + (CHUNK * NUM_FREQ - num_prune)
        if num_tokens > KAPPA_A:
            last = pruned[t * CHUNK : (t + 1) * CHUNK].reshape(-1)
            counted = torch.cumsum(torch.flip(~last, dims=(0,)), dim=0)
            tail = (counted == num_tokens - KAPPA_A).int().argmax()
            last[-(tail + 1) :] = True
            pruned[t * CHUNK : (t + 1) * CHUNK] = last.reshape(CHUNK, NUM_FREQ)
            for k in range(j + 1, num_chunk):
                t_prune = t_select[k]
                pruned[t_prune * CHUNK : (t_prune + 1) * CHUNK] = True
            break
    return torch.argsort(pruned.view(-1).float())


def loop_video(importance: Tensor, correlation: Tensor, rng: torch.Generator) -> Tensor:
    """The κ selected video patches of one clip."""
    pruned = torch.bernoulli(correlation, generator=rng).bool()
    left = importance.clone()
    left[pruned] = 0
    return torch.multinomial(left, KAPPA_V, generator=rng)


def loop_importance(q: Tensor, k: Tensor) -> Tensor:
    maps = (torch.softmax(q_i * SCALE @ k_i.mT, dim=-1) for q_i, k_i in zip(q, k, strict=True))
    return torch.stack([attention.mean(dim=(0, 1)) for attention in maps])


def loop_correlation(qs: Pair, ks: Pair, scores: Pair, pasts: Pair) -> list[Tensor]:
    """Attention-weighted queries and the correlation with past ones, clip by clip."""
    out = [torch.zeros_like(score) for score in scores]
    for i in range(BATCH):
        tops = [s[i].argsort(descending=True)[:kappa] for s, kappa in zip(scores, (KAPPA_A, KAPPA_V), strict=True)]
        queries = []
        for q, score, top in zip(qs, scores, tops, strict=True):
            weight = score[i, top] / score[i, top].sum()
            queries.append((q[i][:, top] * weight[None, :, None]).sum(dim=1))
        for this, other in ((0, 1), (1, 0)):
            key = ks[this][i][:, tops[this]]
            pair = torch.stack((queries[other], pasts[other][i % len(pasts[other])]), dim=-1)
            out[this][i, tops[this]] = torch.softmax(key @ pair / DIM**0.5, dim=-1)[..., 1].mean(dim=0)
    return out


def our_correlation(qs: Pair, ks: Pair, scores: Pair, pasts: Pair) -> list[Tensor]:
    query_a, query_v = (
        selection.weighted_query(q, s, k) for q, s, k in zip(qs, scores, (KAPPA_A, KAPPA_V), strict=True)
    )
    return [
        selection.correlation(ks[0], query_v, pasts[1], scores[0], KAPPA_A),
        selection.correlation(ks[1], query_a, pasts[0], scores[1], KAPPA_V),
    ]


def milliseconds(loop: Callable[[], object], ours: Callable[[], object]) -> tuple[float, float]:
    """Median CPU time of both. They alternate every 0.3 seconds (or one call), so that a busy machine slows both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(8):
        for kept, function in zip(times, (loop, ours), strict=True):
            end = time.perf_counter() + 0.3
            while True:
                start = time.process_time()
                function()
                kept.append(1e3 * (time.process_time() - start))
                if time.perf_counter() > end:
                    break
    return statistics.median(times[0]), statistics.median(times[1])


def compare(console: Console) -> None:
    torch.set_num_threads(1)
    rng = generator("benchmarks", "selection")
    q_a, k_a = (torch.randn(BATCH, HEADS, LEN_A, DIM, generator=rng) for _ in range(2))
    q_v, k_v = (torch.randn(BATCH, HEADS, LEN_V, DIM, generator=rng) for _ in range(2))
    past_a, past_v = (torch.randn(BATCH, HEADS, DIM, generator=rng) for _ in range(2))
    score_a, score_v = selection.importance(q_v, k_a, BETA), selection.importance(q_a, k_v, BETA)
    given = (q_a, q_v), (k_a, k_v), (score_a, score_v), (past_a, past_v)
    corr_a, corr_v = our_correlation(*given)
    for ours, loop in zip((corr_a, corr_v), loop_correlation(*given), strict=True):
        torch.testing.assert_close(ours, loop, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(score_v, loop_importance(q_a, k_v), rtol=1e-4, atol=1e-7)

    def rows(rule: Callable[[Tensor, Tensor, torch.Generator], Tensor], score: Tensor, corr: Tensor) -> list[Tensor]:
        return [rule(score[i], corr[i], rng) for i in range(BATCH)]

    times = {
        "audio rule": milliseconds(
            lambda: rows(loop_audio, score_a, corr_a),
            lambda: selection.select_time_chunks(score_a, corr_a, rng, NUM_FREQ, CHUNK),
        ),
        "video rule": milliseconds(
            lambda: rows(loop_video, score_v, corr_v), lambda: selection.select_patches(score_v, corr_v, rng)
        ),
        "correlation": milliseconds(lambda: loop_correlation(*given), lambda: our_correlation(*given)),
        "importance": milliseconds(
            lambda: (loop_importance(q_v, k_a), loop_importance(q_a, k_v)),
            lambda: (selection.importance(q_v, k_a, BETA), selection.importance(q_a, k_v, BETA)),
        ),
    }
    table = Table(title=f"selection, batch {BATCH}, one thread, torch {torch.__version__}")
    for column in ("part", "loop CPU ms", "ours CPU ms", "ratio"):
        table.add_column(column, justify="left" if column == "part" else "right")

    def add(name: str, *parts: str) -> None:
        loop, ours = (sum(times[part][side] for part in parts) for side in (0, 1))
        table.add_row(name, f"{loop:.1f}", f"{ours:.2f}", f"{loop / ours:.1f}×")

    for part in times:
        add(part, part)
    add("both rules", "audio rule", "video rule")
    add("all but importance", "audio rule", "video rule", "correlation")
    add("all", *times)
    console.print(table)


if __name__ == "__main__":
    compare(Console())

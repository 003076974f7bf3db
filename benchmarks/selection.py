"""Patch selection: our vectorised functions against a loop written from the paper, and four ways to importance.

    python benchmarks/selection.py            # two minutes, 2 GB; one thread, measures CPU time

First table: importance of 784 video patches for 512 audio queries at batch 8, each way in a process of its own, with
the memory it takes beyond its inputs. Head by head is what `selection.importance` does: lean, half the time of the full
map, four lines. The gradient of fused attention for V must compute those for q and k as well. Not in the table:
bfloat16 maps, which would round the logits that a small β magnifies.

Second table, the same inputs on both sides, batch 48 at `base` shapes (12 heads of 64, 512 audio patches = 64 times × 8
mels, 784 video patches, κ half of them, chunks of 4 times), float32:
- *audio rule*: from I_a and C_a to the order of audio patches, random numbers included. The loop is the paper's
  Alg. audio_time_chunk_select, per clip and per chunk: this is the paper's pseudo-code, and what 20× is asked of.
- *video rule*: from I_v and C_v to the order of video patches, likewise. The loop runs per clip alone: inside it stands
  one native `torch.multinomial`, which has to sort as we do, so that little more than the calls' overhead can be saved.
- *correlation*: from q, k, I and past queries to C of both modalities. Bound by reading q and k on both sides.
- *importance*: from q and k to I of both modalities; the same matrix products on both sides.

Recorded on two shared cores (AVX-512), torch 2.13, two runs:
    full map 274, 259 ms, 300 MiB; head by head 129, 151 ms, 45 MiB; query chunks 311, 291 ms, 45 MiB;
    gradient of v 446, 470 ms, 111 MiB
    audio rule 24.4, 23.1×; video rule 1.8, 1.7×; both rules 8.9, 8.2×; correlation 2.9, 2.9×; importance 1.0, 0.8×
With single calls in turn instead of turns of 0.3 s, so that ours always starts with cold caches, the audio rule gains
17 to 21×. Query chunks took 128 to 311 ms, head by head 45 to 73 MiB in other runs.
"""

import multiprocessing
import resource
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
    """The paper's pseudo-code for one clip; its slips are read sensibly (the shape and the tail of the last chunk)."""
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
    """Eq. video_patch_select for one clip, as far as the κ kept."""
    pruned = torch.bernoulli(correlation, generator=rng).bool()
    left = importance.clone()
    left[pruned] = 0
    return torch.multinomial(left, KAPPA_V, generator=rng)


def loop_importance(q: Tensor, k: Tensor) -> Tensor:
    maps = (torch.softmax(q_i * SCALE @ k_i.mT, dim=-1) for q_i, k_i in zip(q, k, strict=True))
    return torch.stack([attention.mean(dim=(0, 1)) for attention in maps])


def loop_correlation(qs: Pair, ks: Pair, scores: Pair, pasts: Pair) -> list[Tensor]:
    """Eq. discriminative_info_gather and forget_induce_matrix, clip by clip."""
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
    """Medians of CPU time; both sides take turns of 0.3 seconds (or one call), so that a busy machine slows both."""
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


def full_map(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q * SCALE @ k.mT, dim=-1).mean(dim=(1, 2))


def head_by_head(q: Tensor, k: Tensor) -> Tensor:
    return selection.importance(q, k, BETA)


def query_chunks(q: Tensor, k: Tensor) -> Tensor:
    total = k.new_zeros(k.shape[0], k.shape[2])
    for part in q.split(64, dim=2):
        total += torch.softmax(part * SCALE @ k.mT, dim=-1).sum(dim=(1, 2))
    return total / (q.shape[1] * q.shape[2])


@torch.enable_grad()
def gradient_of_v(q: Tensor, k: Tensor) -> Tensor:
    """The columns' sums of attention are the gradient of its output's sum for V; the map itself never exists."""
    v = torch.zeros_like(k, requires_grad=True)
    out = F.scaled_dot_product_attention(q, k, v, scale=SCALE)
    (gradient,) = torch.autograd.grad(out[..., 0].sum(), v)
    return gradient[..., 0].mean(dim=1) / q.shape[2]


def measure(way: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float, float]:
    """Milliseconds, MiB beyond the inputs, largest relative error against float64; meant for a fresh process."""
    torch.set_num_threads(1)
    rng = generator("benchmarks", "importance")
    q, k = (torch.randn(8, HEADS, length, DIM, generator=rng) for length in (LEN_A, LEN_V))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad():
        result = way(q, k)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        times = []
        for _ in range(5):
            start = time.process_time()
            way(q, k)
            times.append(1e3 * (time.process_time() - start))
        exact = full_map(q[:1].double(), k[:1].double())
    return statistics.median(times), peak / 1024, float(((result[:1] - exact).abs() / exact).max())


def ways(console: Console) -> None:
    table = Table(title="importance, batch 8, 12 heads, 512 queries, 784 keys, one thread")
    for column in ("way", "CPU ms", "MiB", "error"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way in (full_map, head_by_head, query_chunks, gradient_of_v):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            ms, mib, error = pool.apply(measure, (way,))
        table.add_row(way.__name__.replace("_", " "), f"{ms:.0f}", f"{mib:.0f}", f"{error:.0e}")
    console.print(table)


if __name__ == "__main__":
    ways(Console())  # first: a child's peak memory starts from its parent's
    compare(Console())

"""Which patches a step trains on: scores, pruning and draws, one pure function per equation of the paper (Sec. 4).

- An *order* [B, L] is a permutation of each clip's patches; its first κ = `kappa(L, keep_ratio)` are kept. Patches are
  time-major: video frame by frame, audio time step by time step.
- Random functions take uniform `noise` in [0, 1), so that they can be compiled and recorded in CUDA graphs. The
  `select_*` functions at the end draw that noise from a generator on the scores' device.
- Nothing loops over clips or chunks, has shapes that depend on values, or waits for the device.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.errors import ConfigError
from stella.losses import wide


def kappa(length: int, keep_ratio: float) -> int:
    """Number of patches kept out of `length`, rounded in floating point like the published release."""
    if not 0 <= keep_ratio <= 1:
        raise ConfigError(f"keep_ratio={keep_ratio} is a share of a clip's patches; it must lie in 0…1")
    return int(length * keep_ratio)


def visible(length: int, mask_ratio: float) -> int:
    """Number of visible patches: a share of all `length` patches, also when only some are selected."""
    return int(length * (1 - mask_ratio))


# ---- scores


@torch.no_grad()
def importance(q: Tensor, k: Tensor, beta: float) -> Tensor:
    """I [B, Lk], the mean attention that each patch receives from the other modality (Eq. 1 and 2); rows sum to 1.

    q [B, H, Lq, d] are the other modality's queries, k [B, H, Lk, d] the keys of the patches scored. In float32 at
    least, since a small β amplifies rounding errors of the logits. One head at a time: a full map takes H times the
    memory.
    """
    scale = 1 / (math.sqrt(q.shape[-1]) * beta)
    with torch.autocast(q.device.type, enabled=False):
        q, k = wide(q), wide(k)
        total = k.new_zeros(k.shape[0], k.shape[2])
        for head in range(q.shape[1]):
            attention = torch.softmax(q[:, head] * scale @ k[:, head].mT, dim=-1)  # [B, Lq, Lk]
            total = total + attention.mean(dim=1)
        return total / q.shape[1]


def weighted_query(q: Tensor, importance: Tensor, kappa: int) -> Tensor:
    """q̂ [B, H, d], the mean query of the κ most important patches, weighted by importance (Eq. 3).

    q [B, H, L, d] and importance [B, L] belong to the same modality.
    """
    if kappa < 1:
        raise ConfigError(f"the keep ratio leaves {kappa} of {q.shape[2]} patches; raise it or use a longer input")
    weight = torch.where(_top(importance, kappa), _positive(importance), 0)
    weight = weight / weight.sum(dim=1, keepdim=True)
    with torch.autocast(q.device.type, enabled=False):
        return (weight[:, None, None] @ wide(q)).squeeze(2)


def pair_past(rows: Tensor, batch: int) -> Tensor:
    """Pair clip i with drawn row i modulo the number of rows: [n, …] -> [batch, …]."""
    return rows[torch.arange(batch, device=rows.device) % len(rows)]


def correlation(k: Tensor, query_now: Tensor, query_past: Tensor | None, importance: Tensor, kappa: int) -> Tensor:
    """C [B, L], how much a patch correlates with the past rather than with its own pair (Eq. 4).

    k [B, H, L, d] and importance [B, L] belong to the modality scored; query_now [B, H, d] and query_past [n, H, d]
    (any n, see `pair_past`) are q̂ of the *other* modality. C is 0 outside the top κ, and everywhere while the memory
    is empty (query_past is None).
    """
    if query_past is None:
        return torch.zeros_like(importance)
    with torch.autocast(k.device.type, enabled=False):
        change = wide(pair_past(query_past, len(k))) - wide(query_now)  # [B, H, d]
        logit = (wide(k) @ change.unsqueeze(-1)).squeeze(-1) / math.sqrt(k.shape[-1])  # [B, H, L]
    # The softmax over the pair {past, current} is the sigmoid of the difference of their logits.
    return torch.where(_top(importance, kappa), torch.sigmoid(logit).mean(dim=1), 0)


# ---- draws: pure functions of uniform noise


def prune(correlation: Tensor, noise: Tensor) -> Tensor:
    """F ~ Bernoulli(C): bool [B, L], true for patches to exclude (Sec. 4.3)."""
    return noise < correlation


def draw_patches(importance: Tensor, pruned: Tensor, noise: Tensor) -> Tensor:
    """An order drawn without replacement ∝ I, pruned patches last (Eq. 5); all arguments are [B, L].

    The rule for video, and for audio without constraint. If fewer than κ patches are unpruned, the pruned ones follow,
    most important first; the same holds for the chunked draws below.
    """
    importance = _positive(importance)
    return _order(-_bits(_race(importance, noise)), pruned, importance)


def draw_time_chunks(importance: Tensor, pruned: Tensor, noise: Tensor, num_freq: int, chunk: int) -> Tensor:
    """Audio by chunks of `chunk` time steps, pruned patches last (Alg. 1).

    Chunks are drawn without replacement ∝ their mean importance (pruned patches included), with noise
    [B, num_chunks(…)]. Patches keep their order inside a chunk, so cutting at κ cuts the tail of the last chunk. If the
    time steps do not divide by `chunk`, the last chunk is shorter and its mean is taken over what it has.
    """
    importance = _positive(importance)
    size = chunk * num_freq
    by_chunk = F.avg_pool1d(importance.unsqueeze(1), size, ceil_mode=True).squeeze(1)  # [B, chunks]
    drawn = _race(by_chunk, noise).argsort(dim=1, descending=True, stable=True)
    # gather, not repeat_interleave and a slice: torch 2.13 compiles that for CPUs with uninitialised values at the end.
    chunk_of = (torch.arange(importance.shape[1], device=importance.device) // size).expand(importance.shape)  # [B, L]
    return _order(drawn.argsort(dim=1).int().gather(1, chunk_of), pruned, importance)


def draw_freq_chunks(importance: Tensor, pruned: Tensor, noise: Tensor, num_freq: int, chunk: int) -> Tensor:
    """Ablation by frequency: `draw_time_chunks` with the axes swapped, chunks of `chunk` mel rows."""
    batch, length = importance.shape
    num_time = length // num_freq

    def turn(x: Tensor) -> Tensor:
        return x.reshape(batch, num_time, num_freq).transpose(1, 2).flatten(1)

    order = draw_time_chunks(turn(importance), turn(pruned), noise, num_time, chunk)  # of frequency-major patches
    return order % num_time * num_freq + order // num_time


def draw_blocks(importance: Tensor, pruned: Tensor, noise: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Ablation: video by 2 × 2 blocks of neighbouring patches, pruned patches last; grid: (frames, rows, columns).

    Blocks are drawn without replacement ∝ their summed importance (pruned patches included), with noise
    [B, num_blocks(…)]. Patches keep their order inside a block, so cutting at κ cuts the tail of the last block. At an
    edge of odd length blocks have fewer patches.
    """
    importance = _positive(importance)
    by_block = F.avg_pool2d(importance.view(-1, *grid), 2, ceil_mode=True, divisor_override=1)  # sums
    drawn = _race(by_block.flatten(1), noise).argsort(dim=1, descending=True, stable=True)
    numbers = torch.arange(noise.shape[1], device=noise.device).view(by_block.shape[1:])
    doubled = numbers.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, : grid[1], : grid[2]]
    block_of = doubled.flatten().expand(importance.shape)  # [B, L]
    return _order(drawn.argsort(dim=1).int().gather(1, block_of), pruned, importance)


def mats(tokens: Tensor, num_steps: int) -> Tensor:
    """Ablation MATS: patches that change most since the previous step first; step 0 takes the change of step 1.

    tokens [B, L, D] are embeddings of all patches, time-major: frames for video, time steps for audio.
    """
    if num_steps < 2:
        raise ConfigError(f"MATS compares adjacent steps and this input has {num_steps}; use at least two frames")
    batch, _, dim = tokens.shape
    steps = wide(tokens).reshape(batch, num_steps, -1, dim)
    change = torch.linalg.vector_norm(steps[:, 1:] - steps[:, :-1], dim=-1)
    change = torch.cat((change[:, :1], change), dim=1).flatten(1)  # [B, L]
    return change.argsort(dim=1, descending=True, stable=True)


def random_order(noise: Tensor) -> Tensor:
    """Ablation Random: every order equally likely; noise [B, L]."""
    return noise.argsort(dim=1, stable=True)


def random_mask(noise: Tensor, num_visible: int) -> tuple[Tensor, Tensor]:
    """Indices of the visible patches (smallest noise [B, L]) and of the masked ones."""
    order = random_order(noise)
    return order[:, :num_visible], order[:, num_visible:]


# ---- draws from a generator


def uniform(*shape: int, generator: torch.Generator) -> Tensor:
    """Uniform noise on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device)


def num_chunks(length: int, num_per_step: int, chunk: int) -> int:
    """Number of chunks of `chunk` steps in `length` patches with `num_per_step` patches per step."""
    if chunk < 1:
        raise ConfigError(f"chunk={chunk} must be at least 1 step")
    return math.ceil(length // num_per_step / chunk)


def num_blocks(grid: tuple[int, int, int]) -> int:
    """Number of 2 × 2 blocks in a grid of (frames, rows, columns) patches."""
    return grid[0] * math.ceil(grid[1] / 2) * math.ceil(grid[2] / 2)


def select_patches(importance: Tensor, correlation: Tensor, generator: torch.Generator) -> Tensor:
    """Prune by C, then `draw_patches`: video."""
    pruned = prune(correlation, uniform(*importance.shape, generator=generator))
    return draw_patches(importance, pruned, uniform(*importance.shape, generator=generator))


def select_blocks(
    importance: Tensor, correlation: Tensor, generator: torch.Generator, grid: tuple[int, int, int]
) -> Tensor:
    """Prune by C, then `draw_blocks`: video by blocks of neighbours."""
    pruned = prune(correlation, uniform(*importance.shape, generator=generator))
    noise = uniform(len(importance), num_blocks(grid), generator=generator)
    return draw_blocks(importance, pruned, noise, grid)


def select_time_chunks(
    importance: Tensor, correlation: Tensor, generator: torch.Generator, num_freq: int, chunk: int
) -> Tensor:
    """Prune by C, then `draw_time_chunks`: audio."""
    batch, length = importance.shape
    pruned = prune(correlation, uniform(batch, length, generator=generator))
    noise = uniform(batch, num_chunks(length, num_freq, chunk), generator=generator)
    return draw_time_chunks(importance, pruned, noise, num_freq, chunk)


def select_freq_chunks(
    importance: Tensor, correlation: Tensor, generator: torch.Generator, num_freq: int, chunk: int
) -> Tensor:
    """Prune by C, then `draw_freq_chunks`: audio by frequency."""
    batch, length = importance.shape
    pruned = prune(correlation, uniform(batch, length, generator=generator))
    noise = uniform(batch, num_chunks(length, length // num_freq, chunk), generator=generator)
    return draw_freq_chunks(importance, pruned, noise, num_freq, chunk)


def _positive(x: Tensor) -> Tensor:
    """Clamp scores to the smallest normal number: last in every draw, but never 0/0."""
    x = wide(x)
    return x.clamp_min(torch.finfo(x.dtype).tiny)


def _top(importance: Tensor, kappa: int) -> Tensor:
    """Bool [B, L], true for the κ most important patches; ties go to the first."""
    order = importance.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(importance, dtype=torch.bool).scatter(1, order[:, :kappa], True)


def _race(weight: Tensor, noise: Tensor) -> Tensor:
    """weight / Exponential(1): sorting it in descending order draws without replacement ∝ weight."""
    exponential = -torch.log1p(-noise.to(weight.dtype))
    return weight / exponential.clamp_min(torch.finfo(weight.dtype).tiny)


def _bits(x: Tensor) -> Tensor:
    """Integers that sort like these non-negative floats."""
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def _order(place: Tensor, pruned: Tensor, importance: Tensor) -> Tensor:
    """Unpruned patches by ascending `place`, then pruned ones by descending importance; ties keep their order.

    One stable sort: the keys of pruned patches are larger than every place.
    """
    bits = _bits(importance)
    return torch.where(pruned, torch.iinfo(bits.dtype).max - bits, place).argsort(dim=1, stable=True)

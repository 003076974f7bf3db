"""Which patches a step trains on: scores, pruning and draws, one pure function for each equation of the paper.

What callers must know:
- An *order* [B, L] is a permutation of each clip's patches; its first κ = `kappa(L, keep_ratio)` are kept. Patches run
  time-major: video frame by frame, audio time step by time step.
- Functions that decide by chance take uniform `noise` in [0, 1), so that they compile into one graph and replay in CUDA
  graphs; the `select_*` functions at the end draw that noise from a generator, which lives on the scores' device.
- Nothing here loops over clips or chunks, depends on values for its shapes, or waits for the device.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.errors import ConfigError
from stella.fast.compile import compilable, is_compiled


def kappa(length: int, keep_ratio: float) -> int:
    """How many of `length` patches are kept; rounded in floating point as written, like the published release."""
    if not 0 <= keep_ratio <= 1:
        raise ConfigError(f"keep_ratio={keep_ratio} is a share of a clip's patches; it must lie in 0…1")
    return int(length * keep_ratio)


def visible(length: int, mask_ratio: float) -> int:
    """How many of `length` patches the encoder sees; also under selection a share of *all* patches."""
    return int(length * (1 - mask_ratio))


# Scores


@torch.no_grad()
def importance(q: Tensor, k: Tensor, beta: float) -> Tensor:
    """How much the other modality attends to each patch (Eq. cross_att_compute, imp_score_cal): [B, Lk], rows sum to 1.

    q [B, H, Lq, d] are the other modality's queries, k [B, H, Lk, d] the keys of the patches scored. In float32 at
    least, autocast or not: a small β magnifies the rounding of logits. Compiled for a GPU without the map, else head
    by head, so that only a head's exists at a time. `benchmarks/selection.py` compares the alternatives.
    """
    scale = 1 / (math.sqrt(q.shape[-1]) * beta)
    if q.is_cuda and is_compiled():
        from stella.fast import kernels

        if kernels.fits(q.shape[-1]):
            return kernels.attention_column_means(q, k, scale)
    with torch.autocast(q.device.type, enabled=False):
        q, k = _wide(q), _wide(k)
        total = k.new_zeros(k.shape[0], k.shape[2])
        for head in range(q.shape[1]):
            attention = torch.softmax(q[:, head] * scale @ k[:, head].mT, dim=-1)  # [B, Lq, Lk]
            total = total + attention.mean(dim=1)
        return total / q.shape[1]


@compilable
def weighted_query(q: Tensor, importance: Tensor, kappa: int) -> Tensor:
    """q̂, the mean query of the κ most important patches, weighted by importance (Eq. discriminative_info_gather).

    q [B, H, L, d] and importance [B, L] are of the same modality; returns [B, H, d].
    """
    if kappa < 1:
        raise ConfigError(f"the keep ratio leaves {kappa} of {q.shape[2]} patches; raise it or use a longer input")
    weight = torch.where(_top(importance, kappa), _positive(importance), 0)
    weight = weight / weight.sum(dim=1, keepdim=True)
    with torch.autocast(q.device.type, enabled=False):
        return (weight[:, None, None] @ _wide(q)).squeeze(2)


def pair_past(query_past: Tensor, batch: int) -> Tensor:
    """Clip i meets drawn row i, modulo how many were drawn: [n, …] becomes [batch, …]."""
    return query_past[torch.arange(batch, device=query_past.device) % len(query_past)]


@compilable
def correlation(k: Tensor, query_now: Tensor, query_past: Tensor | None, importance: Tensor, kappa: int) -> Tensor:
    """C [B, L], how far a patch answers to the past rather than to its own pair (Eq. forget_induce_matrix).

    k [B, H, L, d] and importance [B, L] are of the modality scored; query_now [B, H, d] and query_past [n, H, d] (any
    n, see `pair_past`) are q̂ of the *other* one. C is 0 outside the top κ, and everywhere while the memory is empty
    (None, or n = 0).
    """
    if query_past is None or len(query_past) == 0:
        return torch.zeros_like(importance)
    with torch.autocast(k.device.type, enabled=False):
        change = _wide(pair_past(query_past, len(k))) - _wide(query_now)  # [B, H, d]
        logit = (_wide(k) @ change.unsqueeze(-1)).squeeze(-1) / math.sqrt(k.shape[-1])  # [B, H, L]
    # The softmax over the pair {past, current} is the sigmoid of their difference.
    return torch.where(_top(importance, kappa), torch.sigmoid(logit).mean(dim=1), 0)


# Draws: pure functions of uniform noise


def prune(correlation: Tensor, noise: Tensor) -> Tensor:
    """F ~ Bernoulli(C): bool [B, L], true for patches to be left out (Sec. patch selection)."""
    return noise < correlation


def draw_patches(importance: Tensor, pruned: Tensor, noise: Tensor) -> Tensor:
    """Patch by patch without replacement ∝ I, pruned ones last (Eq. video_patch_select); all arguments [B, L].

    The rule for video, and for audio without constraint. Where fewer than κ are unpruned, the pruned follow, most
    important first: this holds for each draw below.
    """
    importance = _positive(importance)
    return _order(-_bits(_race(importance, noise)), pruned, importance)


def draw_time_chunks(importance: Tensor, pruned: Tensor, noise: Tensor, num_freq: int, chunk: int) -> Tensor:
    """Audio, chunk by chunk of `chunk` time steps, without the pruned (Alg. audio_time_chunk_select_pytorch).

    Chunks follow one another as drawn without replacement ∝ their mean importance (pruned patches count in it), with
    noise [B, num_chunks(…)]; inside a chunk patches keep their order, so that cutting at κ cuts the last chunk's tail.
    Where the time steps do not divide by `chunk` the last chunk is shorter, and its mean is over what it has.
    """
    importance = _positive(importance)
    size = chunk * num_freq
    by_chunk = F.avg_pool1d(importance.unsqueeze(1), size, ceil_mode=True).squeeze(1)  # [B, chunks]
    drawn = _race(by_chunk, noise).argsort(dim=1, descending=True, stable=True)
    # Gathered, not repeat_interleave and a cut: of that, torch 2.13 compiled for CPUs leaves the last values unwritten.
    chunk_of = (torch.arange(importance.shape[1], device=importance.device) // size).expand(importance.shape)  # [B, L]
    return _order(drawn.argsort(dim=1).int().gather(1, chunk_of), pruned, importance)


def draw_freq_chunks(importance: Tensor, pruned: Tensor, noise: Tensor, num_freq: int, chunk: int) -> Tensor:
    """The ablation by frequency: as `draw_time_chunks` with the axes exchanged, chunks of `chunk` mel rows."""
    batch, length = importance.shape
    num_time = length // num_freq

    def turn(x: Tensor) -> Tensor:
        return x.reshape(batch, num_time, num_freq).transpose(1, 2).flatten(1)

    order = draw_time_chunks(turn(importance), turn(pruned), noise, num_time, chunk)  # of frequency-major patches
    return order % num_time * num_freq + order // num_time


def mats(tokens: Tensor, num_steps: int) -> Tensor:
    """The ablation MATS: patches that change most from the step before first; the first step takes the second's change.

    tokens [B, L, D] are embeddings of all patches, time-major: frames for video, time steps for audio.
    """
    if num_steps < 2:
        raise ConfigError(f"MATS compares adjacent steps and this input has {num_steps}; use two frames or more")
    batch, _, dim = tokens.shape
    steps = _wide(tokens).reshape(batch, num_steps, -1, dim)
    change = torch.linalg.vector_norm(steps[:, 1:] - steps[:, :-1], dim=-1)
    change = torch.cat((change[:, :1], change), dim=1).flatten(1)  # [B, L]
    return change.argsort(dim=1, descending=True, stable=True)


def random_order(noise: Tensor) -> Tensor:
    """The ablation Random: every order equally likely; noise [B, L]."""
    return noise.argsort(dim=1, stable=True)


def random_mask(noise: Tensor, num_visible: int) -> tuple[Tensor, Tensor]:
    """Plain masking: indices of the visible patches, smallest noise [B, L] first, and of the masked ones."""
    order = random_order(noise)
    return order[:, :num_visible], order[:, num_visible:]


def split(order: Tensor, noise: Tensor, num_visible: int) -> tuple[Tensor, Tensor]:
    """Masking among the kept: noise [B, κ] over the first κ of `order` says which are visible, which reconstructed.

    Returns patch indices [B, num_visible] and [B, κ - num_visible]; the rest of the order is dropped.
    """
    seen, masked = random_mask(noise, num_visible)
    return order.gather(1, seen), order.gather(1, masked)


# With a generator


def uniform(*shape: int, generator: torch.Generator) -> Tensor:
    """The noise of every function above, on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device)


def num_chunks(length: int, num_per_step: int, chunk: int) -> int:
    """How many chunks of `chunk` steps of `num_per_step` patches make up `length` patches; the last may be shorter."""
    if chunk < 1:
        raise ConfigError(f"the audio chunk is {chunk} steps long; it must have one at least")
    return math.ceil(length // num_per_step / chunk)


def select_patches(importance: Tensor, correlation: Tensor, generator: torch.Generator) -> Tensor:
    """Prune by C, then `draw_patches`: video, or audio without constraint."""
    pruned = prune(correlation, uniform(*importance.shape, generator=generator))
    return draw_patches(importance, pruned, uniform(*importance.shape, generator=generator))


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


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _positive(x: Tensor) -> Tensor:
    """Zero and denormal scores become the least normal number: last in every draw, yet never 0/0."""
    x = _wide(x)
    return x.clamp_min(torch.finfo(x.dtype).tiny)


def _top(importance: Tensor, kappa: int) -> Tensor:
    """Bool [B, L], true for the κ most important patches; of equal ones the first."""
    order = importance.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(importance, dtype=torch.bool).scatter(1, order[:, :kappa], True)


def _race(weight: Tensor, noise: Tensor) -> Tensor:
    """weight / Exponential(1): sorted, highest first, this is a draw without replacement ∝ weight."""
    exponential = -torch.log1p(-noise.to(weight.dtype))
    return weight / exponential.clamp_min(torch.finfo(weight.dtype).tiny)


def _bits(x: Tensor) -> Tensor:
    """Integers in the same order as these floats, which are 0 or more."""
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def _order(place: Tensor, pruned: Tensor, importance: Tensor) -> Tensor:
    """The unpruned by `place` (integers up to L), then the pruned, most important first; equal ones in their own order.

    One stable sort, since the pruned take integer keys beyond every place.
    """
    bits = _bits(importance)
    return torch.where(pruned, torch.iinfo(bits.dtype).max - bits, place).argsort(dim=1, stable=True)

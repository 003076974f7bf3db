"""Each loss against a naive loop over its equation, per clip and over the batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stella import losses
from stella.rng import generator

sizes = st.integers(1, 6)


def randn(*shape: int, seed: object = 0) -> Tensor:
    return torch.randn(*shape, generator=generator("losses", seed), dtype=torch.float64)


@settings(max_examples=20, deadline=None)
@given(sizes, sizes, st.integers(2, 7))
def test_reconstruction_is_the_mean_over_patches_of_the_mean_over_pixels(batch: int, masked: int, pixels: int) -> None:
    recon, target = randn(batch, masked, pixels, seed=1), randn(batch, masked, pixels, seed=2)
    value = losses.reconstruction(recon, target)
    for i in range(batch):
        patches = [sum((recon[i, j, k] - target[i, j, k]) ** 2 for k in range(pixels)) / pixels for j in range(masked)]
        assert value[i].item() == pytest.approx(float(sum(patches)) / masked, rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(sizes, sizes, st.integers(2, 7))
def test_norm_pix_uses_the_unbiased_variance_of_each_patch(batch: int, masked: int, size: int) -> None:
    patches = randn(batch, masked, size)
    value = losses.norm_pix(patches)
    for i in range(batch):
        for j in range(masked):
            pixels = patches[i, j].tolist()
            mean = sum(pixels) / size
            var = sum((x - mean) ** 2 for x in pixels) / (size - 1)
            assert value[i, j].tolist() == pytest.approx([(x - mean) / math.sqrt(var + 1e-6) for x in pixels], rel=1e-9)


def test_norm_pix_of_a_flat_patch_is_zero() -> None:
    assert torch.equal(losses.norm_pix(torch.full((1, 1, 8), 0.5)), torch.zeros(1, 1, 8))


def naive_contrastive(z_a: Tensor, z_v: Tensor, tau: float) -> list[float]:
    def cosine(x: Tensor, y: Tensor) -> float:
        return float(x @ y) / (math.sqrt(float(x @ x)) * math.sqrt(float(y @ y)))

    n, clips = len(z_a), []
    for i in range(n):
        a_to_v = sum(math.exp(cosine(z_a[i], z_v[j]) / tau) for j in range(n))
        v_to_a = sum(math.exp(cosine(z_v[i], z_a[j]) / tau) for j in range(n))
        own = math.exp(cosine(z_a[i], z_v[i]) / tau)
        clips.append(-(math.log(own / a_to_v) + math.log(own / v_to_a)) / 2)
    return clips


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 7), st.integers(2, 9), st.sampled_from([0.05, 0.5, 1.0]))
def test_contrastive_is_the_average_of_both_directions(batch: int, dim: int, tau: float) -> None:
    z_a, z_v = randn(batch, dim, seed="a"), randn(batch, dim, seed="v")
    expected = naive_contrastive(z_a, z_v, tau)
    assert losses.contrastive(z_a, z_v, tau).tolist() == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_contrastive_ignores_the_length_of_embeddings() -> None:
    z_a, z_v = randn(4, 6, seed="a"), randn(4, 6, seed="v")
    torch.testing.assert_close(losses.contrastive(3 * z_a, z_v / 7), losses.contrastive(z_a, z_v))


def test_contrastive_keeps_full_precision_under_autocast() -> None:
    z_a, z_v = randn(8, 64, seed="a"), randn(8, 64, seed="v")
    with torch.autocast("cpu", torch.bfloat16):
        inside = losses.contrastive(z_a.float(), z_v.float())
    torch.testing.assert_close(inside.double(), losses.contrastive(z_a, z_v), rtol=1e-5, atol=0)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=9))
def test_matching_is_binary_cross_entropy(targets: list[int]) -> None:
    logits, labels = randn(len(targets)), torch.tensor(targets)
    value = losses.matching(logits, labels)
    for i in range(len(targets)):
        p = 1 / (1 + math.exp(-float(logits[i])))
        assert value[i].item() == pytest.approx(-math.log(p if labels[i] else 1 - p), rel=1e-12)


def test_matching_of_certain_logits_is_finite() -> None:
    value = losses.matching(torch.tensor([1e4, -1e4]), torch.tensor([0.0, 1.0]))
    assert value.tolist() == [1e4, 1e4]


@settings(max_examples=20, deadline=None)
@given(sizes, sizes)
def test_feature_penalty_is_the_mean_squared_distance_per_clip(batch: int, dim: int) -> None:
    z, stored = randn(batch, dim, seed=1), randn(batch, dim, seed=2)
    for i, value in enumerate(losses.feature_penalty(z, stored).tolist()):
        assert value == pytest.approx(sum(float(z[i, j] - stored[i, j]) ** 2 for j in range(dim)) / dim, rel=1e-12)
    torch.testing.assert_close(losses.feature_penalty(z, stored).mean(), torch.nn.functional.mse_loss(z, stored))

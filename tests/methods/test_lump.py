"""LUMP: what is mixed, with what, and by how much."""

import pytest
import torch
from helpers.method_toys import batch, method, next_draw, spy, train
from torch import Tensor

from stella.methods.lump import beta


def weight(mixed: Tensor, now: Tensor, past: Tensor) -> float:
    """That w for which w·now + (1 − w)·past is `mixed`, and there must be one."""
    w = ((mixed - past) * (now - past)).sum() / (now - past).square().sum()
    torch.testing.assert_close(mixed, w * now + (1 - w) * past, rtol=1e-4, atol=1e-4)
    return float(w)


@pytest.mark.parametrize(("held", "now"), [(4, 6), (6, 6), (8, 3), (1, 2)])
def test_each_clip_is_mixed_with_a_drawn_one_by_one_weight(
    held: int, now: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = method("lump", clips=held, concentration=2.0)
    first, second = batch(held), batch(now, held)
    one.after_batch(first, one.loss(first))
    slots = next_draw(one, now)
    assert len(slots) == min(held, now)
    expected = float(beta(2.0, one.generators["mix"].clone_state()))
    calls = spy(monkeypatch, one)
    parts = one.loss(second).parts
    assert list(parts) == ["recon_a", "recon_v", "contrastive"]
    (a, v, _), model = calls[0], one.model
    assert (len(a.values), len(v.values)) == (now, now)
    for i in range(now):
        with_ = first[slots[i % len(slots)].view(1)]
        pair = second.audio[i : i + 1], with_.audio.half().float()
        audio = (model.patches_a(x).values[0] for x in pair)
        video = (model.patches_v(model.normalise(x)).values[0] for x in (second.video[i : i + 1], with_.video))
        assert weight(a.values[i], *audio) == pytest.approx(expected, abs=1e-4)
        assert weight(v.values[i], *video) == pytest.approx(expected, abs=1e-4)


def test_the_loss_is_that_of_the_mixtures() -> None:
    """Which is not computed from the clips: the same masks, the mixtures' own targets."""
    one = method("lump", clips=4, concentration=2.0, dtype=torch.float64)
    first, second = batch(4), batch(4, 4)
    one.after_batch(first, one.loss(first))
    held = first[next_draw(one, 4)]
    mix, masks = beta(2.0, one.generators["mix"].clone_state()), one.generators["mask"].get_state()
    parts = one.loss(second).parts
    one.generators["mask"].set_state(masks)
    audio = mix * second.audio + (1 - mix) * held.audio.half().float()
    video = mix * one.model.normalise(second.video) + (1 - mix) * one.model.normalise(held.video)
    expected = one.parts(one.pretrain(one.model.patches_a(audio), one.model.patches_v(video)))
    torch.testing.assert_close(parts, expected)


def test_every_batch_has_a_weight_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("lump", concentration=1.0)
    train(one, [4])
    calls = spy(monkeypatch, one)
    state = one.memory.generator.get_state()
    for _ in range(2):
        one.memory.generator.set_state(state)
        one.loss(batch(4, 4))
    assert not torch.allclose(calls[0][0].values, calls[1][0].values)


@pytest.mark.parametrize("concentration", [0.001, 0.05, 0.1, 1.0, 5.0])
def test_weights_have_the_moments_of_beta(concentration: float) -> None:
    """Mean ½, variance 1 / (4·(2λ + 1)), fourth central moment 3 / (16·(2λ + 1)·(2λ + 3)): each within 4 deviations."""
    g, n = torch.Generator().manual_seed(0), 8000
    draws = torch.stack([beta(concentration, g) for _ in range(n)])
    assert ((draws >= 0) & (draws <= 1)).all()
    variance = 1 / (4 * (2 * concentration + 1))
    fourth = 3 / (16 * (2 * concentration + 1) * (2 * concentration + 3))
    assert abs(draws.mean() - 0.5) < 4 * (variance / n) ** 0.5
    assert abs((draws - 0.5).square().mean() - variance) < 4 * ((fourth - variance**2) / n) ** 0.5
    assert (draws - 0.5).pow(4).mean() == pytest.approx(fourth, rel=0.1)


def test_weights_are_distributed_as_beta() -> None:
    """Beta(1, 1) is uniform, and of Beta(½, ½) the distribution function is 2/π·arcsin √x (Kolmogorov-Smirnov)."""
    g, n = torch.Generator().manual_seed(1), 4000
    for concentration, transformed in ((1.0, lambda x: x), (0.5, lambda x: 2 / torch.pi * x.sqrt().asin())):
        draws = transformed(torch.stack([beta(concentration, g) for _ in range(n)]).sort().values)
        assert (draws - (torch.arange(n) + 0.5) / n).abs().max() < 1.95 / n**0.5  # one in a thousand

"""Metrics against naive versions, in plain loops, and against hand-made cases."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from stella.rng import generator
from stella.transfer import metrics


def pictures(count: int = 7, side: int = 9) -> tuple[Tensor, Tensor]:
    """Logits and masks of which some have no object."""
    gen = generator("pictures")
    logits = (4 * torch.randn(count, side, side, generator=gen)).round() / 2  # ties
    masks = torch.rand(count, side, side, generator=gen) > 0.6
    masks[2] = masks[5] = False
    return logits, masks


def naive_iou(logits: Tensor, mask: Tensor) -> float:
    both = either = right = 0
    for score, true in zip(logits.flatten().tolist(), mask.flatten().tolist(), strict=True):
        predicted = 1 / (1 + math.exp(-score)) > 0.5
        both, either, right = both + (predicted and true), either + (predicted or true), right + (not predicted)
    return both / either if bool(mask.any()) else right / mask.numel()


def naive_f(logits: Tensor, masks: Tensor) -> float:
    curves = []
    for score, mask in zip(logits.sigmoid(), masks, strict=True):
        if not mask.any():
            continue
        curve = []
        for threshold in torch.linspace(0, 1 - 1e-10, 255):
            predicted = (score >= threshold).float()
            hits = (predicted * mask).sum().item()
            p, r = hits / (predicted.sum().item() + 1e-20), hits / (mask.sum().item() + 1e-20)
            curve.append((1.3 * p * r / (0.3 * p + r)) if p + r else 0.0)
        curves.append(curve)
    return max(sum(values) / len(curves) for values in zip(*curves, strict=True)) if curves else 0.0


def test_miou_is_the_mean_over_pictures() -> None:
    logits, masks = pictures()
    each = [naive_iou(*pair) for pair in zip(logits, masks, strict=True)]
    assert metrics.iou(logits, masks).tolist() == pytest.approx(each)
    assert metrics.mean_iou(logits, masks) == pytest.approx(100 * sum(each) / 7)


def test_iou_by_hand() -> None:
    empty, full = torch.zeros(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool)
    one = torch.tensor([[1, 0], [0, 0]], dtype=torch.bool)
    high = torch.where(one, 9.0, -9.0)
    logits = torch.stack([high, high, high, torch.zeros(2, 2)])
    # Rightly one of one; three of four background pixels right; one of four; a logit of 0 is not above 0.5.
    assert metrics.iou(logits, torch.stack([one, empty, full, empty])).tolist() == [1.0, 0.75, 0.25, 1.0]


def test_f_is_the_best_of_the_mean_curve() -> None:
    logits, masks = pictures()
    curves = metrics.f_curve(logits, masks)
    for rows in (slice(None), slice(3), slice(3, 6), slice(6, 7)):
        assert metrics.f_measure(curves[rows]) == pytest.approx(100 * naive_f(logits[rows], masks[rows]))
    # A score that equals a threshold reaches it: sigmoid(0) is the 128th of 255.
    level = metrics.f_curve(torch.tensor([[[0.0, -9.0]]]), torch.tensor([[[True, False]]]))[0]
    assert level[127] == pytest.approx(1) and level[128] == 0
    # Without any object it is 0, as in the reference.
    assert metrics.f_measure(metrics.f_curve(logits, torch.zeros_like(masks))) == 0
    # The best of the mean, not the mean of the best: two pictures whose best thresholds differ.
    two = torch.tensor([[[2.0, -2.0]], [[-2.0, -4.0]]])
    target = torch.tensor([[[True, False]], [[True, False]]])
    curves = metrics.f_curve(two, target)
    assert metrics.f_measure(curves) < 100 and metrics.f_measure(curves[:1]) == pytest.approx(100)


def naive_ciou(scores: Tensor, target: Tensor) -> float:
    flat = sorted(scores.flatten().tolist())
    middle = flat[len(flat) // 2]
    above = outside = 0.0
    for score, true in zip(scores.flatten().tolist(), target.flatten().tolist(), strict=True):
        above += true * (score >= middle)
        outside += (score >= middle) and true == 0
    return above / (target.sum().item() + outside)


def test_ciou_takes_the_upper_half_of_a_map() -> None:
    gen = generator("maps")
    maps = (torch.randn(6, 8, 8, generator=gen) * 3).round()  # ties
    target = torch.randint(0, 3, (6, 8, 8), generator=gen) / 2  # annotators who disagree
    expected = [naive_ciou(*pair) for pair in zip(maps, target, strict=True)]
    assert metrics.ciou(maps, target).tolist() == pytest.approx(expected)


def test_ciou_by_hand() -> None:
    target = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    exact, wrong, flat = target, 1 - target, torch.zeros(2, 2)
    values = metrics.ciou(torch.stack([exact, wrong, flat, 7 * exact - 100]), target.expand(4, -1, -1))
    assert values.tolist() == [1.0, 0.0, 0.5, 1.0]  # a flat map selects everything; scale does not matter
    found = metrics.ciou_summary(values)
    assert found["ciou"] == 75 and found["mean_ciou"] == 62.5
    # Shares: 1 at threshold 0, then 3/4 up to 0.5 (>=), then 1/2.
    shares = [1.0] + [0.75] * 10 + [0.5] * 10
    area = sum((a + b) / 2 * 0.05 for a, b in pairwise(shares))
    assert found["auc"] == pytest.approx(100 * area)


def test_accuracy_counts_the_first_of_equal_scores() -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, 3.0], [3.0, 3.0], [5.0, 0.0]])
    assert metrics.accuracy(scores, torch.tensor([1, 0, 1, 0])) == 75


def naive_ap(scores: list[float], target: list[bool]) -> float:
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        above = [t for s, t in zip(scores, target, strict=True) if s >= threshold]
        recall = sum(above) / sum(target)
        total += (recall - before) * sum(above) / len(above)
        before = recall
    return total


def test_map_groups_equal_scores_and_skips_empty_classes() -> None:
    gen = generator("map")
    scores = (torch.randn(40, 5, generator=gen) * 2).round()
    target = torch.rand(40, 5, generator=gen) > 0.7
    target[:, 3] = False
    each = [naive_ap(scores[:, c].tolist(), target[:, c].tolist()) for c in (0, 1, 2, 4)]
    assert metrics.mean_average_precision(scores, target) == pytest.approx(100 * sum(each) / 4)
    by_hand = torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([[True], [False], [True]])
    assert metrics.mean_average_precision(*by_hand) == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert math.isnan(metrics.mean_average_precision(scores[:, 3:4], target[:, 3:4]))


def test_adaptive_ciou_takes_as_many_pixels_as_the_target() -> None:
    target = torch.zeros(1, 4, 4)
    target[0, 0, :2] = 1
    maps = torch.zeros(1, 4, 4)
    maps[0, 0, 1:3] = 5  # two pixels, of which one is right
    assert metrics.ciou(maps, target, adaptive=True).item() == pytest.approx(1 / 3)
    assert metrics.ciou(target, target, adaptive=True).item() == 1
    assert metrics.ciou(target, target).item() == pytest.approx(2 / 16)  # flat below the median: everything is chosen

"""The benchmarks' metrics, as their own code defines them, but exact: a figure never depends on the batch size.

AVSBench's code averages over batches, which weighs a short last batch too much, and takes the best threshold of F in
each (`head.mean_of`). Results are in percent.
"""

import torch
from torch import Tensor

BETA2 = 0.3  # of AVSBench's F
THRESHOLDS = 255  # of AVSBench's F, evenly over 0 … 1
AUC_STEPS = 21  # thresholds 0, 0.05, …, 1 of cIoU's area under the curve


def accuracy(scores: Tensor, target: Tensor) -> float:
    """The share of rows of scores [N, C] whose largest is at target [N]; of equal ones the first counts.

    With rows for the segments of all clips it is AVE's segment accuracy.
    """
    return _percent((scores.argmax(1) == target).double())


def mean_average_precision(scores: Tensor, target: Tensor) -> float:
    """The mean over classes of the average precision, from scores [N, C] and bool target [N, C].

    AP = Σ (Rₙ - Rₙ₋₁)·Pₙ over falling thresholds; equal scores share one threshold. Classes without a positive are left
    out.
    """
    found = [_average_precision(s, t) for s, t in zip(scores.T, target.bool().T, strict=True) if bool(t.any())]
    return _percent(torch.stack(found)) if found else float("nan")


def _average_precision(scores: Tensor, target: Tensor) -> Tensor:
    order = scores.argsort(descending=True, stable=True)
    hits, ranked = target[order].double().cumsum(0), scores[order]
    last = torch.ones_like(target)  # of a run of equal scores: only there a threshold lies
    last[:-1] = ranked[1:] != ranked[:-1]
    places = torch.arange(1, len(scores) + 1, device=scores.device)[last]
    recall, precision = hits[last] / hits[-1], hits[last] / places
    return (recall.diff(prepend=recall.new_zeros(1)) * precision).sum()


def iou(logits: Tensor, target: Tensor) -> Tensor:
    """The IoU of each picture [N] from logits and bool target [N, H, W]: sigmoid > 0.5 is foreground.

    Without an object in the ground truth: the share of pixels that are rightly background.
    """
    predicted, true = logits.sigmoid().flatten(1) > 0.5, target.bool().flatten(1)
    both, either = (predicted & true).sum(1).double(), (predicted | true).sum(1).double()
    background = (~predicted).double().mean(1)
    return torch.where(true.any(1), both / either.clamp_min(1), background)


def mean_iou(logits: Tensor, target: Tensor) -> float:
    """AVSBench's mIoU over all pictures of logits and bool target [N, H, W]."""
    return _percent(iou(logits, target))


def f_curve(logits: Tensor, target: Tensor) -> Tensor:
    """F at each threshold for each picture, float64 [N, THRESHOLDS]; NaN for pictures without an object."""
    scores = logits.sigmoid().flatten(1).contiguous()  # [N, P]
    true = target.bool().flatten(1)
    steps = torch.linspace(0, 1, THRESHOLDS, device=scores.device)
    reached = torch.bucketize(scores, steps, right=True)  # thresholds that a pixel reaches (>=): the first so many
    precision, recall = [], []
    for row, object_ in zip(reached, true, strict=True):
        above = _at_least(row)
        hits = _at_least(row[object_])
        precision.append(hits / (above + 1e-20))
        recall.append(hits / (object_.sum() + 1e-20))
    p, r = torch.stack(precision), torch.stack(recall)
    f = ((1 + BETA2) * p * r / (BETA2 * p + r)).nan_to_num(0.0)
    return f.masked_fill(~true.any(1, keepdim=True), torch.nan)


def _at_least(reached: Tensor) -> Tensor:
    """How many pixels reach each threshold, from the number of thresholds that each reaches; float64 [THRESHOLDS]."""
    counts = torch.bincount(reached, minlength=THRESHOLDS + 1)
    return counts.flip(0).cumsum(0).flip(0)[1:].double()


def f_measure(curves: Tensor) -> float:
    """AVSBench's F from `f_curve`: averaged over the pictures with an object at each threshold, then the best one."""
    return 100 * curves.nanmean(0).max().nan_to_num(0.0).item()  # 0 if no picture has an object, as in the reference


def ciou(maps: Tensor, target: Tensor, adaptive: bool = False) -> Tensor:
    """The cIoU of each picture [N] from maps [N, H, W], any scale, and target [N, H, W] in 0 … 1.

    The predicted region are the pixels at or above the map's (upper) median; `adaptive` takes as many pixels as the
    target has instead, for sources much smaller than half of the picture. A target between 0 and 1 says how many
    annotators agree.
    """
    scores, true = maps.flatten(1), target.flatten(1).double()
    size = scores.shape[1]
    area = (
        (true > 0).sum(1).clamp_min(1) if adaptive else torch.full((len(true),), size - size // 2, device=true.device)
    )
    least = scores.sort(1, descending=True).values.gather(1, area[:, None] - 1)
    predicted = scores >= least
    outside = (predicted & (true == 0)).sum(1)
    return (predicted * true).sum(1) / (true.sum(1) + outside)


def ciou_summary(values: Tensor) -> dict[str, float]:
    """cIoU as the literature reports it, from values [N]: the share of at least 0.5, its AUC, and the mean."""
    steps = 0.05 * torch.arange(AUC_STEPS, dtype=torch.float64, device=values.device)
    shares = (values.double()[:, None] >= steps).double().mean(0)
    return {
        "ciou": _percent((values >= 0.5).double()),
        "auc": 100 * torch.trapezoid(shares, steps).item(),
        "mean_ciou": _percent(values),
    }


def localisation(maps: Tensor, target: Tensor) -> dict[str, float]:
    """All figures of maps [N, H, W]: those of `ciou_summary`, and the mean with adaptive regions."""
    return ciou_summary(ciou(maps, target)) | {"adaptive_ciou": _percent(ciou(maps, target, adaptive=True))}


def _percent(values: Tensor) -> float:
    return 100 * values.double().mean().item()

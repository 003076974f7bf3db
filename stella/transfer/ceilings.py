"""What can be had without looking, and what a model would get that knows each clip's class and nothing else.

Every result of a downstream task is printed beside these figures. They are fitted on the training part and measured on
the test part, with the metrics of the task itself; without a training part there are none that need fitting.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from stella.clip import BACKGROUND, Labels, Source, labels_of, names_of
from stella.data.downstream import Parts, sounds
from stella.data.tasks import chance
from stella.errors import ClipError
from stella.media.augment import center_crop
from stella.transfer.metrics import localisation, mean_iou

Names = Sequence[str | None]
MOST = 400  # clips of a part whose masks are looked at
LEVELS = 19  # thresholds tried for a constant mask: 0.05, 0.1, …


def ceilings(task: str, parts: Parts, size: int, measured: Sequence[int] | None = None) -> dict[str, float]:
    """By name, in percent, of the figure that the task reports first; empty if nothing is known.

    Masks are cropped to `size`² as for the model. `measured` are the clips of the test part that were not skipped;
    None: all.
    """
    test_rows = range(len(parts.test)) if measured is None else measured
    if task in ("retrieval", "matching"):
        return chance([len(test_rows)]) if task == "retrieval" else {"chance": 50.0}
    if task in ("segment", "localise"):
        train_rows = range(len(parts.train))
        return _of_masks(task, _some_labels(parts.train, train_rows), _some_labels(parts.test, test_rows), size)
    if parts.several:
        return _by_frequency(parts, test_rows)
    train, test = names_of(parts.train, range(len(parts.train))), names_of(parts.test, test_rows)
    if task == "classify":
        return {"chance": 100 / len(parts.classes), "majority": _majority(train, test)}
    every = names_of(parts.test, range(len(parts.test)))
    right = _class_of_events(train, every, parts.segments)
    return {"majority": _majority(train, test), "class": 100 * right[list(test_rows)].double().mean().item()}


def _by_frequency(parts: Parts, rows: Sequence[int]) -> dict[str, float]:
    """The mean average precision of random scores: the mean share of test clips that have a class, over those that one
    has."""
    labels = labels_of(parts.test, rows)
    counts = Counter(name for each in labels for name in {each.name, *each.others} if name in parts.classes)
    return {"chance": 100 * sum(counts.values()) / len(counts) / len(labels)} if counts else {}


def _some_labels(source: Source, rows: Sequence[int]) -> list[Labels]:
    """The labels of at most `MOST` usable clips, spread over these of a source."""
    found = []
    for index in rows[:: math.ceil(len(rows) / MOST) or 1]:
        with suppress(ClipError):  # counted where the clip itself is read
            found += labels_of(source, [index])
    return found


def _majority(train: Names, test: Names) -> float:
    [(name, _)] = Counter(train).most_common(1)
    return 100 * sum(each == name for each in test) / len(test)


def _class_of_events(train: Names, test: Names, segments: int) -> Tensor:
    """For each segment of the test clips, whether the best answer for its class is right: the class, or background."""

    def sounding(names: Names) -> list[tuple[str, Tensor]]:
        """The class of each clip, and which of its segments sound."""
        clips = [names[start : start + segments] for start in range(0, len(names), segments)]
        kinds = [next((name for name in own if name != BACKGROUND), BACKGROUND) for own in clips]
        return [
            (str(kind), torch.tensor([name != BACKGROUND for name in own]))
            for kind, own in zip(kinds, clips, strict=True)
        ]

    by_class: dict[str, list[Tensor]] = {}
    for kind, own in sounding(train):
        by_class.setdefault(kind, []).append(own)
    fitted = {kind: torch.stack(rows).double().mean(0) > 0.5 for kind, rows in by_class.items()}
    silent = torch.zeros(segments, dtype=torch.bool)
    return torch.cat([own == fitted.get(kind, silent) for kind, own in sounding(test)])


def _of_masks(task: str, train: Sequence[Labels], test: Sequence[Labels], size: int) -> dict[str, float]:
    sounding = task == "localise"
    masks, names = _frames(train, sounding, size)
    target, asked = _frames(test, sounding, size)
    everything = masks.double().mean(0)
    rows = {name: [i for i, each in enumerate(names) if each == name] for name in sorted(set(map(str, names)))}
    by_class = {name: masks[index].double().mean(0) for name, index in rows.items()}
    if sounding:
        side = torch.linspace(-1, 1, size)
        found = {"disc": -(side[:, None] ** 2 + side**2).expand_as(target)}
        if names and asked:
            maps = torch.stack([by_class.get(str(name), everything) for name in asked])
            found |= {"constant": everything.expand_as(target), "class": maps}
        return {name: localisation(each, target)["adaptive_ciou"] for name, each in found.items()}
    best = _best_mask(masks, everything)
    of_class = {name: _best_mask(masks[index], by_class[name]) for name, index in rows.items()}
    chosen = torch.stack([of_class.get(str(name), best) for name in asked])
    return {
        "empty": mean_iou(torch.full(target.shape, -1.0), target),
        "constant": mean_iou(best.expand_as(target), target),
        "class": mean_iou(chosen, target),
    }


def _frames(labels: Sequence[Labels], sounding: bool, size: int) -> tuple[Tensor, list[str | None]]:
    """The masks of all frames that count [N, size, size], as `localise` and `segment` read them, and their classes."""
    masks: list[Tensor] = []
    names: list[str | None] = []
    for each in labels:
        if each.mask is None:
            continue
        known = torch.ones(len(each.mask), dtype=torch.bool) if each.masked is None else each.masked
        known = known & sounds(each, len(each.mask)) if sounding else known
        levels = (each.mask[known].float() * 255).round().to(torch.uint8)
        mask = center_crop(levels[None, :, None], size)[0, :, 0]  # [T, size, size]
        mask = mask[mask.flatten(1).amax(1) > 0] / 255 if sounding else mask > 127
        masks.append(mask)
        names += [each.name] * len(mask)
    return torch.cat(masks) if masks else torch.empty(0, size, size), names


def _best_mask(masks: Tensor, mean: Tensor) -> Tensor:
    """The best constant mask among the level sets of the mean mask, as logits of ±1, [H, W]."""
    levels = [torch.where(mean > (i + 1) / (LEVELS + 1), 1.0, -1.0) for i in range(LEVELS)]
    return max(levels, key=lambda mask: mean_iou(mask.expand(masks.shape), masks))

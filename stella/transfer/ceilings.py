"""What can be had without looking, and what a model would get that knows each clip's class and nothing else.

Every result of a downstream task is printed beside these figures. They are fitted on the training part and measured on
the test part, with the metrics of the task itself.
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
from stella.transfer.metrics import localisation, mean_iou

Names = Sequence[str | None]
MOST = 400  # clips of a part whose masks are looked at
LEVELS = 19  # thresholds tried for a constant mask: 0.05, 0.1, …


def ceilings(task: str, parts: Parts) -> dict[str, float]:
    """By name, in percent, of the figure that the task reports first; empty if nothing is known."""
    if task in ("retrieval", "matching"):
        return chance([len(parts.test)]) if task == "retrieval" else {"chance": 50.0}
    if task in ("segment", "localise"):
        return _of_masks(task, *(_some_labels(part) for part in (parts.train, parts.test)))
    train, test = (names_of(part, range(len(part))) for part in (parts.train, parts.test))
    if task == "classify":
        return {"chance": 100 / len(parts.classes), "majority": _majority(train, test)}
    return {"majority": _majority(train, test), "class": _class_of_events(train, test, parts.segments)}


def _some_labels(source: Source) -> list[Labels]:
    """The labels of at most `MOST` usable clips, spread over a source."""
    found = []
    for index in range(0, len(source), math.ceil(len(source) / MOST)):
        with suppress(ClipError):  # counted where the clip itself is read
            found += labels_of(source, [index])
    return found


def _majority(train: Names, test: Names) -> float:
    [(name, _)] = Counter(train).most_common(1)
    return 100 * sum(each == name for each in test) / len(test)


def _class_of_events(train: Names, test: Names, segments: int) -> float:
    """Accuracy of the best answer for each class and segment: the class itself, or background."""

    def sounding(names: Names) -> dict[str, Tensor]:
        """By class, which segments of each of its clips sound, [clips, segments]."""
        found: dict[str, list[list[bool]]] = {}
        for start in range(0, len(names), segments):
            own = names[start : start + segments]
            kind = next((name for name in own if name != BACKGROUND), BACKGROUND)
            found.setdefault(str(kind), []).append([name != BACKGROUND for name in own])
        return {kind: torch.tensor(rows) for kind, rows in found.items()}

    fitted = {kind: rows.double().mean(0) > 0.5 for kind, rows in sounding(train).items()}
    silent = torch.zeros(segments, dtype=torch.bool)
    right = [rows == fitted.get(kind, silent) for kind, rows in sounding(test).items()]
    return 100 * torch.cat(right).double().mean().item()


def _of_masks(task: str, train: Sequence[Labels], test: Sequence[Labels]) -> dict[str, float]:
    sounding = task == "localise"
    masks, names = _frames(train, sounding)
    target, asked = _frames(test, sounding)
    everything = masks.double().mean(0)
    rows = {name: [i for i, each in enumerate(names) if each == name] for name in sorted(set(map(str, names)))}
    by_class = {name: masks[index].double().mean(0) for name, index in rows.items()}
    maps = torch.stack([by_class.get(str(name), everything) for name in asked])
    if sounding:
        side = torch.linspace(-1, 1, masks.shape[-1])
        disc = -(side[:, None] ** 2 + side**2)
        found = {"disc": disc, "constant": everything}
        maps_of = {name: each.expand_as(maps) for name, each in found.items()} | {"class": maps}
        return {name: localisation(each, target)["adaptive_ciou"] for name, each in maps_of.items()}
    best = _best_mask(masks, everything)
    of_class = {name: _best_mask(masks[index], by_class[name]) for name, index in rows.items()}
    chosen = torch.stack([of_class.get(str(name), best) for name in asked])
    return {
        "empty": mean_iou(torch.full(target.shape, -1.0), target),
        "constant": mean_iou(best.expand_as(target), target),
        "class": mean_iou(chosen, target),
    }


def _frames(labels: Sequence[Labels], sounding: bool) -> tuple[Tensor, list[str | None]]:
    """The masks of all frames that count [N, H, W], and the class of each."""
    masks, names = [], []
    for each in labels:
        if each.mask is None:
            continue
        known = torch.ones(len(each.mask), dtype=torch.bool) if each.masked is None else each.masked
        known = known & sounds(each, len(each.mask)) if sounding else known
        masks.append(each.mask[known])
        names += [each.name] * int(known.sum())
    return torch.cat(masks), names


def _best_mask(masks: Tensor, mean: Tensor) -> Tensor:
    """The best constant mask among the level sets of the mean mask, as logits of ±1, [H, W]."""
    levels = [torch.where(mean > (i + 1) / (LEVELS + 1), 1.0, -1.0) for i in range(LEVELS)]
    return max(levels, key=lambda mask: mean_iou(mask.expand(masks.shape), masks))

"""The answer for each test clip, `predictions.csv` in a run's folder; of classify also `classes.csv`, by class.

Both say what the figures of the test part were computed from. A skipped clip has no row.
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from stella.clip import Batch, Located, Source, Stored
from stella.data.downstream import Parts
from stella.data.views import Cached, View
from stella.evaluate.retrieval import ranks
from stella.files import write_text
from stella.transfer.base import Columns, Downstream
from stella.transfer.classify import over_windows
from stella.transfer.localise import counted

ANSWERS, CLASSES = "predictions.csv", "classes.csv"
ROW = "row"  # the column with the ids of the clips that the other columns are of
LEAST = 0.5  # score of a predicted class where a clip may have several

Names = tuple[str, ...]
Line = dict[str, Any]


@torch.no_grad()
def answered(task: Downstream, rows: Iterable[Columns]) -> tuple[dict[str, float], Columns]:
    """The figures over rows given in batches, as `task.measure` returns them, and what they were computed from."""
    judged = [task.judged(columns) | _places(columns) for columns in rows]
    found = {name: torch.cat([each[name] for each in judged]) for name in judged[0]}
    return task.figures(found), found


def measured(found: Columns) -> list[int] | None:
    """The rows of the test part that were not skipped; None of features that an earlier version computed."""
    ids = found.get("clip", found.get(ROW))
    return None if ids is None else sorted(set(ids.tolist()))


def _places(columns: Columns) -> Columns:
    """Which clips of the part the rows are; of columns with masks, which pictures: those whose mask is known."""
    if ROW not in columns:  # features that an earlier version computed
        return {}
    return _pictures(columns[ROW], columns["known"]) if "known" in columns else {ROW: columns[ROW]}


def localised(batch: Batch) -> Columns:
    """Which pictures of a batch have a figure of `localise.judged`."""
    return _pictures(batch.ids, counted(batch))


def _pictures(ids: torch.Tensor, counts: torch.Tensor) -> Columns:
    """The clip's id and the frame of each picture that counts, of ids [B] and bool counts [B, T]."""
    clip, frame = counts.nonzero(as_tuple=True)
    return {ROW: ids[clip], "frame": frame}


def write_answers(run: Path, task: str, parts: Parts, found: Columns) -> None:
    """Write the tables of a task that has some; `found` are the columns of `answered` over the test part."""
    if task == "classify":
        lines, answers = (_several if parts.several else _classes)(parts, found)
        _write(run / CLASSES, _by_class(parts.classes, answers))
        _write(run / ANSWERS, lines)
    elif task in LINES and (ROW in found or "clip" in found):
        _write(run / ANSWERS, LINES[task](parts, found))


def _classes(parts: Parts, found: Columns) -> tuple[list[Line], list[tuple[Names, Names]]]:
    """The lines of clips with one class each, and for each clip the true class and the predicted one."""
    scores, target = over_windows(found)
    clips, windows = torch.unique(found["clip"], return_counts=True)
    top, best = scores.max(1)
    columns = clips.tolist(), target.tolist(), best.tolist(), (top / windows).tolist()
    lines: list[Line] = []
    answers: list[tuple[Names, Names]] = []
    for clip, true, said, score in zip(*columns, strict=True):
        lines.append({"clip": id_of(parts.test, clip), **_answer(parts.classes[true], parts.classes[said], score)})
        answers.append(((parts.classes[true],), (parts.classes[said],)))
    return lines, answers


def _answer(true: str, said: str, score: float) -> Line:
    return {"true": true, "predicted": said, "score": f"{score:.4f}", "right": "yes" if said == true else "no"}


def _several(parts: Parts, found: Columns) -> tuple[list[Line], list[tuple[Names, Names]]]:
    """The same of clips that may have several classes; those with a score of at least `LEAST` are predicted."""
    scores, target = over_windows(found)
    clips, windows = torch.unique(found["clip"], return_counts=True)
    means = (scores / windows[:, None]).cpu()
    lines, answers = [], []
    for clip, row, wanted in zip(clips.tolist(), means, target.bool().cpu(), strict=True):
        said = [number for number in row.argsort(descending=True).tolist() if row[number] >= LEAST]
        true, named = (tuple(parts.classes[i] for i in which) for which in (wanted.nonzero()[:, 0].tolist(), said))
        answers.append((true, named))
        sure = "; ".join(f"{float(row[i]):.4f}" for i in said)
        lines.append(
            {"clip": id_of(parts.test, clip), "true": "; ".join(true), "predicted": "; ".join(named), "score": sure}
        )
    return lines, answers


def _by_class(classes: Names, answers: Sequence[tuple[Names, Names]]) -> list[Line]:
    """For each class how many test clips have it, for how many of them it was predicted, and what was instead."""
    clips: Counter[str] = Counter()
    right: Counter[str] = Counter()
    wrong: dict[str, Counter[str]] = {name: Counter() for name in classes}
    for true, said in answers:
        clips.update(true)
        right.update(name for name in true if name in said)
        for name in true:
            wrong[name].update(other for other in said if other not in true)
    return [
        {
            "class": name,
            "clips": clips[name],
            "right": right[name],
            "accuracy": f"{100 * right[name] / clips[name]:.2f}" if clips[name] else "",
            "most_frequent_wrong_answer": next((other for other, _ in wrong[name].most_common(1)), ""),
        }
        for name in classes
    ]


def _events(parts: Parts, found: Columns) -> list[Line]:
    scores, target = over_windows(found)
    clips, (top, best) = torch.unique(found["clip"]), scores.max(1)
    lines = []
    for row, true, said, score in zip(*(c.tolist() for c in (clips, target, best, top)), strict=True):
        clip, segment = divmod(row, parts.segments)
        own = {"clip": id_of(parts.test, row, clip), "segment": segment}
        lines.append(own | _answer(parts.classes[true], parts.classes[said], score))
    return lines


def _of_pictures(figures: dict[str, str]) -> Callable[[Parts, Columns], list[Line]]:
    """Lines with figures of each picture, in percent: the names of their columns, by heading."""

    def lines(parts: Parts, found: Columns) -> list[Line]:
        columns = (found[name].tolist() for name in (ROW, "frame", *figures.values()))
        return [
            {"clip": id_of(parts.test, row), "frame": frame}
            | {name: f"{100 * value:.4f}" for name, value in zip(figures, values, strict=True)}
            for row, frame, *values in zip(*columns, strict=True)
        ]

    return lines


def _retrieval(parts: Parts, found: Columns) -> list[Line]:
    """The rank of each clip's other half, from 1."""
    columns = found[ROW], ranks(found["a"], found["v"]), ranks(found["v"], found["a"])
    lines = zip(*(column.tolist() for column in columns), strict=True)
    return [{"clip": id_of(parts.test, row), "a2v_rank": a, "v2a_rank": v} for row, a, v in lines]


LINES: dict[str, Callable[[Parts, Columns], list[Line]]] = {
    "events": _events,
    "segment": _of_pictures({"iou": "iou"}),
    "localise": _of_pictures({"ciou": "ciou", "adaptive_ciou": "adaptive"}),
    "retrieval": _retrieval,
}


@runtime_checkable
class Named(Protocol):
    """A source that knows its clips' ids without making them."""

    def id(self, index: int) -> str: ...


def id_of(source: Source, index: int, number: int | None = None) -> str:
    """A clip's id as far as its source knows it without decoding, or its place; else its number, `index` by default."""
    inner: Source = source
    inside = index
    while isinstance(inner, View | Cached):
        if isinstance(inner, View):
            which, inside = inner.clips[inside]
            inner = inner.sources[which]
        else:
            inner = inner.source
    if isinstance(inner, Stored):
        return inner.origin(inside).id
    if isinstance(inner, Named):
        return inner.id(inside)
    if isinstance(inner, Located):
        return inner.location(inside)
    return str(index if number is None else number)


def _write(path: Path, lines: Sequence[Line]) -> None:
    if not lines:  # no picture of any clip has a known mask
        return
    text = io.StringIO()
    table = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    write_text(path, text.getvalue())

"""What a round did to the model: retrieval of clips set aside, by the state before the round and by the one after it.

Both are measured in the same gallery, that of today. Galleries change, so accuracies of different days do not compare;
their falls do. The level of a round's clips is therefore their accuracy when they were new, less all falls since.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stella.data.tasks import chance
from stella.errors import number_of
from stella.evaluate.retrieval import KS, Embeddings, modality_gap, ranks
from stella.files import Line
from stella.runs.plan import few_clips, few_steps

WORST = 8  # clips that fell most, named in the record


def measures(before: Embeddings, after: Embeddings, rounds: Tensor, new: int, last: Line | None) -> Line:
    """The record's part on accuracy, in percent. Rows of the embeddings are clips, set aside in `rounds` [N].

    `new` is the number of the round that ended, `last` the record of the round before it.
    """
    if len(rounds) < 2:
        return {"gallery": len(rounds), "old": None, "new": None, "rounds": {}, "F": None, "gap": None, "worst": []}
    places = {"before": _places(before), "after": _places(after)}  # [2, N] each
    figures = {
        name: {
            "clips": int(which.sum()),
            **{when: accuracy(p[:, which]) for when, p in places.items()},
            "error": error(places["before"][:, which], places["after"][:, which]),
        }
        for name, which in (("old", rounds < new), ("new", rounds == new))
        if which.any()
    }
    own = {
        r: {when: accuracy(p[:, rounds == r]) for when, p in places.items()} | {"clips": int((rounds == r).sum())}
        for r in sorted(set(rounds.tolist()))
    }
    by_round = levels(own, new, {} if last is None else last["rounds"], figures.get("old"))
    earlier = [each["best"] - each["level"] for r, each in by_round.items() if int(r) < new]
    worst = (places["after"] - places["before"]).float().mean(0)  # [N]
    fell = [int(i) for i in worst.argsort(descending=True) if worst[i] > 0 and rounds[i] < new][:WORST]
    return {
        "gallery": len(rounds),
        "old": figures.get("old"),
        "new": figures.get("new"),
        "rounds": by_round,
        "F": sum(earlier) / len(earlier) if earlier else None,
        "gap": modality_gap(after.a, after.v),
        "worst": [{"clip": i, **{w: p[:, i].float().mean().item() for w, p in places.items()}} for i in fell],
    }


def accuracy(places: Tensor) -> float:
    """A of these ranks: the mean of R@1, R@5 and R@10, in percent."""
    return 100 * sum((places <= k).double().mean().item() for k in KS) / len(KS)


def error(before: Tensor, after: Tensor) -> float | None:
    """The standard error of the change of A between these ranks [2, N], in points; None for a single clip."""
    was, now = (torch.stack([places <= k for k in KS]).double().mean((0, 1)) for places in (before, after))  # [N]
    return 100 * (was - now).std().item() / len(was) ** 0.5 if len(was) > 1 else None


def levels(
    own: Mapping[int, Mapping[str, Any]], new: int, last: Mapping[str, Any], old: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """For the clips of each round: accuracy before and after, level, and the best level so far.

    `own` has those measured today, `last` is what the round before found. Rounds without a clip today fall as all old
    clips together, whose accuracies are `old`.
    """
    found, fell = {}, 0.0 if old is None else old["before"] - old["after"]
    for r in sorted({*map(int, last), *own}):
        each = own.get(r, {"clips": 0})
        if r == new:
            level = best = each["after"]
        else:
            was = last.get(str(r)) or {"level": each["before"], "best": each["before"]}
            level = was["level"] - (each["before"] - each["after"] if r in own else fell)
            best = max(was["best"], level)
        found[str(r)] = {**each, "level": level, "best": best}
    return found


def fall(record: Line) -> float | None:
    """Points that A on old clips fell in a round; None if there are none."""
    return None if record["old"] is None else record["old"]["before"] - record["old"]["after"]


def too_few(record: Line) -> bool:
    """Whether one old clip alone, found first before the round and not at all after it, exceeds the guard."""
    return bool(record["old"]) and record["guard"] * record["old"]["clips"] < 100


def judged(record: Line) -> str:
    """What the guard rests on, in words; the record has old clips."""
    clips, margin = record["old"]["clips"], record["old"].get("error") or 0.0  # earlier versions did not estimate it
    few = f", too few for a guard of {record['guard']:g}: one alone can cost {100 / clips:.1f} points"
    said = f"judged by {number_of(clips, 'old clip')}" + (few if too_few(record) else "")
    small = record["guard"] < (fall(record) or 0.0) < 2 * margin
    return said + ("; less than two standard errors: it may be chance" if small else "")


def fell(record: Line) -> str:
    """How far A on old clips fell, with the standard error; the record has old clips."""
    margin = record["old"].get("error")  # earlier versions did not estimate it
    return f"{fall(record):z.1f}{'' if margin is None else f' ± {margin:.1f}'} points"


def chance_of(record: Line) -> float | None:
    """A of random retrieval among the clips that a round was measured with, in percent; None if it was not measured."""
    return chance([record["gallery"]])["chance"] if record["old"] or record["new"] else None


def caveats(record: Line) -> list[str]:
    """What was too little to learn from, up to the end of this round, or to measure it with; in sentences."""
    steps = record.get("steps")  # not of tasks of a run, nor of a round without a usable clip
    lines = few_steps(steps, "raise --epochs, or add clips", " so far") if steps else []
    if record["gallery"] < 2:
        return lines
    clips = [(f"round {record['round']}", record["gallery"])]
    new = [(f"the new clips of round {record['round']}", record["new"]["clips"])] if record["new"] else []
    return lines + (few_clips(clips) or few_clips(new))


def matched(record: Line, digits: int = 1) -> str:
    """The accuracy of the matching module, and of how many pairs it is; earlier versions did not count them."""
    if record["matching"] is None:
        return "–"
    return f"{record['matching']:.{digits}f}%" + (f" of {pairs}" if (pairs := record.get("pairs")) else "")


def by_round(ids: Tensor, clips: Sequence[int]) -> list[int]:
    """How many of these ids of the stream belong to each round, whose numbers of clips are given."""
    ends = torch.tensor(clips).cumsum(0)
    counts: list[int] = torch.searchsorted(ends, ids.cpu(), right=True).bincount(minlength=len(ends)).tolist()
    return counts


def _places(embeddings: Embeddings) -> Tensor:
    """Ranks of all clips by sound and by picture, [2, N]."""
    return torch.stack([ranks(embeddings.a, embeddings.v), ranks(embeddings.v, embeddings.a)]).cpu()

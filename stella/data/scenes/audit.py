"""The cue audit: the score in a gallery of a model that knows one cue perfectly and nothing else.

A is the mean of R@1, R@5 and R@10 over both directions, in percent. Clips that a cue cannot tell apart are ranked at
random, and the audit takes the expected recall. Every A reported on scenes is printed next to these ceilings.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stella.data.scenes.classes import TASKS, classes
from stella.data.scenes.draw import Draw
from stella.data.scenes.source import Scenes
from stella.data.tasks import RANKS

BASES = ("base", "wide-36000")  # the classes of the shipped weights: base-tiny and base-small, the two base-wide


def audit(galleries: Mapping[str, Scenes]) -> dict[str, dict[str, float]]:
    """A by chance, timing, class, link and everything, for each task's gallery and for all clips (`mixed`)."""
    drawn = {name: scenes.draw(range(len(scenes))) for name, scenes in galleries.items()}
    table = {name: _ceilings([d]) for name, d in drawn.items()}
    if len(drawn) > 1:
        table["mixed"] = _ceilings(list(drawn.values()))
    return table


def class_cues(tasks: Sequence[str] = TASKS) -> dict[str, float]:
    """Accuracy in percent of a classifier of these tasks' classes that knows one attribute of a class alone."""
    kinds = [kind for task in tasks for kind in classes(task)]
    attributes = {"look": "look", "action": "action", "sound": "timbre"}
    return {cue: 100 * len({getattr(kind, name) for kind in kinds}) / len(kinds) for cue, name in attributes.items()}


def _ceilings(draws: Sequence[Draw]) -> dict[str, float]:
    def column(get: Callable[[Draw], NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([get(d) for d in draws])

    pattern = column(lambda d: d.pattern)
    label = np.concatenate([d.label + 1000 * i for i, d in enumerate(draws)])
    visible = column(lambda d: d.objects.visible[:, 0])  # [N, 5]
    audible = column(lambda d: d.audible)  # [N, 4]
    linked_v, linked_a = column(lambda d: d.linked_visible), column(lambda d: d.linked_audible)

    # The quantity that the link of the query's class predicts, compared with every clip of the gallery.
    rows = np.arange(len(label))
    cause, effect = visible[rows, linked_v], audible[rows, linked_a]
    near_audio = -np.abs(cause[:, None] - audible[:, linked_a].T)  # video query, audio gallery
    near_video = -np.abs(effect[:, None] - visible[:, linked_v].T)  # audio query, video gallery
    same_time, same_class = (values[:, None] == values[None] for values in (pattern, label))
    both = same_time & same_class
    return {
        "chance": _mean_recall(np.zeros_like(same_time)),
        "timing": _mean_recall(same_time),
        "class": _mean_recall(same_class),
        "link": (_mean_recall(near_audio) + _mean_recall(near_video)) / 2,
        "everything": (_mean_recall(near_audio + 10.0 * both) + _mean_recall(near_video + 10.0 * both)) / 2,
    }


def _mean_recall(scores: NDArray[Any]) -> float:
    """Expected mean of R@1/5/10 in percent for scores [queries, gallery], higher is nearer.

    Query i's partner is gallery clip i, and ties are ranked at random.
    """
    own = np.diagonal(scores)[:, None]
    ahead = (scores > own).sum(1)
    tied = (scores == own).sum(1)  # the partner among them
    return float(np.mean([np.clip((k - ahead) / tied, 0, 1).mean() for k in RANKS]) * 100)

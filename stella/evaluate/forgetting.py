"""Average accuracy A and average forgetting F (Sec. 5.1) from the evaluations after each task.

An evaluation is a record with `task` (position of the task just learnt, -1 before the first) and `recall` as
`retrieval.task_recall` returns it. acc(t, i) is R@k of task i's queries after task t, in percent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stella.evaluate.retrieval import DIRECTIONS

Accuracy = NDArray[np.float64]  # [t, i], after task t on task i
Evaluations = Sequence[Mapping[str, Any]]


def average_accuracy(acc: Accuracy) -> float:
    """A: the mean accuracy over all tasks after the last one."""
    return float(acc[-1].mean())


def average_forgetting(acc: Accuracy) -> float | None:
    """F: the drop of each task from its best accuracy before the last task to its final one, averaged over all tasks
    but the last. The best over all t = 1…T−1 as in the paper: it may be from before the task was learnt. None for a
    single task, or without an evaluation after each task (Multitask)."""
    tasks = acc.shape[1]
    if len(acc) != tasks or tasks < 2:
        return None
    return float((acc[:-1, :-1].max(axis=0) - acc[-1, :-1]).mean())


def accuracy(evaluations: Evaluations, direction: str, k: int | str) -> Accuracy:
    """acc(t, i) of one direction and one k, without the evaluation before the first task."""
    learnt = sorted((e for e in evaluations if e["task"] >= 0), key=lambda e: int(e["task"]))
    return np.array([e["recall"][direction][str(k)] for e in learnt], dtype=np.float64)


def mean_accuracy(evaluations: Evaluations) -> Accuracy:
    """acc(t, i), the mean over every k and both directions."""
    matrices = [accuracy(evaluations, d, k) for d in DIRECTIONS for k in evaluations[0]["recall"][d]]
    return np.asarray(np.mean(matrices, axis=0))


def summary(evaluations: Evaluations) -> dict[str, Any]:
    """A and F of each direction and k, and their means as in the paper's tables.

    `{"A": …, "F": …, "a2v": {"A": …, "F": …, "1": {"A": …, "F": …}, …}, "v2a": …}`; F may be None. The means
    are taken over the values of F, which differs from F of the mean accuracy.
    """
    if not any(e["task"] >= 0 for e in evaluations):
        return {"A": None, "F": None}
    table: dict[str, Any] = {}
    for direction in DIRECTIONS:
        matrices = {k: accuracy(evaluations, direction, k) for k in evaluations[0]["recall"][direction]}
        by_k = {k: {"A": average_accuracy(acc), "F": average_forgetting(acc)} for k, acc in matrices.items()}
        table[direction] = {**_means(list(by_k.values())), **by_k}
    return {**_means([table[d] for d in DIRECTIONS]), **table}


def _means(parts: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    columns = {name: [part[name] for part in parts] for name in ("A", "F")}
    return {name: None if None in values else float(np.mean(values)) for name, values in columns.items()}


def gap_decline(gaps: Sequence[Sequence[float]]) -> float | None:
    """How much the gap of earlier tasks shrinks: mean over i < T of the largest gap[t][i] - gap[T][i] over t < T.

    `gaps` has a row for each task learnt, with the gap of every task; None for a single task, or without a row after
    each task (Multitask).
    """
    tasks = len(gaps[0]) if gaps else 0
    if len(gaps) != tasks or tasks < 2:
        return None
    drops = [max(row[i] for row in gaps[:-1]) - gaps[-1][i] for i in range(tasks - 1)]
    return sum(drops) / len(drops)

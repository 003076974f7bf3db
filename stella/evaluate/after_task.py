"""All measurements between tasks, as one record for `metrics.jsonl`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stella.clip import class_of
from stella.data.skipped import Skipped
from stella.data.stream import StreamConfig
from stella.data.tasks import Tasks
from stella.errors import StellaError
from stella.evaluate.classes import class_measures
from stella.evaluate.matching import evaluate_matching, some_of
from stella.evaluate.retrieval import Autocast, Embeddings, embed, modality_gap, task_recall
from stella.model.avm import AVM
from stella.model.cav import CAV
from stella.peers import ALONE, Peers
from stella.rng import generator

POINTS = ("importance_ratio", "auc", "pointing", "pointing_chance")  # where the matching module points
Counted = Callable[[int], AbstractContextManager[Callable[[str, int], None]]]  # as `Display.clips`
MATCHING_CLIPS = 80  # per task: with two pairs each, accuracy over six tasks is exact to about one percent


def evaluate_tasks(
    model: CAV,
    avm: AVM | None,
    tasks: Tasks,
    config: StreamConfig,
    device: torch.device | str = "cpu",
    seed: int = 0,
    autocast: Autocast = nullcontext,
    skipped: Skipped | None = None,
    keep: list[Embeddings] | None = None,
    peers: Peers = ALONE,
    counted: Counted = lambda total: nullcontext(lambda what, clips: None),
) -> dict[str, Any]:
    """Recall and matching accuracy in percent, modality gap and importance per task, ready for JSON.

    `clips` counts the clips of each task that could be used; the others are listed once in `skipped`. Without a
    matching module its measurements are None. Where it points (`importance_ratio`, `auc`, and `pointing` in percent
    beside its chance) is None for a task without masks. Retrieval uses no random number. The matching module is judged
    on `MATCHING_CLIPS` of these clips of each task, the same for every seed; mismatches are drawn from the seed. `keep`
    becomes the list of the tasks' embeddings. `counted` shows what is done with how many clips: all are embedded, then
    some are matched.
    """
    if not tasks:
        raise StellaError("no task to evaluate on; give at least one")
    skipped = Skipped() if skipped is None else skipped
    with counted(sum(len(source) for _, source in tasks)) as done:
        embeddings = [
            embed(model, source, config, device, autocast, skipped.under(f"evaluation/{name}"), peers, embedded)
            for name, source in tasks
            for embedded in [partial(done, f"embedding {name}")]
        ]
    if keep is not None:
        keep[:] = embeddings
    record: dict[str, Any] = {
        "clips": [len(e) for e in embeddings],
        "recall": task_recall(embeddings),
        "modality_gap": [modality_gap(e.a, e.v) for e in embeddings],
        "classes": class_measures(
            embeddings,
            [[class_of(source, i) for i in e.ids.tolist()] for (_, source), e in zip(tasks, embeddings, strict=True)],
        ),
        **dict.fromkeys(("avm_accuracy", "avm_accuracy_by_task", *POINTS)),
    }
    if avm is None:
        return record
    parts = [
        some_of(source, each.ids, MATCHING_CLIPS, generator("matching", n))
        for n, ((_, source), each) in enumerate(zip(tasks, embeddings, strict=True))
    ]
    with counted(sum(map(len, parts))) as done:
        matched = [
            evaluate_matching(model, avm, part, config, generator(seed, "matching", n), device, autocast, judged)
            for n, ((name, _), part) in enumerate(zip(tasks, parts, strict=True))
            for judged in [partial(done, f"matching {name}")]
        ]
    return record | {
        "avm_accuracy": 100 * torch.cat([m.correct for m in matched]).double().mean().item(),
        "avm_accuracy_by_task": [100 * m.correct.double().mean().item() for m in matched],
        "importance_ratio": _known([m.ratio.nanquantile(0.5) for m in matched]),
        "auc": _known([m.auc.nanmean() for m in matched]),
        "pointing": _known([100 * m.pointing.nanmean() for m in matched]),
        "pointing_chance": _known([100 * m.chance.nanmean() for m in matched]),
    }


def _known(values: Sequence[Tensor]) -> list[float | None]:
    """Plain numbers, None for NaN."""
    return [None if value.isnan() else value.item() for value in values]

"""A few queries as pictures: which videos a sound finds, and where the matching module looks. For the page of a run."""

from base64 import b64encode
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import Batch, Source, class_of
from stella.data.stream import StreamConfig, evaluation_batches
from stella.data.tasks import Tasks
from stella.data.views import part
from stella.evaluate.retrieval import Autocast, Embeddings, ranks
from stella.files import Line
from stella.media.codecs import encode_jpegs
from stella.model.avm import AVM, score
from stella.model.cav import CAV
from stella.selection import importance

QUERIES, FOUND = 6, 3
SIDE = 96  # pixels of a picture


@torch.no_grad()
def examples(
    model: CAV,
    avm: AVM | None,
    tasks: Tasks,
    embeddings: Sequence[Embeddings],
    config: StreamConfig,
    device: torch.device | str = "cpu",
    autocast: Autocast = nullcontext,
) -> list[Line]:
    """At most `QUERIES` sounds, spread over the tasks, each with the `FOUND` videos nearest to it; ready for JSON.

    `rank` is that of the sound's own video among the clips of all tasks. `heat` is the importance of the patches of the
    frame that is shown, from 0 to 1; None without a matching module.
    """
    a, v = torch.cat([e.a for e in embeddings]), torch.cat([e.v for e in embeddings])
    places = [(task, int(index)) for task, e in enumerate(embeddings) for index in e.ids]
    count = min(QUERIES, len(places))
    queries = [number * len(places) // count for number in range(count)]
    rank = ranks(a[queries], v, torch.tensor(queries, device=v.device)).tolist()
    best = (a[queries].double() @ v.double().T).topk(min(FOUND, len(places))).indices.tolist()
    shown = sorted({places[row] for row in {*queries, *(row for rows in best for row in rows)}})
    pictures = {}
    for task, (_, source) in enumerate(tasks):
        of_task = [index for each, index in shown if each == task]
        if of_task:
            for index, picture in _pictures(model, avm, source, of_task, config, device, autocast).items():
                pictures[task, index] = {"task": tasks[task][0], **picture}
    return [
        pictures[places[query]]
        | {"rank": rank[k], "of": len(places), "found": [_answer(pictures, places, row, query) for row in best[k]]}
        for k, query in enumerate(queries)
        if {places[row] for row in (query, *best[k])} <= pictures.keys()
    ]


def _answer(pictures: dict[Any, Line], places: Sequence[tuple[int, int]], row: int, query: int) -> Line:
    found = pictures[places[row]]
    return {name: found[name] for name in ("task", "name", "picture")} | {"right": row == query}


def _pictures(
    model: CAV,
    avm: AVM | None,
    source: Source,
    indices: Sequence[int],
    config: StreamConfig,
    device: torch.device | str,
    autocast: Autocast,
) -> dict[int, Line]:
    """One frame of each clip as a JPEG, the one that matters most to the sound, or the middle one."""
    found: dict[int, Line] = {}
    for batch in evaluation_batches(part(source, indices), replace(config, batch_size=len(indices)), device):
        heat = None
        if avm is not None:
            with autocast():
                heat = _heat(model, avm, batch)
        for row, at in enumerate(batch.ids.tolist()):
            frame = batch.video.shape[1] // 2 if heat is None else int(heat[row].amax((1, 2)).argmax())
            pixels = batch.video[row, frame, None].float()
            picture = F.interpolate(pixels, (SIDE, SIDE), mode="bilinear", antialias=True)
            [data] = encode_jpegs(picture.round().clamp(0, 255).byte().cpu())
            index = indices[at]
            found[index] = {
                "name": class_of(source, index) or f"clip {index}",
                "picture": b64encode(data).decode(),
                "heat": None if heat is None else [[round(x, 2) for x in line] for line in heat[row, frame].tolist()],
            }
    return found


def _heat(model: CAV, avm: AVM, batch: Batch) -> Tensor:
    """Importance [B, T, rows, columns], from 0 to 1 in each clip."""
    qk = score(model, avm, model.patches_a(batch.audio), model.patches_v(batch.video)).qk
    found = importance(qk.q_a, qk.k_v, avm.beta).float()
    low, high = found.amin(1, keepdim=True), found.amax(1, keepdim=True)
    return ((found - low) / (high - low).clamp_min(1e-12)).view(len(batch), *model.config.grid_v)

"""Zero-shot retrieval: find a clip's video by its audio among all clips, and the reverse. The modality gap."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stella.clip import Source
from stella.data.skipped import Skipped
from stella.data.stream import StreamConfig, evaluation_batches
from stella.errors import StellaError
from stella.model.cav import CAV
from stella.peers import ALONE, Peers

KS = (1, 5, 10)
DIRECTIONS = ("a2v", "v2a")  # the query is audio, the query is video
TIE = 1e-9  # cosines this close are ties: far above float64 rounding, so ranks do not depend on chunks or devices

Autocast = Callable[[], AbstractContextManager[Any]]  # makes the context of a forward pass
Done = Callable[[int], None]  # is told how many more clips are done


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of the usable clips of a source, in order; rows are L2-normalised."""

    a: Tensor  # float32 [N, D]
    v: Tensor  # float32 [N, D]
    ids: Tensor  # int64 [N], their indices in the source

    def __len__(self) -> int:
        return len(self.ids)


def unit_a(model: CAV, audio: Tensor) -> Tensor:
    """The embedding of spectrograms [B, time, mel]: all patches, alone through fusion, mean, L2-normalised; [B, D]."""
    return F.normalize(model.represent_a(audio).float(), dim=1)


def unit_v(model: CAV, video: Tensor) -> Tensor:
    """The embedding of clips [B, T, 3, H, W], as `unit_a`."""
    return F.normalize(model.represent_v(video).float(), dim=1)


@torch.no_grad()
def embed(
    model: CAV,
    source: Source,
    config: StreamConfig,
    device: torch.device | str = "cpu",
    autocast: Autocast = nullcontext,
    skipped: Skipped | None = None,
    peers: Peers = ALONE,
    done: Done = lambda clips: None,
) -> Embeddings:
    """Embed every clip of a source: all patches, each modality alone through fusion, mean, normalised; on `device`.

    Processes embed their rows of each batch, and all have the embeddings of all.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in evaluation_batches(source, config, device, skipped, peers):
        if len(batch):
            with autocast():
                parts.append((unit_a(model, batch.audio), unit_v(model, batch.video), batch.ids))
        done(len(batch) * peers.count)
    if peers.count == 1:
        return Embeddings(*(torch.cat(column) for column in zip(*parts, strict=True)))
    none = torch.empty(0, model.config.dim, device=device)
    parts.append((none, none, torch.empty(0, dtype=torch.int64, device=device)))
    counts = peers.gather_objects(sum(len(ids) for *_, ids in parts))
    a, v, ids = (peers.gather(torch.cat(column), counts) for column in zip(*parts, strict=True))
    order = ids.argsort()
    return Embeddings(a[order], v[order], ids[order])


@torch.no_grad()
def ranks(query: Tensor, gallery: Tensor, targets: Tensor | None = None, chunk: int = 2048) -> Tensor:
    """The rank, from 1, of row `targets[i]` (None: row i) of the gallery [G, D] for each query [Q, D]; int64 [Q].

    Ties and NaN rank before the target: a collapsed or broken model scores nothing. At most chunk × chunk scores are
    in memory at a time.
    """
    if targets is None:
        if len(query) != len(gallery):
            raise StellaError(
                f"{len(query)} queries and a gallery of {len(gallery)} are not pairs; give the target row of each query"
            )
        targets = torch.arange(len(query), device=query.device)
    places = torch.zeros(len(query), dtype=torch.int64, device=query.device)
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, len(query), chunk):
            rows = slice(start, start + chunk)
            asked = query[rows].double()
            own = (asked * gallery[targets[rows]].double()).sum(1, keepdim=True)  # [q, 1]
            for first in range(0, len(gallery), chunk):
                scores = asked @ gallery[first : first + chunk].double().T  # [q, g]
                places[rows] += (~(scores < own - TIE)).sum(1)  # the target counts itself
    return places


def recall(places: Tensor, ks: Sequence[int] = KS) -> dict[int, float]:
    """R@k in percent: the share of queries whose rank [Q], counted from 1, is at most k."""
    if not len(places):
        raise StellaError("recall needs at least one query; evaluate on at least one usable clip")
    return {k: 100 * (places <= k).double().mean().item() for k in ks}


def task_recall(tasks: Sequence[Embeddings], ks: Sequence[int] = KS) -> dict[str, dict[str, Any]]:
    """R@k of each task's queries, with the clips of all tasks as gallery, per direction and k.

    `{"a2v": {"1": [per task], …}, "v2a": …}`, ready for JSON.
    """
    a, v = torch.cat([task.a for task in tasks]), torch.cat([task.v for task in tasks])  # [N, D]
    sizes = [len(task) for task in tasks]
    table: dict[str, dict[str, Any]] = {}
    for direction, (query, gallery) in zip(DIRECTIONS, ((a, v), (v, a)), strict=True):
        by_task = [recall(places, ks) for places in torch.split(ranks(query, gallery), sizes)]
        table[direction] = {str(k): [recalls[k] for recalls in by_task] for k in ks}
    return table


def modality_gap(a: Tensor, v: Tensor) -> float:
    """Euclidean distance between the centroids of normalised audio [N, D] and video [M, D] embeddings: 0 to 2."""
    return (a.double().mean(0) - v.double().mean(0)).square().sum().sqrt().item()

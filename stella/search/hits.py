"""Rows of vectors as a person knows them: a file, its folder, its seconds; and which rows a filter lets pass."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from stella.search.catalogue import Catalogue, Modality
from stella.search.nearest import Place, Shards, first_rows


@dataclass(frozen=True)
class Hit:
    """A moment that fits."""

    path: str  # below `root`; any bytes, as `os.fsdecode` gives them
    root: Path
    label: str | None
    modality: Modality  # what was compared: its pictures or its sound
    start: float  # seconds
    end: float
    score: float  # cosine of the angle between the vectors
    place: Place  # of its vector: shard and row

    @property
    def file(self) -> Path:
        return self.root / self.path


def hits_of(catalogue: Catalogue, rows: Iterator[tuple[Place, float]], to: Modality, k: int, merge: bool) -> list[Hit]:
    """The first `k` windows that the catalogue knows; of overlapping windows of a file only the best."""
    hits: list[Hit] = []
    taken: dict[int, list[tuple[float, float]]] = {}
    for place, score in rows:
        found = catalogue.db.execute(
            "SELECT files.id, files.path, sources.root, files.label, start, end FROM windows "
            "JOIN files ON files.id = windows.file JOIN sources ON sources.id = files.source "
            "WHERE shard = ? AND row = ?",
            place,
        ).fetchone()
        if found is None:  # dropped
            continue
        file, path, root, label, start, end = found
        spans = taken.setdefault(file, [])
        if merge and any(start < until and since < end for since, until in spans):
            continue
        spans.append((start, end))
        name = os.fsdecode(label) if label else None
        hits.append(Hit(os.fsdecode(path), Path(os.fsdecode(root)), name, to, start, end, score, place))
        if len(hits) == k:
            break
    return hits


def allowed_rows(catalogue: Catalogue, shards: Shards, path: str | None, label: str | None) -> Tensor:
    """bool [rows of all shards]: the windows of files that pass the filters."""

    def passes(name: bytes, folder: bytes | None) -> bool:
        right = label is None or folder == os.fsencode(label)
        return right and (path is None or fnmatchcase(os.fsdecode(name), path))

    catalogue.db.create_function("passes", 2, passes, deterministic=True)
    starts = dict(zip(shards, first_rows(shards).tolist(), strict=True))
    allowed = torch.zeros(sum(map(len, shards.values())), dtype=torch.bool)
    places = catalogue.db.execute(
        "SELECT shard, row FROM windows WHERE file IN (SELECT id FROM files WHERE state = 'ok' AND passes(path, label))"
    )
    allowed[[starts[shard] + row for shard, row in places if shard in starts]] = True
    return allowed


def files_of(catalogue: Catalogue, places: Sequence[Place]) -> list[int]:
    sql = "SELECT file FROM windows WHERE shard = ? AND row = ?"
    return [catalogue.db.execute(sql, place).fetchone()[0] for place in places]

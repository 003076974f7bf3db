"""An inverted-file index by faiss (extra `faiss`): faster than exact search, and approximate.

It is derived from the catalogue and the vectors, never the truth: its file says which version of the catalogue it was
built from, and it is ignored for any other.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stella.errors import require
from stella.files import whole
from stella.search.catalogue import Modality
from stella.search.nearest import Place, Shards, error_bound, refined

TRAINING = 40  # vectors for each list: faiss asks for 39
PROBES = 32  # lists looked into


def build(root: Path, modality: Modality, shards: Shards, version: int) -> None:
    """Write the index of all rows; rows of dropped windows are found too, and the catalogue knows none of them."""
    faiss = require("faiss", "faiss")
    folder = root / "derived"
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{modality}-*.faiss"):
        old.unlink()
    if not shards:
        return
    total, dim = sum(map(len, shards.values())), next(iter(shards.values())).shape[1]
    lists = max(1, min(int(4 * math.sqrt(total)), total // TRAINING))
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(dim), dim, lists, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
    )
    every = max(1, total // (TRAINING * lists))
    index.train(torch.cat([rows[::every] for rows in shards.values()]).float().numpy())
    for rows in shards.values():
        index.add(rows.float().numpy())
    with whole(folder / f"{modality}-{version}.faiss") as temporary:
        faiss.write_index(index, str(temporary))


def load(root: Path, modality: Modality, version: int) -> Any:
    """The derived index of that version; None if there is none."""
    path = root / "derived" / f"{modality}-{version}.faiss"
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return _open(path, status.st_ino, status.st_mtime_ns)


@lru_cache(4)
def _open(path: Path, inode: int, mtime: int) -> Any:
    """Once for each file, not for each path: another index may come to lie there."""
    faiss = require("faiss", "faiss")
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    index.nprobe = PROBES
    return index


def ranked(index: Any, shards: Shards, query: Tensor) -> Iterator[tuple[Place, float]]:
    """Rows of the lists nearest to the query, best first."""

    def candidates(count: int) -> tuple[Tensor, float]:
        scores, positions = index.search(query[None].numpy(), count)
        found = positions[0] >= 0
        last = float(scores[0][found][-1]) if found.any() else 0.0
        others = last + error_bound(query, abs(last)) if found.all() else -torch.inf
        return torch.from_numpy(positions[0][found]), others

    yield from refined(shards, query, candidates, index.ntotal)

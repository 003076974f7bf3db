"""Shards of vectors: files of raw float16 rows that only grow, memory-mapped for reading.

A row is never rewritten. Rows past those that the catalogue counts are the rest of a killed writer; the next writer
cuts them off. Every writer has shards of its own, so several could write one index.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stella.errors import StellaError
from stella.files import Appended, sync_folder
from stella.search.catalogue import Catalogue, Modality, ModelRow, ShardRow

ROWS = 65_536  # of a shard: 96 MiB at D = 768


def shard_path(root: Path, shard: int) -> Path:
    return root / "vectors" / f"{shard:08d}.f16"


class Mapped:
    """The shards of an index as tensors, mapped once and again when they have grown. Threads may share it.

    Another index may come to lie at the same path, with other shards of the same numbers: each map knows its inode,
    which no other file can have as long as the map lasts.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mapped: dict[int, tuple[tuple[int, int], Tensor]] = {}  # with device and inode
        self._lock = threading.Lock()

    def open(self, catalogue: Catalogue, model: ModelRow, modality: Modality) -> dict[int, Tensor]:
        """float16 [rows, D] by shard. FileNotFoundError: the snapshot is older than a compaction."""
        shards = [shard for shard in catalogue.shards(model.id, modality) if shard.rows]
        known = {id for (id,) in catalogue.db.execute("SELECT id FROM shards")}
        with self._lock:
            self._mapped = {id: mapped for id, mapped in self._mapped.items() if id in known}
            return {shard.id: self._open(shard, model.dim) for shard in shards}

    def _open(self, shard: ShardRow, dim: int) -> Tensor:
        path = shard_path(self.root, shard.id)
        known, tensor = self._mapped.get(shard.id, (None, torch.empty(0)))
        if known != _inode(path.stat()) or len(tensor) < shard.rows:
            try:
                with path.open("rb") as file:  # copy-on-write, since torch takes no read-only arrays; nobody writes
                    inode = _inode(os.fstat(file.fileno()))
                    array = np.memmap(file, np.float16, "c", shape=(shard.rows, dim))
            except ValueError as error:
                raise StellaError(f"{path} is shorter than its catalogue says; restore it or index again") from error
            tensor = torch.from_numpy(array)
            self._mapped[shard.id] = inode, tensor
        return tensor[: shard.rows]


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class Writer:
    """Appends vectors of one model. What `append` returned counts once `sync` and then a commit have happened."""

    def __init__(self, catalogue: Catalogue, model: int, dim: int, fresh: bool = False) -> None:
        """`fresh`: begin with new shards even where the last one has room."""
        self.catalogue, self.model, self.row_bytes = catalogue, model, 2 * dim
        self.fresh = fresh
        self._open: dict[Modality, tuple[int, Appended]] = {}
        self._grown: dict[int, Appended] = {}  # shards with rows that are not committed

    def append(self, modality: Modality, vectors: Tensor) -> list[tuple[int, int]]:
        """Write float rows [n, D]; returns (shard, row) of each."""
        places: list[tuple[int, int]] = []
        rest = vectors.half().numpy()
        while len(rest):
            shard, file = self._shard(modality)
            first = file.end // self.row_bytes
            part, rest = rest[: ROWS - first], rest[ROWS - first :]
            try:
                file.append(part.tobytes())
            except OSError as error:
                path = shard_path(self.catalogue.root, shard)
                raise StellaError(
                    f"{path} cannot be written ({error.strerror}); free some space and run again"
                ) from error
            self._grown[shard] = file
            places += [(shard, first + i) for i in range(len(part))]
        return places

    def sync(self) -> list[tuple[int, int]]:
        """Force what was appended to the disk; returns (rows, shard), for the catalogue to commit."""
        grown = [(file.sync() // self.row_bytes, shard) for shard, file in self._grown.items()]
        for file in self._grown.values():
            if file.end == ROWS * self.row_bytes:
                file.close()
        self._open = {
            modality: (shard, f) for modality, (shard, f) in self._open.items() if f.end < ROWS * self.row_bytes
        }
        self._grown = {}
        return grown

    def close(self) -> None:
        for _, file in self._open.values():
            file.close()

    def _shard(self, modality: Modality) -> tuple[int, Appended]:
        """The shard to append to: the open one, the last one of the catalogue, or a new one."""
        full = modality in self._open and self._open[modality][1].end == ROWS * self.row_bytes
        if modality in self._open and not full:
            return self._open[modality]
        last = self.catalogue.shards(self.model, modality)[-1:]
        if full or not last or self.fresh:
            with self.catalogue.change() as db:
                shard = (
                    db.execute("INSERT INTO shards (model, modality) VALUES (?, ?)", (self.model, modality)).lastrowid
                    or 0
                )
            last = [ShardRow(shard, 0)]
        path = shard_path(self.catalogue.root, last[0].id)
        self._open[modality] = last[0].id, Appended(path, last[0].rows * self.row_bytes)
        sync_folder(path.parent)
        return self._open[modality]


def remove_unknown(catalogue: Catalogue) -> None:
    """Delete files of shards that the catalogue does not name. Only the holder of the index's lock may call this."""
    known = {shard_path(catalogue.root, id) for (id,) in catalogue.db.execute("SELECT id FROM shards")}
    for path in (catalogue.root / "vectors").iterdir():
        if path not in known:
            with suppress(FileNotFoundError):
                path.unlink()

"""Features of a frozen backbone, computed once: columns in half precision, on the GPU, in memory or memory-mapped.

A head then trains at the speed of memory. Of `views` augmented versions of each clip every epoch takes another one.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stella.clip import Batch, Device, Source
from stella.data.chunk import Chunk
from stella.data.skipped import Skipped
from stella.data.stream import Held, Stream, StreamConfig
from stella.files import read_json, sync_file, write_json
from stella.train.device import free_bytes

IN_MEMORY = 4 << 30  # bytes of columns kept in memory; larger ones are memory-mapped
ON_DEVICE = 0.25  # share of a GPU's free memory that columns may take; more are kept in memory


@dataclass(frozen=True)
class Table:
    """Rows of columns [N, …]; floating-point columns are float16. With several views, view v of row i is v·N + i."""

    columns: Mapping[str, Tensor]
    device: torch.device
    views: int = 1

    def __len__(self) -> int:
        """The rows of one view."""
        return len(next(iter(self.columns.values()))) // self.views

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        """These rows, on the device, floating-point ones as float32."""
        return {name: _wide(column[index.to(column.device)].to(self.device)) for name, column in self.columns.items()}

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """All rows of the first view in order."""
        for start in range(0, len(self), size):
            yield self.rows(torch.arange(start, min(start + size, len(self))))


def _wide(column: Tensor) -> Tensor:
    return column.float() if column.is_floating_point() else column


class Epochs(Stream):
    """A source for some epochs, each of which counts as a task: `finished_task` is the epoch that ended.

    The ids of clips are their indices in the source.
    """

    def __init__(
        self, source: Source, epochs: int, config: StreamConfig, device: Device = "cpu", skipped: Skipped | None = None
    ) -> None:
        names = [f"epoch {number + 1} of {epochs}" for number in range(epochs)]
        super().__init__([(name, source) for name in names], replace(config, epochs=1), device, skipped)

    def _admit(self, chunk: Chunk, held: Held) -> None:
        length = len(self.sources[0])
        batch = None if chunk.batch is None else replace(chunk.batch, ids=chunk.batch.ids % length)
        super()._admit(Chunk(batch, {id % length: error for id, error in chunk.skipped.items()}), held)


class Rows(Epochs):
    """Batches of a table's rows: they carry the rows' numbers alone. Every epoch takes another view."""

    def __init__(self, table: Table, epochs: int, config: StreamConfig) -> None:
        super().__init__(range(len(table)), epochs, replace(config, workers=0))  # type: ignore[arg-type]
        self._table = table

    def _run(self) -> Generator[Batch, None, None]:
        nothing, rows, views = torch.empty(0), len(self._table), self._table.views

        def chunk(indices: Iterable[int], task: int) -> Chunk:
            ids = torch.tensor(list(indices))
            blank = nothing.expand(len(ids), 0)
            return Chunk(Batch(blank, blank, ids + rows * (task % views)), {})

        chunks = (chunk(job.indices, job.task) for job in self._jobs())
        while self.position.task < len(self.sources):
            yield from self._epoch(chunks)

    def _admit(self, chunk: Chunk, held: Held) -> None:
        held.chunks.append(chunk)  # nothing can be skipped, and ids beyond the first view are meant


def tabulate(
    columns_of: Callable[[Batch], dict[str, Tensor]],
    batches: Iterable[Batch],
    most: int,
    device: torch.device,
    views: int = 1,
    folder: Path | None = None,
    keep: bool = False,
) -> Table:
    """The columns of all batches, computed without gradient; `most` is the largest number of rows.

    They stay on a GPU if they fit there. Columns of more than `IN_MEMORY` bytes elsewhere, or all with `keep`, are
    memory-mapped files in `folder`, to be found again.
    """
    if folder is not None and (folder / "table.json").exists():
        return _reopened(folder, device, views)
    here = torch.device("cpu") if keep else device
    writers: dict[str, Tensor] = {}
    files, filled = None, 0
    with torch.no_grad():
        for batch in batches:
            made = {name: _narrow(column) for name, column in columns_of(batch).items()}
            if not writers:
                writers, files = _allocated(made, most, folder, here, keep)
            for name, column in made.items():
                writers[name][filled : filled + len(batch)] = column
            filled += len(batch)
    if files is not None:
        kinds = {name: [str(c.dtype).removeprefix("torch."), list(c.shape)] for name, c in writers.items()}
        for name in writers:
            sync_file(files / f"{name}.bin")  # a table that is found again is whole
        write_json(files / "table.json", {"rows": filled, "columns": kinds})
    return Table({name: column[:filled] for name, column in writers.items()}, device, views)


def _narrow(column: Tensor) -> Tensor:
    return column.half() if column.is_floating_point() else column


def _allocated(
    first: Mapping[str, Tensor], most: int, folder: Path | None, here: torch.device, keep: bool
) -> tuple[dict[str, Tensor], Path | None]:
    """Columns of `most` rows, and the folder of their files if they are memory-mapped."""
    shapes = {name: (most, *column.shape[1:]) for name, column in first.items()}
    total = sum(prod(shapes[name]) * column.element_size() for name, column in first.items())
    fits = here.type != "cpu" and total <= ON_DEVICE * free_bytes(here)
    if fits or folder is None or (total <= IN_MEMORY and not keep):
        place = here if fits else "cpu"
        made = {name: torch.empty(shapes[name], dtype=column.dtype, device=place) for name, column in first.items()}
        return made, None
    folder.mkdir(parents=True, exist_ok=True)
    return {name: _mapped(folder / f"{name}.bin", shapes[name], c.dtype) for name, c in first.items()}, folder


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype).view(shape)


def _reopened(folder: Path, device: torch.device, views: int) -> Table:
    about: dict[str, Any] = read_json(folder / "table.json")
    columns = {
        name: _mapped(folder / f"{name}.bin", tuple(shape), getattr(torch, dtype))[: about["rows"]]
        for name, (dtype, shape) in about["columns"].items()
    }
    return Table(columns, device, views)

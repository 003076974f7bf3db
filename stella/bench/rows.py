"""A row of a benchmark: what was measured of one method at one batch size, as a line of a table or of a CSV."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from stella.errors import StellaError


@dataclass(frozen=True)
class Row:
    name: str
    method: str
    batch: int
    clips_per_second: float
    ms: float  # a step, median
    ms_p90: float
    peak_gib: float  # allocated, everything included
    reserved_gib: float
    gflop_per_clip: float  # counted: matrix products and attention
    tflops: float
    share: float  # of the rate of a large matrix product, measured in the same process
    host_syncs: int  # in one steady step; a stream's own wait for a batch is not among them
    start_seconds: float  # until steady steps: building, compiling, recording
    stages: dict[str, float]  # ms, on synthetic clips
    feed: str = "synthetic"


FACTS = ("commit", "changed_files", "torch", "gpu", "cores", "precision")
COLUMNS = [*(field.name for field in fields(Row)), *FACTS, "command"]


def write_rows(path: Path, rows: Sequence[Row], command: str, facts: Mapping[str, Any]) -> None:
    """Append rows to a CSV, with what one needs to get them again."""
    check_columns(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not _written(path)
    with path.open("a", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            table.writeheader()
        for row in rows:
            flat: dict[str, Any] = {
                name: f"{value:.4g}" if isinstance(value, float) else value for name, value in asdict(row).items()
            }
            flat["stages"] = " ".join(f"{stage}={ms:.1f}" for stage, ms in row.stages.items())
            table.writerow(flat | {name: facts[name] for name in FACTS} | {"command": command})


def check_columns(path: Path) -> None:
    """Refuse a file of something else."""
    if _written(path) and path.read_text(encoding="utf-8").split("\n")[0] != ",".join(COLUMNS):
        raise StellaError(f"{path} has other columns than rows of a benchmark; choose another file")


def _written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def rows_table(rows: Sequence[Row]) -> Table:
    """Side by side, clips/s also as a ratio to the first row of the same batch size."""
    table = Table("method", "feed", title="One training step", title_justify="left")
    for column in ("batch", "clips/s", "ratio", "ms", "GiB", "GFLOP/clip", "TFLOP/s", "of peak", "syncs"):
        table.add_column(column, justify="right")
    first: dict[int, float] = {}
    for row in rows:
        ratio = row.clips_per_second / first.setdefault(row.batch, row.clips_per_second)
        figures = f"{row.clips_per_second:.1f}", f"{ratio:.2f}", f"{row.ms:.1f}", f"{row.peak_gib:.2f}"
        work = f"{row.gflop_per_clip:.3g}", f"{row.tflops:.3g}", f"{row.share:.0%}", str(row.host_syncs)
        table.add_row(row.name, row.feed, str(row.batch), *figures, *work)
    return table

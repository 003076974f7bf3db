"""A row of a benchmark: one configuration's measurements, as a line of a table or of a CSV."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from stella.errors import StellaError


@dataclass(frozen=True)
class Row:
    name: str
    method: str
    batch: int
    clips_per_second: float
    ms: float  # median time of a step
    ms_p90: float
    peak_gib: float  # allocated: weights, optimiser, gradients, activations, rehearsal memory; RAM on a CPU
    reserved_gib: float  # by the allocator
    gflop_per_clip: float  # matrix products and attention
    tflops: float  # TFLOP/s
    share: float  # of the rate of a large matrix product, measured in the same process
    host_syncs: int  # in one steady step, without the stream's own wait for a batch
    start_seconds: float  # to the first steady step: building, compiling, recording
    feed: str = "synthetic"


FACTS = ("commit", "changed_files", "torch", "gpu", "cores", "precision")
COLUMNS = [*(field.name for field in fields(Row)), *FACTS, "command"]


def write_rows(path: Path, rows: Sequence[Row], command: str, facts: Mapping[str, Any]) -> None:
    """Append rows to a CSV, with the command and the environment that produced them."""
    columns = check_columns(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns or COLUMNS, lineterminator="\n")
        if not columns:
            table.writeheader()
        for row in rows:
            line = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in asdict(row).items()}
            table.writerow(line | {name: facts[name] for name in FACTS} | {"command": command})


def check_columns(path: Path) -> list[str]:
    """The columns of a CSV, empty for a new file; refuse one that has no place for a row. It may have more columns."""
    header = path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else ""
    columns = header.split(",") if header else []
    if columns and (missing := [name for name in COLUMNS if name not in columns]):
        raise StellaError(f"{path} is not a CSV of benchmark rows: it has no column {missing[0]}; choose another file")
    return columns


def rows_table(rows: Sequence[Row], setting: str) -> Table:
    """Rows side by side, with clips/s as a ratio to the first row of the same batch size. `setting` (preset, precision,
    device) is for the title. It fits 80 columns: names wrap, figures are whole."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"One training step, {' and '.join(sorted({row.feed for row in rows}))} clips: {setting}",
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("method", overflow="fold")
    for column in ("batch", "clips/s", "ratio", "ms", "GiB", "GFLOP\n/clip", "TFLOP\n/s", "of\npeak", "syncs"):
        table.add_column(column, justify="right", no_wrap=True)
    first: dict[int, float] = {}
    for row in rows:
        ratio = row.clips_per_second / first.setdefault(row.batch, row.clips_per_second)
        figures = f"{row.clips_per_second:.1f}", f"{ratio:.2f}", f"{row.ms:.1f}", f"{row.peak_gib:.2f}"
        work = f"{row.gflop_per_clip:.3g}", f"{row.tflops:.3g}", f"{row.share:.0%}", str(row.host_syncs)
        table.add_row(Text(row.name), str(row.batch), *figures, *work)
    return table

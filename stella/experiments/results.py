"""Results of a reproduction as one CSV: collected from run folders, and read again without them."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from stella.errors import StellaError
from stella.experiments.compare import row, to_csv
from stella.files import lock, write_text
from stella.runs.folder import RunFolder
from stella.runs.record import Spread

Rows = list[dict[str, str]]


def collect(folder: Path | str) -> Path:
    """Write `folder/results.csv`: one line for each finished run anywhere below `folder`, as `stella compare` has them.

    The name of a line is the run's place, `ORDER/VARIANT`; processes that had folders of their own are below one
    folder with those before it. It may be called by several processes at once: the last has them all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "results.lock", wait=True):
        found = [RunFolder(config.parent) for config in sorted(folder.rglob("config.json"))]
        rows = [row(run.root.relative_to(folder).parent.as_posix(), run) for run in found if run.end is not None]
        write_text(folder / "results.csv", to_csv(rows))
    return folder / "results.csv"


def read_results(path: Path | str, keys: Iterable[str]) -> tuple[dict[str, Rows], list[str]]:
    """The lines of a CSV by `ORDER/VARIANT`, and the names that are none of `keys`.

    A name without an order, as `stella compare` writes it, belongs to the first order.
    """
    path, keys = Path(path), list(keys)
    try:
        lines = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise StellaError(f"{path} cannot be read ({error}); give the results.csv of a reproduction") from error
    if not lines or "name" not in lines[0]:
        raise StellaError(f"{path} has no lines with a column `name`; give the results.csv of a reproduction")
    found: dict[str, Rows] = {key: [] for key in keys}
    unknown: list[str] = []
    for line in lines:
        if (key := _key(line["name"], keys)) is None:
            unknown.append(line["name"])
        elif any(other.get("seed") == line.get("seed") for other in found[key]):
            raise StellaError(f"{path} has {key} with seed {line.get('seed')} twice; take one of the two away")
        else:
            found[key].append(line)
    return found, sorted(set(unknown))


def spread(rows: Rows, figure: str) -> Spread:
    """Over the seeds, where the figure is defined (F of Multitask is not)."""
    return Spread([float(row[figure]) for row in rows if row[figure]])


def _key(name: str, keys: Sequence[str]) -> str | None:
    """`p7/original/er` and `original/er` are that run; so is `er` if original is the first order."""
    if "/" not in name:
        name = f"{keys[0].split('/')[0]}/{name}"
    return next((key for key in keys if f"/{name}".endswith(f"/{key}")), None)

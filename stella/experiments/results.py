"""Results of many runs as one CSV: collected from run folders, and read again without them."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stella.errors import StellaError
from stella.evaluate.forgetting import gap_decline
from stella.evaluate.retrieval import DIRECTIONS, KS
from stella.files import Line, lock, read_json, read_lines, write_text
from stella.runs.environment import provenance
from stella.runs.folder import RunFolder, runs_below
from stella.runs.record import Spread

FIGURES = [(direction, str(k), figure) for direction in DIRECTIONS for k in KS for figure in "AF"]
Rows = list[dict[str, str]]


def collect(folder: Path | str) -> Path:
    """Write `folder/results.csv`: one line for each finished run anywhere below `folder`.

    A line's name is the run's path without the seed, such as `ORDER/VARIANT`. Several processes may call this at the
    same time: the last one lists all runs.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "results.lock", wait=True):
        found = [run for run in runs_below(folder) if run.end is not None]
        rows = [row(run.root.relative_to(folder).parent.as_posix(), run) for run in found]
        write_text(folder / "results.csv", to_csv(rows))
    return folder / "results.csv"


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]) if rows else ["name"], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def row(name: str, run: RunFolder) -> dict[str, Any]:
    """A line of results: the scores of a finished run, and its provenance."""
    end, config = run.end, run.read_config()
    assert end is not None
    return {
        "name": name,
        **{key: config[key] for key in ("method", "seed")},
        **{figure: end[figure] for figure in "AF"},
        **{f"slow_{figure}": end.get("slow", {}).get(figure) for figure in "AF"},  # empty without train.ema
        **{f"{way}_{k}_{figure}": end[way][k][figure] for way, k, figure in FIGURES},
        **_gap([line for line in read_lines(run.metrics) if line["kind"] == "evaluation"]),
        **_matching([line for line in read_lines(run.metrics) if line["kind"] == "evaluation"]),
        "clips": end["clips"],
        **_all_provenance(read_json(run.environment)),
    }


def _gap(evaluations: Sequence[Line]) -> dict[str, Any]:
    """The modality gap, the mean over tasks, after each task and at the end, and its decline."""
    gaps = [line["modality_gap"] for line in evaluations if line["task"] >= 0 and line.get("modality_gap")]
    means = [sum(gap) / len(gap) for gap in gaps]
    after = " ".join(f"{mean:.4f}" for mean in means)
    return {"gap": means[-1] if gaps else None, "gap_decline": gap_decline(gaps), "gaps": after}


def _matching(evaluations: Sequence[Line]) -> dict[str, Any]:
    """Accuracy of the matching module at the end, on all tasks and on the last one, and the lowest ratio of importance
    on the sounding object to importance elsewhere, of any task after any task; None without a matching module."""
    last: Line = next(reversed(evaluations), {})
    ratios = [ratio for line in evaluations for ratio in line.get("importance_ratio") or () if ratio is not None]
    return {
        "avm_accuracy": last.get("avm_accuracy"),
        "avm_accuracy_last_task": (last.get("avm_accuracy_by_task") or [None])[-1],
        "least_importance_ratio": min(ratios, default=None),
    }


def _all_provenance(facts: Line) -> dict[str, Any]:
    """Commit and hardware; of a run that was resumed elsewhere all of them, the first one first."""
    found = [provenance(each) for each in (*facts.get("earlier", ()), facts)]
    if len(found) == 1:
        return found[0]
    return {key: " + ".join(dict.fromkeys(str(each[key]) for each in found)) for key in found[0]}


def read_csv(path: Path) -> Rows:
    try:
        return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise StellaError(f"{path} cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise StellaError(f"{path} is no CSV in UTF-8 ({error}); give the results.csv of a reproduction") from error


def check_columns(name: str, path: Path, lines: Rows, columns: Iterable[str]) -> None:
    """Refuse the CSV of a reproduction of another kind."""
    if lacking := [column for column in columns if any(column not in line for line in lines)]:
        raise StellaError(f"{path} is not of {name}: it has no column {lacking[0]}; give another file or name")


def read_results(path: Path | str, keys: Iterable[str]) -> tuple[dict[str, Rows], list[str]]:
    """The lines of a results.csv by `ORDER/VARIANT`, and the names that match none of `keys`.

    A name without an order, as `stella compare` writes it, belongs to the first order.
    """
    path, keys = Path(path), list(keys)
    lines = read_csv(path)
    if not lines or "name" not in lines[0]:
        raise StellaError(f"{path} has no lines with a column `name`; give the results.csv of a reproduction")
    found: dict[str, Rows] = {key: [] for key in keys}
    unknown: list[str] = []
    for line in lines:
        if (key := _key(line["name"], keys)) is None:
            unknown.append(line["name"])
        elif any(other.get("seed") == line.get("seed") for other in found[key]):
            raise StellaError(f"{path} has {key} with seed {line.get('seed')} twice; remove one of the two lines")
        else:
            found[key].append(line)
    return found, sorted(set(unknown))


def spread(rows: Rows, figure: str) -> Spread:
    """A figure over the seeds for which it is defined (F of Multitask is not)."""
    return Spread([float(row[figure]) for row in rows if row.get(figure)])


def _key(name: str, keys: Sequence[str]) -> str | None:
    """`p7/original/er` and `original/er` are that run; so is `er` if original is the first order."""
    if "/" not in name:
        name = f"{keys[0].split('/')[0]}/{name}"
    return next((key for key in keys if f"/{name}".endswith(f"/{key}")), None)

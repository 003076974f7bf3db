"""Downstream runs on the page and in the terminal: what finished models are good for, beside what needs no look."""

import re
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from stella.errors import StellaError, plain
from stella.report.tables import new_table
from stella.runs.folder import RunFolder
from stella.runs.record import Spread
from stella.transfer.results import row

FIGURES = {
    "recall": "clips found: mean of R@1, R@5 and R@10, %",
    "accuracy": "right answers, %",
    "miou": "mean overlap of masks (IoU), %",
    "adaptive_ciou": "overlap of the map with the object (cIoU), %",
}
WITHOUT = {
    "chance": "chance",
    "majority": "the commonest class",
    "class": "the class alone",
    "disc": "a disc in the middle",
    "constant": "one mask for all",
    "empty": "an empty mask",
}
KEYS = ("task", "model", "after", "slow", "backbone", "probe")  # runs that differ in nothing else are seeds
MOST_BYTES = 2_000_000  # of a picture on the page


def read_downstream(runs: Sequence[RunFolder]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of those runs that can be read; a sentence for each that is unfinished or damaged."""
    rows, left_out = [], []
    for run in runs:
        try:
            if run.end is None:
                left_out.append(f"{run.root} is not finished; continue it with stella transfer --resume {run.root}")
            else:
                rows.append(row(run) | {"ceilings": dict(run.end["ceilings"]), "run": run.root})
        except StellaError as error:
            left_out.append(str(error))
        except Exception:  # a damaged record may lead to any
            left_out.append(f"{run.root} is damaged: its records do not fit together; restore it or leave it out")
    return rows, left_out


def by_task(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """For each task a line for each model and head, the best first: its figure over seeds, beside what needs none."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in rows:
        own = each | {"model": _experiment(each["model"])}
        found.setdefault(tuple(own[key] for key in KEYS), []).append(each)
    lines: dict[str, list[dict[str, Any]]] = {}
    for (task, model, after, slow, backbone, probe), same in found.items():
        known = same[0]["ceilings"]
        of = (f", after task {after}" if after else "") + (", slow weights" if slow else "")
        head = f"{'linear layer' if probe else 'head'}, {backbone} backbone"
        lines.setdefault(task, []).append(
            {
                "model": plain("/".join(Path(model).parts[-2:])) + of,
                "head": "nothing is trained" if task == "localise" else head,
                "runs": len(same),
                "value": Spread([float(each["value"]) for each in same]),
                "figure": FIGURES.get(same[0]["figure"], same[0]["figure"]),
                "without": ", ".join(f"{WITHOUT.get(name, name)} {value:.1f}" for name, value in known.items()),
                "clips": same[0]["clips"].rpartition("/")[2],
                "picture": _picture(same[0]["run"]),
            }
        )
    return {task: sorted(of_task, key=lambda line: -line["value"].mean) for task, of_task in lines.items()}


def _experiment(model: str) -> str:
    """A run without its seed: `NAME/seed-1` and `NAME/seed-2` are one experiment."""
    return str(Path(model).parent) if re.fullmatch(r"seed-\d+", Path(model).name) else model


def story(tasks: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A sentence for each task: the best model, and what is had without a look at the clips."""
    return [
        f"Downstream, {task}: {lines[0]['model']} reaches {lines[0]['value'].short}%"
        + (f" ({lines[0]['without']})." if lines[0]["without"] else ".")
        for task, lines in tasks.items()
    ]


def downstream_table(tasks: dict[str, list[dict[str, Any]]]) -> Table:
    table = new_table("Downstream tasks", "task")
    for heading in ("model", "trained"):
        table.add_column(heading, overflow="fold")
    table.add_column("%", justify="right", style="bold", no_wrap=True)
    table.add_column("without a look, %", overflow="fold", style="dim")
    for task, lines in tasks.items():
        for line in lines:
            cells = (Text(line["model"]), line["head"], str(line["value"]), Text(line["without"]))
            table.add_row(Text(task), *cells)
    table.caption = "; ".join(f"{task}: {lines[0]['figure']}" for task, lines in tasks.items())
    return table


def _picture(run: Path) -> str | None:
    """What the model says of a few test clips, as `stella transfer` drew it."""
    file = run / "predictions.png"
    if not file.is_file() or file.stat().st_size > MOST_BYTES:
        return None
    return b64encode(file.read_bytes()).decode()

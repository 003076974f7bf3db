"""Downstream runs on the page and in the terminal: what finished models are good for, beside what needs no look."""

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from stella.errors import StellaError, plain
from stella.report.tables import new_table
from stella.runs.folder import RunFolder
from stella.runs.record import NOT_THE_EXPERIMENT, Spread
from stella.transfer.results import row, settings

Row = dict[str, Any]

FIGURES = {
    "recall": "clips found: mean of R@1, R@5 and R@10, %",
    "accuracy": "right answers, %",
    "map": "mean over classes of the average precision (mAP), %",
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
SEVERAL = {"map": "classify, several classes a clip"}  # the title of a figure that is not its task's usual one
KEYS = ("task", "figure", "model", "weights", "after", "slow", "backbone", "probe", "data", "settings", "parts")
IN_COLUMNS = ("weights.after", "weights.slow", "head.frozen", "head.probe")  # settings that a line names in words
SIZES = ("data.pixels", "data.frames", "data.duration", "data.span", "data.short_side")  # of inputs, not of a data set
MOST_BYTES = 2_000_000  # of a picture on the page


def read_downstream(runs: Sequence[RunFolder]) -> tuple[list[Row], list[str]]:
    """The rows of those runs that can be read; a sentence for each that is unfinished, damaged or there twice."""
    rows: dict[str, Row] = {}
    left_out = []
    for run in runs:
        try:
            if run.end is None:
                left_out.append(f"{run.root} is not finished; continue it with stella transfer --resume {run.root}")
                continue
            found = _row(run)
            first = rows.setdefault(json.dumps([_experiment(found), found["seed"], found["path"]]), found)
            if first is not found:
                left_out.append(f"{run.root} has the settings and the seed of {first['run']}; give it another seed")
        except StellaError as error:
            left_out.append(str(error))
        except Exception:  # a damaged record may lead to any
            left_out.append(f"{run.root} is damaged: its records do not fit together; restore it or leave it out")
    return list(rows.values()), left_out


def _row(run: RunFolder) -> Row:
    """What `results.row` returns, and what tells this run from runs that differ in more than the seed."""
    config, end = run.read_config(), run.end
    assert end is not None
    found = row(run)
    own = {key: value for key, value in settings(config).items() if key not in (*NOT_THE_EXPERIMENT, *IN_COLUMNS)}
    of_data = [key for key in own if key.startswith("data.") and key not in SIZES]
    data = {key: config["data"][key] for key in ("source", "path") if config["data"].get(key) is not None}
    seeded = re.fullmatch(r"seed-\d+", Path(found["model"]).name)
    return found | {
        "path": found["model"],
        "model": str(Path(found["model"]).parent) if seeded else found["model"],
        "weights": None if seeded else config["weights"].get("digest"),
        "data": data | {key.removeprefix("data."): own[key] for key in of_data},
        "settings": {key: value for key, value in own.items() if key not in of_data},
        "parts": list(end["parts"]),
        "ceilings": {name: float(value) for name, value in end["ceilings"].items()},
        "value": float(found["value"]),
        "run": run.root,
    }


def _experiment(found: Row) -> str:
    """A text that differs between runs that differ in more than the seed: `NAME/seed-1` and `NAME/seed-2` are one."""
    return json.dumps([found[key] for key in KEYS], sort_keys=True)


def by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """For each task a line for each model, head, data set and settings: its figure over seeds, beside what needs none.

    Lines of one data set follow each other, the best first; `data` is empty where all lines have the same.
    """
    found: dict[str, dict[str, list[Row]]] = {}
    for each in rows:
        task: str = SEVERAL.get(each["figure"]) or each["task"]
        found.setdefault(task, {}).setdefault(_experiment(each), []).append(each)
    tasks = {task: _lines(list(groups.values())) for task, groups in found.items()}
    every = [line for lines in tasks.values() for line in lines]
    if len({line["data"] for line in every}) == 1:
        for line in every:
            line["data"] = ""
    return tasks


def _lines(groups: Sequence[Sequence[Row]]) -> list[Row]:
    firsts = [same[0] for same in groups]
    models, data, others = _models(firsts), _data(firsts), _settings(firsts)
    lines = []
    for same, model, clips, other in zip(groups, models, data, others, strict=True):
        head = f"{'linear layer' if same[0]['probe'] else 'head'}, {same[0]['backbone']} backbone"
        lines.append(
            {
                "model": plain(model),
                "data": plain(clips),
                "head": "nothing is trained" if same[0]["task"] == "localise" else head,
                "settings": plain(other),
                "runs": len(same),
                "value": Spread([each["value"] for each in same]),
                "figure": FIGURES.get(same[0]["figure"], same[0]["figure"]),
                "without": _without(same),
                "clips": str(same[0]["parts"][-1]),
                "picture": next(filter(None, (_picture(each["run"]) for each in same)), None),
            }
        )
    order = list(dict.fromkeys(line["data"] for line in lines))
    return sorted(lines, key=lambda line: (order.index(line["data"]), -line["value"].mean))


def _without(same: Sequence[Row]) -> str:
    """The means over runs of what can be had without looking; with a deviation where the runs differ."""
    known = [each["ceilings"] for each in same]
    names = dict.fromkeys(name for each in known for name in each)
    spreads = {name: Spread([each[name] for each in known if name in each]) for name in names}
    return ", ".join(
        f"{WITHOUT.get(name, name)} {spread if len(set(spread.values)) > 1 else spread.short}"
        for name, spread in spreads.items()
    )


def _models(firsts: Sequence[Row]) -> list[str]:
    """The name of each line's model, with its digest where a file was exchanged between runs."""
    short = _shortened([each["model"] for each in firsts], 2)
    digests = {each["model"]: {e["weights"] for e in firsts if e["model"] == each["model"]} for each in firsts}
    return [
        short[each["model"]]
        + (f" ({each['weights']})" if len(digests[each["model"]]) > 1 else "")
        + (f", after task {each['after']}" if each["after"] else "")
        + (", slow weights" if each["slow"] else "")
        for each in firsts
    ]


def _data(firsts: Sequence[Row]) -> list[str]:
    """The data set of each line: its source, and what tells it from others of that source."""
    short = _shortened([str(each["data"]["path"]) for each in firsts if "path" in each["data"]], 1)
    labels = []
    for each in firsts:
        rivals = [other["data"] for other in firsts if other["data"]["source"] == each["data"]["source"]]
        own = _differing(each["data"], rivals)
        words = [short[str(value)] if key == "path" else f"{key}={value}" for key, value in own.items()]
        labels.append(", ".join([str(each["data"]["source"]), *words]))
    counts = [f"{label}, {'/'.join(map(str, each['parts']))} clips" for label, each in zip(labels, firsts, strict=True)]
    grown = {label for label in labels if len({c for c, own in zip(counts, labels, strict=True) if own == label}) > 1}
    return [count if label in grown else label for label, count in zip(labels, counts, strict=True)]


def _settings(firsts: Sequence[Row]) -> list[str]:
    """The settings of each line that differ from the task's defaults and are not those of all lines."""
    every = [each["settings"] for each in firsts]
    return [", ".join(f"{key}={value}" for key, value in _differing(own, every).items()) for own in every]


def _differing(own: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in own.items() if any(other.get(key) != value for other in every)}


def _shortened(places: Sequence[str], least: int) -> dict[str, str]:
    """The last parts of each path: at least so many, and as many as tell them apart."""
    parts = {place: Path(place).parts for place in places}
    for count in range(least, max(map(len, parts.values()), default=0)):
        short = {place: "/".join(own[-count:]) for place, own in parts.items()}
        if len(set(short.values())) == len(short):
            return short
    return {place: place for place in parts}


def story(tasks: dict[str, list[Row]]) -> list[str]:
    """A sentence for each task and data set: the best model, and what can be had without looking at the clips."""
    sentences = []
    for task, lines in tasks.items():
        best: dict[str, Row] = {}
        for line in lines:
            best.setdefault(line["data"], line)
        for data, line in best.items():
            where = f" on {data}" if data else ""
            without = f" ({line['without']})" if line["without"] else ""
            sentences.append(f"Downstream, {task}{where}: {line['model']} reaches {line['value'].short}%{without}.")
    return sentences


def downstream_table(tasks: dict[str, list[Row]]) -> Table:
    table = new_table("Downstream tasks", "task")
    data = ["data"] if any(line["data"] for lines in tasks.values() for line in lines) else []
    for heading in ("model", *data, "trained"):
        table.add_column(heading, overflow="fold")
    table.add_column("%", justify="right", style="bold", no_wrap=True)
    table.add_column("without looking, %", overflow="fold", style="dim")
    for task, lines in tasks.items():
        for line in lines:
            trained = "; ".join(filter(None, (line["head"], line["settings"])))
            cells = [line["model"], *(line[key] for key in data), trained, str(line["value"]), line["without"]]
            table.add_row(Text(task), *map(Text, cells))
    table.caption = "; ".join(f"{task}: {lines[0]['figure']}" for task, lines in tasks.items())
    return table


def _picture(run: Path) -> str | None:
    """What the model says of a few test clips, as `stella transfer` drew it."""
    file = run / "predictions.png"
    if not file.is_file() or file.stat().st_size > MOST_BYTES:
        return None
    return b64encode(file.read_bytes()).decode()

"""Results of downstream runs as one CSV."""

from pathlib import Path
from typing import Any

from stella.config import to_tree
from stella.data.config import is_embedded
from stella.files import Line, read_json
from stella.runs.environment import provenance
from stella.runs.folder import RunFolder
from stella.runs.record import flatten
from stella.transfer.config import transfer_config

GIVEN = (
    "task",
    "seed",
    "features",
    "weights.source",
    "weights.digest",
    "stream.size",
    "stream.spec_frames",
    "stream.seed",
)


def downstream_rows(folder: Path | str) -> list[dict[str, Any]]:
    """A row for each finished downstream run below a folder."""
    found = [RunFolder(config.parent) for config in sorted(Path(folder).rglob("config.json"))]
    runs = [run for run in found if "task" in run.read_config() and run.end is not None]
    return [row(run) for run in runs]


def row(run: RunFolder) -> dict[str, Any]:
    """The test figures of a finished run, what can be had without looking, and its provenance."""
    config, end = run.read_config(), run.end
    assert end is not None
    weights, head, figure = config["weights"], config["head"], end["figure"]
    return {
        "task": config["task"],
        "model": weights["source"],
        "after": weights["after"],
        "slow": weights["slow"],
        "backbone": "frozen" if head["frozen"] else "trained",
        "probe": head["probe"],
        "seed": config["seed"],
        "figure": figure,
        "value": end["test"][figure],
        "validation": end["validation"],
        "best_epoch": end["best_epoch"],
        "others": _words({name: value for name, value in end["test"].items() if name != figure}),
        "without_looking": _words(end["ceilings"]),
        "clips": "/".join(map(str, end["parts"])),
        **provenance(read_json(run.environment)),
        "command": command(config),
    }


def _words(figures: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.2f}" for name, value in figures.items())


def command(config: Line) -> str:
    """The command that makes this run, with what differs from its task's defaults."""
    data = {} if is_embedded(config["data"]["source"]) else {f"data.{key}": value for key, value in _place(config)}
    values = [f"{key}={value}" for key, value in (data | settings(config)).items()]
    return " ".join(
        ["stella transfer", config["task"], config["weights"]["source"], *values, f"--seed {config['seed']}"]
    )


def settings(config: Line) -> dict[str, Any]:
    """The settings that differ from the defaults of the run's task on its data, by dotted key; without the seed."""
    default = flatten(to_tree(transfer_config(config["task"], dict(_place(config)))))
    return {key: value for key, value in flatten(config).items() if key not in GIVEN and value != default.get(key)}


def _place(config: Line) -> list[tuple[str, Any]]:
    """The kind of data and, of files, where they are."""
    return [(key, config["data"][key]) for key in ("source", "path") if key in config["data"]]

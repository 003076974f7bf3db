"""Several configurations over several seeds, each a run of its own; what is finished is not done again."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from stella.errors import StellaError
from stella.evaluate.retrieval import DIRECTIONS, KS
from stella.files import Line, read_json, read_lines, write_text
from stella.runs.build import check
from stella.runs.config import RunConfig, settle
from stella.runs.environment import provenance
from stella.runs.folder import RunFolder
from stella.runs.loop import RunResult, check_unchanged, pretrain
from stella.runs.record import Group, group, read_run

FIGURES = [(direction, str(k), figure) for direction in DIRECTIONS for k in KS for figure in "AF"]


@dataclass(frozen=True)
class Comparison:
    """`groups` have mean and deviation over the finished runs, ready for `stella.report.tables.results_table`."""

    groups: list[Group]
    runs: list[Path]  # finished, seed by seed
    csv: Path
    exit_code: int = 0  # 128 + signal where one stopped it


def compare(
    configs: Mapping[str, RunConfig], seeds: Sequence[int], folder: Path | str, console: Console | None = None
) -> Comparison:
    """Run each configuration with each seed in `folder/NAME/seed-N`, and write `folder/results.csv` after each run.

    Seed by seed, so that a comparison that is stopped early still compares. Finished runs are skipped and unfinished
    ones continued; a run that was begun with another configuration is an error that names the key. What can be
    refused is refused before the first run.
    """
    if not configs or not seeds:
        raise StellaError(f"nothing to compare in {len(configs)} configurations and {len(seeds)} seeds; give some")
    folder = Path(folder)
    planned = [
        (name, replace(configs[name], seed=seed), folder / name / f"seed-{seed}") for seed in seeds for name in configs
    ]
    for name, config, run in planned:
        _check(name, config, RunFolder(run))
    done: list[tuple[str, RunResult]] = []
    exit_code = 0
    for name, config, run in planned:
        result = pretrain(config, run, resume=True, console=console)
        if result.finished:
            done.append((name, result))
            write_text(folder / "results.csv", to_csv([row(name, RunFolder(one.run)) for name, one in done]))
        if exit_code := result.exit_code:
            (console or Console()).print("The same command goes on with all of it.", highlight=False)
            break
    runs = [result.run for _, result in done]
    return Comparison(group(map(read_run, runs)), runs, folder / "results.csv", exit_code)


def _check(name: str, config: RunConfig, folder: RunFolder) -> None:
    try:
        if folder.begun:
            check_unchanged(folder, settle(config))
        if folder.end is None:
            check(settle(config), folder.begun)
    except StellaError as error:
        raise StellaError(f"{name}: {error}") from error


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]) if rows else ["name"], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def row(name: str, run: RunFolder) -> dict[str, Any]:
    """A line of results: what a finished run came to, and all that one needs to do it again."""
    end, config = run.end, run.read_config()
    assert end is not None
    return {
        "name": name,
        **{key: config[key] for key in ("method", "seed")},
        **{figure: end[figure] for figure in "AF"},
        **{f"{way}_{k}_{figure}": end[way][k][figure] for way, k, figure in FIGURES},
        **_matching([line for line in read_lines(run.metrics) if line["kind"] == "evaluation"]),
        "clips": end["clips"],
        **_all_provenance(read_json(run.environment)),
    }


def _all_provenance(facts: Line) -> dict[str, Any]:
    """Of a run that was continued elsewhere: every commit and machine, the first one first."""
    told = [provenance(each) for each in (*facts.get("earlier", ()), facts)]
    if len(told) == 1:
        return told[0]
    return {key: " + ".join(dict.fromkeys(str(each[key]) for each in told)) for key in told[0]}


def _matching(evaluations: Sequence[Line]) -> dict[str, Any]:
    """The matching module's accuracy at the end, on all tasks and on the last, and the least that its importance ever
    told the sounding object from the rest, in any task after any; None without such a module."""
    last: Line = next(reversed(evaluations), {})
    ratios = [ratio for line in evaluations for ratio in line.get("importance_ratio") or () if ratio is not None]
    return {
        "avm_accuracy": last.get("avm_accuracy"),
        "avm_accuracy_last_task": (last.get("avm_accuracy_by_task") or [None])[-1],
        "least_importance_ratio": min(ratios, default=None),
    }

"""Several configurations over several seeds, each a run of its own; what is finished is not done again."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from stella.errors import StellaError
from stella.evaluate.retrieval import DIRECTIONS, KS
from stella.report.record import Group, group, read_run
from stella.train.config import RunConfig, settle
from stella.train.folder import RunFolder, read_json, write_text
from stella.train.run import RunResult, check, check_unchanged, pretrain

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
            write_text(folder / "results.csv", _csv(done))
        if exit_code := result.exit_code:
            break
    runs = [result.run for _, result in done]
    return Comparison(group(map(read_run, runs)), runs, folder / "results.csv", exit_code)


def _check(name: str, config: RunConfig, folder: RunFolder) -> None:
    try:
        if folder.begun:
            check_unchanged(folder, settle(config))
        if folder.end is None:
            check(settle(config))
    except StellaError as error:
        raise StellaError(f"{name}: {error}") from error


def _csv(done: Sequence[tuple[str, RunResult]]) -> str:
    """One line a run: what it came to, and all that one needs to do it again."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    about = ("name", "method", "seed"), ("clips", "commit", "changed_files", "hardware")
    table.writerow([*about[0], "A", "F", *("_".join(keys) for keys in FIGURES), *about[1]])
    for name, result in done:
        folder, end = RunFolder(result.run), result.end
        config, facts = folder.read_config(), read_json(folder.environment)
        hardware = facts["gpu"] or f"{facts['cores']}-core {facts['processor']}"
        figures = [end["A"], end["F"], *(end[direction][k][figure] for direction, k, figure in FIGURES)]
        known = [end["clips"], facts["commit"], facts["changed_files"], hardware]
        table.writerow([name, config["method"], config["seed"], *figures, *known])
    return text.getvalue()

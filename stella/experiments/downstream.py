"""Downstream tasks of every run of a reproduction, beside the paper's figures."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from stella.config import read_toml, to_tree
from stella.data.config import is_embedded
from stella.experiments.paper import format_figure
from stella.experiments.pool import in_processes
from stella.experiments.recipe import Recipe
from stella.experiments.results import check_columns, read_csv, to_csv
from stella.experiments.tables import Sheet, markdown, terminal
from stella.files import Line, write_text
from stella.runs.config import RunConfig
from stella.runs.folder import RunFolder
from stella.runs.progress import say
from stella.runs.record import Spread
from stella.runs.training import RunResult
from stella.transfer.config import TransferConfig, transfer_config
from stella.transfer.results import row
from stella.transfer.run import transfer

RESULTS = "downstream.csv"
WORDS = {"classify": "accuracy", "segment": "mIoU", "events": "accuracy", "retrieval": "recall", "localise": "cIoU"}
SCALE = "Scenes and the paper's data differ in scale: compare the order of the methods, not the figures."
IDENTITY = ("source", "size", "path")  # keys of the data that say which clips they are
Job = tuple[str, TransferConfig, Path]


def transfer_all(
    recipe: Recipe,
    configs: Mapping[str, RunConfig],
    seeds: Sequence[int],
    folder: Path,
    console: Console,
    processes: int = 1,
    elsewhere: Mapping[str, Line] | None = None,
) -> int:
    """Test the weights of every run on every downstream task in `folder/KEY/seed-N/TASK`; returns the exit code.

    The recipe's tasks are on the data of the runs, those of `elsewhere` on data of their own. A finished test is
    skipped. The results are in `folder/downstream.csv`, with the table beside it.
    """
    recipe = replace(recipe, transfer=tuple(dict.fromkeys([*recipe.transfer, *(elsewhere or {})])))
    jobs = tests(recipe, configs, seeds, folder, elsewhere)
    missing = [job for job in jobs if RunFolder(job[2]).end is None]
    say(console, f"{len(jobs) - len(missing)} of {len(jobs)} downstream tests are finished already", "dim")
    exit_code = _do(missing, console, processes)
    done = [(key, RunFolder(run)) for key, _, run in jobs if RunFolder(run).end is not None]
    write_text(folder / RESULTS, to_csv([{"name": key, **row(run)} for key, run in done]))
    if not exit_code:
        show_downstream(folder.name, recipe, folder / RESULTS, console)
    return exit_code


def tests(
    recipe: Recipe,
    configs: Mapping[str, RunConfig],
    seeds: Sequence[int],
    folder: Path,
    elsewhere: Mapping[str, Line] | None = None,
) -> list[Job]:
    """Every downstream test of these runs: the run's name, the test's configuration and its folder."""
    jobs: list[Job] = []
    for seed in seeds:
        for key, config in configs.items():
            run = folder / key / f"seed-{seed}"
            data = {name: value for name, value in to_tree(config.data).items() if name in IDENTITY}
            values = [f"weights.source={run}", f"seed={seed}", f"train.device={config.train.device}"]
            on = dict.fromkeys(recipe.transfer, data) | dict(elsewhere or {})
            jobs += [(key, transfer_config(task, given, values), run / task) for task, given in on.items()]
    return jobs


def _do(jobs: Sequence[Job], console: Console, processes: int) -> int:
    """The exit code of the first test that is stopped, after which no other is started; 0 if all end."""
    done = in_processes(_quietly, jobs, processes) if processes > 1 else _in_turn(jobs, console)
    with closing(done):
        return next((result.exit_code for _, result in done if result.exit_code), 0)


def _in_turn(jobs: Sequence[Job], console: Console) -> Generator[tuple[Job, RunResult], None, None]:
    for number, job in enumerate(jobs, 1):
        _, config, _ = job
        say(console, f"{config.task} of {config.weights.source} ({number} of {len(jobs)})", "dim")
        yield job, _quietly(job)


def _quietly(job: Job) -> RunResult:
    _, config, run = job
    return transfer(config, run, resume=True, console=Console(quiet=True))


@cache
def paper_figures() -> dict[str, dict[str, dict[str, Any]]]:
    """By the benchmark that the models were trained on, and by task."""
    return read_toml(Path(__file__).with_name("paper_downstream.toml"))


def show_downstream(name: str, recipe: Recipe, results: Path, console: Console) -> None:
    """Print the table of a downstream.csv and write it beside the file."""
    results = results.with_name(RESULTS) if results.name == "results.csv" else results
    lines = read_csv(results)
    check_columns(name, results, lines, ("name", "seed", "task", "value", "without_looking"))
    sheets = [downstream_sheet(recipe, order, lines) for order in recipe.orders]
    console.print(terminal(sheets))
    write_text(results.with_suffix(".md"), markdown(name, sheets))
    say(console, f"{results}  and  {results.with_suffix('.md')}")


def downstream_sheet(recipe: Recipe, order: str, lines: Sequence[Mapping[str, str]]) -> Sheet:
    """The figure of every task for every variant; `lines` are those of a downstream.csv."""
    known = paper_figures().get(recipe.dataset, {})
    beside = known if order == next(iter(recipe.orders)) else {}  # the paper has one order
    rows = []
    for name, variant in recipe.variants.items():
        own = [line for line in lines if line["name"] == f"{order}/{name}"]
        cells = [str(len({line["seed"] for line in own}))]
        for task in recipe.transfer:
            ours = Spread([float(line["value"]) for line in own if line["task"] == task])
            cells += [str(ours), *([_paper(beside[task], name)] if task in beside else [])]
        rows.append([variant.label, *cells])
    head = ["", "runs"]
    for task in recipe.transfer:
        head += [f"{task}: {WORDS[task]} ↑", *([f"paper: {task} ↑"] if task in beside else [])]
    chance = {task: without_looking([line for line in lines if line["task"] == task]) for task in WORDS}
    labels = "; ".join(f"{task}: {beside[task]['label']}" for task in recipe.transfer if task in beside)
    paper = f"Paper: {labels}. Its retrieval column is the mean of six figures of R@1/5/10."
    return Sheet(
        f"{recipe.title}. Tasks in {order} order",
        recipe.about(),
        head,
        rows,
        [],
        [
            "Ours: test part, best epoch on the validation part, mean ± standard deviation over runs, in %.",
            *(f"Without looking, {task}: {found}." for task, found in chance.items() if found),
            *([paper] if labels else []),
            *([SCALE] if is_embedded(recipe.base.get("data", {}).get("source")) else []),
        ],
    )


def without_looking(lines: Sequence[Mapping[str, str]]) -> str:
    """The mean of each baseline over the tests of a task."""
    found: dict[str, list[float]] = {}
    for baseline in (word for line in lines for word in line["without_looking"].split()):
        name, _, value = baseline.partition("=")
        found.setdefault(name, []).append(float(value))
    return " ".join(f"{name}={mean(values):.2f}" for name, values in found.items())


def _paper(table: Mapping[str, Any], variant: str) -> str:
    found = table.get(variant, float("nan"))
    return format_figure(sum(found) / len(found) if isinstance(found, list) else float(found), 2)

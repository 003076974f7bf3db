"""The runner behind `stella compare`, `stella reproduce` and `stella demo`: named configurations × seeds."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console

from stella.config import nearest
from stella.errors import StellaError, number_of
from stella.experiments.pool import in_processes
from stella.experiments.results import collect
from stella.methods import METHODS, find
from stella.runs.build import check
from stella.runs.config import RunConfig, settle
from stella.runs.folder import RunFolder
from stella.runs.loop import check_unchanged, pretrain
from stella.runs.progress import say
from stella.runs.training import RunResult


@dataclass(frozen=True)
class Outcome:
    runs: list[Path]  # the finished ones, seed by seed
    exit_code: int = 0  # 128 + signal if a signal stopped it


@dataclass(frozen=True)
class Job:
    name: str
    config: RunConfig
    folder: RunFolder

    @property
    def title(self) -> str:
        name = METHODS[self.name].title if self.name in METHODS else self.name
        return f"{name}, seed {self.config.seed}"

    @property
    def finished(self) -> bool:
        return self.folder.end is not None


Results = Generator[tuple[Job, RunResult], None, None]


def with_methods(base: RunConfig, methods: Sequence[str]) -> dict[str, RunConfig]:
    """The configuration with each method; each takes those of the `args` that it knows."""
    known = {name: {field.name for field in fields(find(name).Config)} for name in methods}
    every = set[str]().union(*known.values())
    if strange := base.args.keys() - every:
        key = min(strange)
        near = nearest(key, every, "args.")
        raise StellaError(f"args.{key} is a key of none of {', '.join(methods)}{near}; see stella methods NAME")
    return {
        name: replace(base, method=name, args={key: base.args[key] for key in base.args if key in known[name]})
        for name in methods
    }


def run_all(
    configs: Mapping[str, RunConfig],
    seeds: Sequence[int],
    folder: Path | str,
    console: Console | None = None,
    processes: int = 1,
) -> Outcome:
    """Run each configuration with each seed in `folder/NAME/seed-N` and keep `folder/results.csv` up to date.

    All configurations are validated before the first run; a run that was started with another configuration is an
    error. Finished runs are skipped, unfinished ones resumed. Runs go seed by seed, so that a comparison that is
    stopped early still compares all names. `processes` run at a time. Several calls may share a folder if they choose
    different runs. Finished runs keep no checkpoints.
    """
    if not configs or not seeds:
        raise StellaError(
            f"nothing to run: {len(configs)} configurations and {len(seeds)} seeds; give at least one each"
        )
    folder, console = Path(folder), console or Console()
    jobs = [
        Job(name, replace(configs[name], seed=seed), RunFolder(folder / name / f"seed-{seed}"))
        for seed in seeds
        for name in configs
    ]
    for job in jobs:
        _check(job)
    missing = [job for job in jobs if not job.finished]
    for job in jobs:
        if job.finished:
            job.folder.drop_checkpoints()
    if len(missing) < len(jobs):
        say(console, f"finished already: {len(jobs) - len(missing)} of {number_of(len(jobs), 'run')}", "dim")
    collect(folder)
    exit_code = 0
    with closing(_in_processes(missing, processes, console) if processes > 1 else _in_turn(missing, console)) as done:
        for job, result in done:
            if result.finished:
                job.folder.drop_checkpoints()
                collect(folder)
            if exit_code := result.exit_code:
                say(console, "Run the same command again to resume.")
                break
    return Outcome([job.folder.root for job in jobs if job.finished], exit_code)


def _check(job: Job) -> None:
    """Refuse a run that cannot be started, or cannot be resumed with this configuration."""
    try:
        config = settle(job.config)
        if job.folder.started:
            check_unchanged(job.folder, config)
        if not job.finished:
            check(config, job.folder.started)
    except StellaError as error:
        raise StellaError(f"{job.name}: {error}") from error


def _in_turn(jobs: Sequence[Job], console: Console) -> Results:
    for number, job in enumerate(jobs, 1):
        say(console, f"{job.title} ({number} of {len(jobs)})", "dim")
        yield job, pretrain(job.config, job.folder.root, resume=True, console=console)


def _in_processes(jobs: Sequence[Job], processes: int, console: Console) -> Results:
    with closing(in_processes(_quietly, jobs, processes)) as results:
        for number, (job, result) in enumerate(results, 1):
            if result.finished:
                figures = ", ".join(f"{key} {result.end[key]:z.1f}" for key in "AF" if result.end[key] is not None)
                say(console, f"{number} of {len(jobs)}: {job.title}: {figures}")
            yield job, result


def _quietly(job: Job) -> RunResult:
    return pretrain(job.config, job.folder.root, resume=True, console=Console(quiet=True))

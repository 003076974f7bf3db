"""The command line: thin commands over the library. Heavy imports happen inside the command that needs them."""

import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stella.cli import scenes
from stella.errors import StellaError

app = typer.Typer(
    name="stella",
    help="Continual audio-video pre-training: learn from a changing stream of videos without forgetting.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(scenes.app, name="scenes", rich_help_panel="Data")
console = Console()


def _tell_version(wanted: bool) -> None:
    if wanted:
        from stella.runs.environment import environment
        from stella.train.device import runtime

        facts = environment(runtime("cpu"))
        commit = f", commit {facts['commit']}" if facts["commit"] else ""
        console.print(f"stella {metadata.version('stella-av')}{commit}, torch {facts['torch']}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel="Data")
def prepare(
    src: Annotated[Path, typer.Argument(help="Folder of videos.")],
    dst: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    labels: Annotated[Path | None, typer.Option(help="CSV of file,label[,task]; else sub-folders are labels.")] = None,
    seconds: Annotated[float, typer.Option(help="Length of a clip.")] = 10.24,
    split: Annotated[bool, typer.Option(help="Cut long videos into consecutive clips.")] = False,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one a core.")] = None,
) -> None:
    """Turn videos into shards that load fast. Stop it when you like: the same command goes on where it was."""
    from stella.data.prepare import prepare as run

    summary = run(src, dst, labels_csv=labels, seconds=seconds, split=split, workers=workers)
    console.print(str(summary), highlight=False, soft_wrap=True)


@app.command(rich_help_panel="Data")
def pack(
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    recipe: Annotated[str | None, typer.Argument(help="A TOML file of recipes/, for its data.")] = None,
    values: Annotated[list[str] | None, typer.Argument(help="Such as data.source=shards data.path=SHARDS.")] = None,
    evaluation: Annotated[bool, typer.Option("--eval", help="The clips for evaluation, not for training.")] = False,
    width: Annotated[int | None, typer.Option(help="Pixels to keep of wide pictures; default: a square.")] = None,
    windows: Annotated[
        int, typer.Option(help="Windows of frames to store of each clip, for training to draw from; an odd number.")
    ] = 1,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one a core.")] = None,
) -> None:
    """Store clips, once decoded, as arrays on disk that feed a GPU: then train with data.source=packed."""
    from stella.config import resolve
    from stella.data.pack import pack as run
    from stella.runs.config import RunConfig

    data = resolve(RunConfig, *_apart(recipe, values)).data
    want, tasks = data.sizes(), data.all_tasks(evaluation)
    summary = run(
        tasks,
        out,
        pixels=want.pixels,
        spec_frames=want.spec_frames,
        size=data.decoded_pixels,
        width=width,
        windows=windows,
        workers=workers,
    )
    console.print(str(summary), highlight=False, soft_wrap=True)


@app.command(rich_help_panel="Data")
def look(
    src: Annotated[Path, typer.Argument(help="Folder of videos, or of shards.")],
    out: Annotated[Path, typer.Option(help="The contact sheet to write.")] = Path("look.png"),
    clips: Annotated[int, typer.Option(min=1, help="How many to show.")] = 8,
) -> None:
    """Show clips of your own videos as they are decoded, and say which cannot be used and why."""
    from stella.data.folder import Folder
    from stella.data.shards import Shards
    from stella.data.skipped import in_words
    from stella.errors import ClipError
    from stella.report.sheet import SHEETS, contact_sheet

    if out.suffix.lower() not in SHEETS:
        raise StellaError(f"--out {out} must end in {', '.join(SHEETS)}: a contact sheet is a picture")
    shards = src.is_dir() and any(src.glob("shard-*.tar"))
    source: Folder | Shards = Shards(src) if shards else Folder(src)
    good, bad = [], []
    for index in _spread(len(source), clips):
        try:
            good.append(source[index])
        except ClipError as error:
            bad.append(error)
            console.print(f"[yellow]skipped[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    if not good:
        raise StellaError(f"none of the {len(bad)} clips tried in {src} can be used; see the reasons above")
    contact_sheet(good, out, f"{src.name} · {len(source)} clips")
    counts = {reason: sum(e.reason == reason for e in bad) for reason in {e.reason for e in bad}}
    tail = f"; skipped: {in_words(counts)}" if bad else ""
    more = " (--clips for more)" if len(good) + len(bad) < len(source) else ""
    console.print(f"{out}  {len(good)} of {len(source)} clips shown{more}{tail}", highlight=False, soft_wrap=True)


@app.command(rich_help_panel="Models")
def weights(
    file: Annotated[Path, typer.Argument(help="safetensors, a PyTorch checkpoint, or base-tiny or base-small.")],
) -> None:
    """Tell what a weight file is: format, sizes, parameters, and where it comes from."""
    from stella.config import to_tree
    from stella.model.weights import describe
    from stella.runs.config import RunConfig

    found = describe(file)
    told = {"sizes": found.sizes, **found.extra}
    usual = {"config": to_tree(RunConfig())}  # of which only what differs is worth reading
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("format", found.format)
    table.add_row("parameters", f"{found.parameters:,} in {found.tensors} tensors ({', '.join(found.dtypes)})")
    table.add_row("matching module", "yes" if found.has_avm else "no")
    for name, value in told.items():
        table.add_row(name, escape(_spell(value, usual.get(name, {}))))
    console.print(table, highlight=False, soft_wrap=True)


Run = Annotated[
    Path | None,
    typer.Option(help="Folder of the run: configuration, metrics, checkpoints, weights.", show_default="runs/latest"),
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Values such as train.lr=1e-4 data.clips=400.")]


@app.command(rich_help_panel="Training")
def pretrain(
    recipe: Annotated[str | None, typer.Argument(help="A TOML file of recipes/.")] = None,
    values: Overrides = None,
    run: Run = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run, from exactly where it was.")] = None,
    compile: Annotated[str | None, typer.Option(help="auto, on or off: short for train.compile=…")] = None,
) -> None:
    """Pre-train on a stream of tasks with one method. Ctrl-C saves and stops."""
    from stella.config import resolve
    from stella.report.tables import spell_ceilings
    from stella.runs import loop as training
    from stella.runs.config import RunConfig
    from stella.runs.record import ceilings, read_run

    file, given = _apart(recipe, values)
    given = [*given, f"train.compile={compile}"] if compile else given
    if resume and run:
        raise StellaError(f"--run {run} and --resume {resume} both name a run; give --resume alone to continue one")
    if resume:
        result = training.resume(resume, given, console, file)
    else:
        result = training.pretrain(resolve(RunConfig, file, given), run or Path("runs/latest"), console=console)
    if result.finished:
        forgotten = "" if result.end["F"] is None else f", F {result.end['F']:.1f}"
        cues = ceilings([read_run(result.run)])
        beside = f" ({spell_ceilings(cues)})" if cues else ""
        console.print(
            f"A {result.end['A']:.1f}{forgotten}{beside}; weights and metrics in {result.run}",
            highlight=False,
            soft_wrap=True,
        )
    raise typer.Exit(result.exit_code)


@app.command(rich_help_panel="Training")
def compare(
    recipe: Annotated[str | None, typer.Argument(help="A TOML file of recipes/.")] = None,
    values: Overrides = None,
    methods: Annotated[str, typer.Option(help="Names, with commas.")] = "finetune,er,derpp,stella,stella_plus",
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the runs, results.csv and the page.")] = Path("runs/compare"),
) -> None:
    """Train several methods with several seeds; what is finished is not done again. Ends with a table and a page."""
    from dataclasses import replace

    from stella.config import resolve
    from stella.experiments.compare import compare as run_all
    from stella.report.page import write_page
    from stella.report.tables import results_table
    from stella.runs.config import RunConfig
    from stella.runs.record import ceilings, read_run

    base = resolve(RunConfig, *_apart(recipe, values))
    done = run_all({name: replace(base, method=name) for name in _listed(methods)}, range(seeds), out, console)
    if not done.exit_code:
        console.print(results_table(done.groups, ceilings([read_run(run) for run in done.runs])))
        console.print(f"{done.csv}  and  {write_page(done.runs, out / 'report.html')}", highlight=False, soft_wrap=True)
    raise typer.Exit(done.exit_code)


@app.command(rich_help_panel="Training")
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Which of the paper's comparisons; none: list them.")] = None,
    values: Overrides = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    seeds_list: Annotated[str, typer.Option(help="These instead, with commas.")] = "",
    only: Annotated[str, typer.Option(help="These variants alone, with commas.")] = "",
    orders: Annotated[str, typer.Option(help="These orders of the tasks alone, with commas.")] = "",
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time; a small model fills no GPU alone.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for runs, in a folder of the name.")] = Path("runs/reproduce"),
    results: Annotated[
        Path | None,
        typer.Option("--from", help="Run nothing: show this results.csv, and write its table beside it."),
    ] = None,
) -> None:
    """Run one of the paper's comparisons, what is missing of it, and set it beside the paper's own figures."""
    from stella.experiments import reproduce as paper

    wide = console if console.is_terminal else Console(width=120)  # a pipe would be given 80 columns
    if name is None:
        wide.print(paper.listing())
    elif results is not None:
        paper.show(name, results, wide, values or [])
    else:
        numbers = _integers("--seeds-list", seeds_list) or range(seeds)
        folder = out / Path(name).stem
        chosen = _listed(only), _listed(orders), values or []
        raise typer.Exit(paper.reproduce(name, numbers, folder, wide, *chosen, processes))


@app.command(rich_help_panel="Training")
def bench(
    values: Overrides = None,
    methods: Annotated[str, typer.Option(help="Which, comma-separated.")] = "derpp,stella",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "9,48",
    steps: Annotated[int, typer.Option(min=1, help="Steady steps to take the median of.")] = 20,
    compile: Annotated[str, typer.Option(help="auto, on or off.")] = "auto",
    packed: Annotated[Path | None, typer.Option(help="Clips of `stella pack` to feed from; default: noise.")] = None,
    out: Annotated[Path | None, typer.Option(help="A CSV to append the rows to.")] = None,
) -> None:
    """Measure training steps: clips/s, memory, FLOPs and where the time goes, each row in a process of its own.

    At the paper's sizes on a GPU, and with the model tiny on a CPU.
    """
    from stella.bench.measure import bench as measure_rows
    from stella.bench.rows import check_columns, rows_table, write_rows
    from stella.config import resolve
    from stella.data.packed import Packed
    from stella.runs.build import check
    from stella.runs.config import RunConfig, machine
    from stella.runs.environment import environment

    given = [f"train.compile={compile}", *(values or [])]
    train = resolve(RunConfig, None, given).train
    place = machine(train)
    if place.remark:
        console.print(place.remark, highlight=False)
    base = [f"model.preset={'tiny' if place.device.type == 'cpu' else 'base'}", *given]
    configs = {name: resolve(RunConfig, None, [*base, f"method={name}"]) for name in _listed(methods)}
    sizes = _integers("--batches", batches)
    if not configs or not sizes:
        raise StellaError(f"nothing to measure with --methods {methods} --batches {batches}; give one at least of each")
    for config in configs.values():
        check(config)
    if packed is not None:
        Packed(packed)  # it says what is wrong with it
    if out is not None:
        check_columns(out)
    rows = measure_rows(configs, sizes, steps, packed, console)
    wide = console if console.is_terminal else Console(width=120)  # a pipe would be given 80 columns
    if rows:
        wide.print(rows_table(rows))
    if out is not None and rows:
        write_rows(out, rows, " ".join(["stella", *sys.argv[1:]]), environment(place))
        console.print(f"rows appended to {out}", highlight=False, soft_wrap=True)
    raise typer.Exit(len(rows) < len(configs) * len(sizes))


@app.command(rich_help_panel="Training")
def evaluate(
    model: Annotated[str, typer.Argument(help="A run, a weight file, or the name of shipped weights (base-tiny).")],
    recipe: Annotated[str | None, typer.Argument(help="Where the data come from; default: the run's own.")] = None,
    values: Overrides = None,
) -> None:
    """Zero-shot retrieval both ways on every task's evaluation clips, all tasks' clips as gallery."""
    from stella.report.tables import recall_table
    from stella.runs.evaluate import evaluate_weights
    from stella.runs.record import gallery_ceilings

    found = evaluate_weights(model, *_apart(recipe, values), console=console)
    console.print(recall_table(found, gallery_ceilings(found["data"], found["clips"])))


@app.command(rich_help_panel="Training")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about runs, and print their table."""
    from stella.report.page import write_page
    from stella.report.tables import results_table
    from stella.runs.record import ceilings, group, read_run, unlike

    found = [run for path in runs for run in _runs_in(path)]
    records = [read_run(run) for run in found]
    console.print(results_table(group(records), ceilings(records)))
    if sentence := unlike(records):
        console.print(sentence, style="yellow", highlight=False, soft_wrap=True)
    console.print(f"{write_page(found, out)}", highlight=False, soft_wrap=True)


@app.command("methods", rich_help_panel="Training")
def list_methods(
    name: Annotated[str | None, typer.Argument(help="One of them, with its hyper-parameters; default: all.")] = None,
) -> None:
    """List the methods: what each does, what it stores of a clip, and what its steps cost."""
    from stella.methods import METHODS
    from stella.report.methods import method_page, methods_table

    if name is not None and name not in METHODS:
        raise StellaError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    wide = console if console.is_terminal else Console(width=100)  # a pipe would be given 80 columns
    wide.print(methods_table(METHODS) if name is None else method_page(METHODS[name]), highlight=False, soft_wrap=True)


@app.command(rich_help_panel="Training")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the page.")] = Path("demo"),
) -> None:
    """Watch three methods learn from a stream that changes: ten minutes on two cores."""
    from stella.experiments.demo import demo as run

    raise typer.Exit(run(out, console))


def _apart(recipe: str | None, values: list[str] | None) -> tuple[Path | None, list[str]]:
    """A first argument of the form key=value is no recipe."""
    if recipe is not None and "=" in recipe and not Path(recipe).is_file():
        return None, [recipe, *(values or [])]
    return Path(recipe) if recipe else None, values or []


def _listed(text: str) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in _listed(text)]
    except ValueError as error:
        raise StellaError(f"{option} {text} must be whole numbers, with commas") from error


def _spell(value: Any, usual: Mapping[str, Any]) -> str:
    """A tree as words, key=value, without what is usual or not there; anything else as it is."""
    if not isinstance(value, Mapping):
        return str(value)
    from stella.runs.record import flatten

    known = flatten(usual)
    leaves = {key: leaf for key, leaf in flatten(value).items() if leaf is not None and known.get(key) != leaf}
    return " ".join(f"{key}={leaf:.4g}" if isinstance(leaf, float) else f"{key}={leaf}" for key, leaf in leaves.items())


def _runs_in(path: Path) -> list[Path]:
    found = sorted(config.parent for config in path.rglob("config.json"))
    if not found:
        raise StellaError(f"{path} holds no run; give the folder that `stella pretrain --run` filled")
    return found


def _spread(length: int, count: int) -> Iterable[int]:
    """`count` positions spread evenly over `length`."""
    return [i * length // min(count, length) for i in range(min(count, length))]


def main() -> None:
    try:
        app()
    except StellaError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename or 'a file'}: {error.strerror or error}; choose another place, or mend that one")


def _refuse(sentence: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(sentence)}", highlight=False)
    sys.exit(2)

"""`stella evaluate`, `report`, `methods`, `config`, `weights`, `grow` and `bench`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stella.cli.common import Overrides, console, integers, listed, say, split, wide
from stella.errors import StellaError, number_of, plain

if TYPE_CHECKING:
    from stella.runs.folder import RunFolder


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder of a run, weight file, or shipped weights such as base-tiny.")],
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Recipe whose data to evaluate on: a name, or the path of a file.", show_default="the run's"
        ),
    ] = None,
    values: Overrides = None,
    slow: Annotated[bool, typer.Option("--slow", help="Evaluate the slow weights of a run (train.ema).")] = False,
) -> None:
    """Zero-shot retrieval in both directions on the evaluation clips of every task; all tasks form the gallery."""
    from stella.experiments.recipe import run_tree
    from stella.report.tables import classes_line, matching_table, recall_table
    from stella.runs.evaluate import evaluate_weights
    from stella.runs.record import gallery_ceilings

    name, given = split(recipe, values)
    found = evaluate_weights(model, run_tree(name) if name else None, given, console, slow)
    console.print(recall_table(found, gallery_ceilings(found["data"], found["clips"])))
    if found["classes"]:
        say(classes_line(found["classes"]))
    if (matching := matching_table(found)) is not None:
        console.print(matching)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that contain such folders.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write.", show_default="report.html in the first folder")
    ] = None,
) -> None:
    """Print tables of runs, pre-training and downstream, and write one self-contained HTML page about them."""
    from stella.report.downstream import by_task, downstream_table, read_downstream
    from stella.report.page import write_readable
    from stella.report.tables import results_table
    from stella.runs.record import ceilings, group, unlike

    for folder in runs:
        if not folder.is_dir():
            raise StellaError(f"{folder} is not a folder; give the folder of a run, or one that holds such folders")
    found, downstream = (_runs_in(runs, downstream) for downstream in (False, True))
    if not found and not downstream:
        raise StellaError(
            f"{', '.join(map(str, runs))} holds no run; give the folder that `stella pretrain --run` filled"
        )
    out = out or runs[0] / "report.html"
    rows, unread = read_downstream(downstream)
    tasks = by_task(rows)
    records, left_out = write_readable([run.root for run in found], out, tasks)
    for reason in (*left_out, *unread):
        say(f"left out: {reason}", "yellow")
    if records:
        console.print(results_table(group(records), ceilings(records)))
    if tasks:
        console.print(downstream_table(tasks))
    if warning := unlike(records):
        say(warning, "yellow")
    say(str(out))


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Method to describe in full: a name, or FILE.py:CLASS.", show_default="list all"),
    ] = None,
) -> None:
    """List the methods: what each does, what it stores of a clip, and what its steps cost; and the models' sizes."""
    from stella.methods import METHODS, find
    from stella.report.methods import method_page, methods_table, models_table

    pages = [methods_table(METHODS), models_table()] if name is None else [method_page(find(name))]
    for page in pages:
        wide(100).print(page, highlight=False, soft_wrap=True)


def config(
    section: Annotated[
        str | None,
        typer.Argument(
            help="Section such as train, data or data.folder; transfer: a downstream run's. Or a recipe: what it sets.",
            show_default="all",
        ),
    ] = None,
) -> None:
    """List the keys of a run's configuration: what each sets, its unit and its default."""
    from stella.experiments.recipe import described, shipped
    from stella.report.settings import config_tables

    if section is not None and (section in shipped() or section.endswith(".toml")):
        for line in described(section):
            say(line)
        return
    for table in config_tables(section, shipped()):
        console.print(table, highlight=False)


def weights(
    file: Annotated[Path, typer.Argument(help="safetensors file, PyTorch checkpoint, or a shipped name (base-tiny).")],
) -> None:
    """Describe a weight file: format, sizes, parameters and provenance."""
    from rich.table import Table
    from rich.text import Text

    from stella.config import to_tree
    from stella.model.weights import describe
    from stella.runs.config import RunConfig

    found = describe(file)
    tensors, kinds = found.state.values(), {str(tensor.dtype).removeprefix("torch.") for tensor in found.state.values()}
    defaults = {"config": to_tree(RunConfig())}  # only what differs from these is printed
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("format", found.format)
    parameters = sum(tensor.numel() for tensor in tensors)
    table.add_row("parameters", f"{parameters:,} in {number_of(len(tensors), 'tensor')} ({', '.join(sorted(kinds))})")
    table.add_row("matching module", "yes" if found.has_avm else "no")
    inputs = found.header.get("inputs", "not stated")
    for name, value in {"sizes": found.sizes, "inputs": inputs, **found.extra}.items():
        table.add_row(Text(plain(name)), Text(plain(_key_values(value, defaults.get(name, {})))))
    console.print(table, highlight=False, soft_wrap=True)


def grow(
    file: Annotated[
        Path, typer.Argument(help="Weights of the smaller model: a file, a finished run, or a shipped name.")
    ],
    out: Annotated[Path, typer.Argument(help="safetensors file to write; it must not exist.")],
    preset: Annotated[str, typer.Option(help="Size of the larger model.")] = "small",
    image_size: Annotated[int | None, typer.Option(help="Pixels of a frame's side.", show_default="as before")] = None,
    spec_frames: Annotated[
        int | None, typer.Option(help="Time steps of a spectrogram, 100 a second.", show_default="as before")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the shares in which copied features are used, and of new blocks.")] = 0,
) -> None:
    """Make a larger model that computes what a trained one computes, to go on training from it.

    Larger inputs change what it computes: positions are interpolated.
    """
    from stella.model.grow import grown, grown_config
    from stella.model.weights import inputs_for, read_config, save

    if out.exists():
        raise StellaError(f"{out} exists already; choose another name, or remove it")
    was = read_config(file)
    config = grown_config(was, preset, image_size=image_size, spec_frames=spec_frames)
    found = grown(file, config, seed)
    inputs = found.inputs
    if image_size or spec_frames:
        inputs = (inputs or inputs_for(was)).resized(config.image_size, config.spec_frames)
    save(out, found.model, found.avm, {"grown_from": str(file), "preset": preset, "seed": seed}, inputs)
    say(f"{out}: {found.notes[-1]}. Train on with model.weights={out}")


def bench(
    values: Overrides = None,
    methods: Annotated[str, typer.Option(help="Methods to measure, separated by commas.")] = "derpp,stella",
    batches: Annotated[str, typer.Option(help="Batch sizes in clips, separated by commas.")] = "9,48",
    steps: Annotated[int, typer.Option(min=1, help="Number of steady steps to take the median of.")] = 20,
    compile: Annotated[str, typer.Option(help="auto, on or off.")] = "auto",
    packed: Annotated[
        Path | None,
        typer.Option(help="Folder of `stella pack` to read clips from.", show_default="noise on the device"),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Also print the slowest operators of each row and write its trace to profile/."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="CSV to append the rows to.", show_default="none")] = None,
) -> None:
    """Measure training steps at the paper's sizes (on a CPU with the model tiny): clips/s, memory, FLOPs.

    Under torchrun the processes share each step; memory and FLOP/s are those of the first.
    """
    from stella.bench.measure import bench as measure
    from stella.bench.measure import bench_configs
    from stella.bench.profile import profile_all
    from stella.bench.rows import check_columns, rows_table, write_rows
    from stella.config import resolve
    from stella.data.packed import Packed
    from stella.runs.config import RunConfig, machine
    from stella.runs.environment import environment
    from stella.train.processes import first, started

    console.quiet = not first()
    if profile and started() > 1:
        raise StellaError("--profile looks at one process; leave out torchrun, or --profile")
    given = [f"train.compile={compile}", *(values or [])]
    place = machine(resolve(RunConfig, None, given).train)
    for remark in place.remark.splitlines():
        say(remark)
    base = [f"model.preset={'tiny' if place.device.type == 'cpu' else 'base'}", *given]
    configs = bench_configs(listed(methods), integers("--batches", batches), base)
    if packed is not None:
        Packed(packed)  # refuses a folder that holds no packed clips
    if out is not None:
        check_columns(out)
    rows = list(measure(configs, steps, packed, console).values())
    facts = environment(place)
    presets = sorted({config.model.preset or "of the weights" for config in configs.values()})
    device = facts["gpu"] or f"CPU with {number_of(facts['cores'], 'core')}"
    if rows and first():
        wide(120).print(rows_table(rows, f"model {', '.join(presets)}, {facts['precision']}, {device}"))
    if out is not None and rows and first():
        write_rows(out, rows, " ".join(["stella", *sys.argv[1:]]), facts)
        say(f"rows appended to {out}")
    if profile:
        profile_all(configs, Path("profile"), packed, wide(120))
    raise typer.Exit(len(rows) < len(configs))


def _key_values(value: Any, defaults: Mapping[str, Any]) -> str:
    """A tree as key=value words, without defaults and empty values; anything else as it is."""
    if not isinstance(value, Mapping):
        return str(value)
    from stella.runs.record import flatten

    known = flatten(defaults)
    leaves = {key: leaf for key, leaf in flatten(value).items() if leaf is not None and known.get(key) != leaf}
    if known:  # keys of earlier versions mean nothing now
        leaves = {key: leaf for key, leaf in leaves.items() if key in known or key.startswith("args.")}
    return " ".join(f"{key}={leaf:.4g}" if isinstance(leaf, float) else f"{key}={leaf}" for key, leaf in leaves.items())


def _runs_in(paths: Sequence[Path], downstream: bool) -> "list[RunFolder]":
    from stella.runs.folder import runs_below

    return [run for path in paths for run in runs_below(path, downstream)]

"""`stella look`, `prepare` and `pack`: from video files to what a GPU reads."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from stella.cli.common import Overrides, Ray, Recipe, say, split
from stella.errors import StellaError, number_of

Workers = Annotated[
    int | None, typer.Option(min=1, max=1000, help="Number of worker processes.", show_default="one per core")
]

WorkerGB = Annotated[float, typer.Option(help="GB of memory for one worker process; what needs more is skipped.")]


def look(
    src: Annotated[
        str,
        typer.Argument(help="Folder of videos, of shards or of packed arrays (or its address, s3://…), or one video."),
    ],
    out: Annotated[Path, typer.Option(help="Image file to write.")] = Path("look.png"),
    clips: Annotated[int, typer.Option(min=1, help="Number of clips to show, spread over the folder or file.")] = 8,
    task: Annotated[
        str | None, typer.Option(help="Of a benchmark: BENCHMARK:TASK, as continual-vs:sports.", show_default="all")
    ] = None,
) -> None:
    """Write a contact sheet of your own videos as they are decoded, and print which cannot be used and why."""
    from stella.data.skipped import in_words
    from stella.errors import ClipError
    from stella.report.look import look, open_any, open_task, told
    from stella.report.sheet import SHEETS, contact_sheet

    if out.suffix.lower() not in SHEETS:
        raise StellaError(f"--out {out} must end in {', '.join(SHEETS)}: a contact sheet is a picture")
    source = open_task(src, task) if task else open_any(src, clips)
    found = list(look(source, clips))
    bad = [each for each in found if isinstance(each, ClipError)]
    good = [each for each in found if not isinstance(each, ClipError)]
    for error in bad:
        say(f"skipped {error}", "yellow")
    if not good:
        raise StellaError(f"none of {number_of(len(bad), 'clip')} tried in {src} can be used; see the reasons above")
    shown = f"{len(good)} of {number_of(len(source), 'clip')} shown"
    place = f"folder {Path(src).resolve().name}" if Path(src).is_dir() else Path(src).name
    contact_sheet([each.clip for each in good], out, f"{task or place}: {shown}", [each.title for each in good])
    for line in told(good, source):
        say(line, "yellow")
    tail = f"; skipped: {in_words(Counter(error.reason for error in bad))}" if bad else ""
    rest = len(source) - len(found)
    more = f"; {number_of(rest, 'other')} not opened (--clips for more)" if rest else ""
    say(f"{out}  {shown}{more}{tail}")


def prepare(
    src: Annotated[
        str,
        typer.Argument(
            help="Folder of videos or archives (.tar, .tar.gz), one archive, a CAV-MAE .json, or its address (s3://…)."
        ),
    ],
    dst: Annotated[str, typer.Argument(help="Folder for the shards, or its address (s3://…).")],
    csv: Annotated[
        list[str] | None,
        typer.Option(help="List of VGGSound or AudioSet: its clips alone, with its classes and splits. Repeatable."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Of the lists, the clips of continual-vs, continual-as or initial-vs.")
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="CSV with the columns file,label[,task].", show_default="sub-folders are labels"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Length of a clip in seconds.")] = 10.24,
    split: Annotated[bool, typer.Option(help="Cut long videos into consecutive clips.")] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict/--lenient", help="Skip videos that FFmpeg finds damaged, or take what it conceals."),
    ] = True,
    still: Annotated[bool, typer.Option("--still/--no-still", help="Keep clips with a still picture.")] = True,
    muted: Annotated[bool, typer.Option("--muted/--no-muted", help="Keep clips without a sound.")] = True,
    short: Annotated[
        bool, typer.Option("--short/--no-short", help="Keep clips that last less than nine tenths of --seconds.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be found, missing and left out; write nothing.")
    ] = False,
    workers: Workers = None,
    worker_gb: WorkerGB = 4.0,
    ray: Ray = None,
) -> None:
    """Convert videos to shards that load fast. Run the same command again to resume."""
    from stella.data.cut import ODD
    from stella.data.prepare import prepare as run
    from stella.data.prepare import rehearse

    if dry_run:
        for line in rehearse(src, dst, labels_csv=labels, csv=csv or [], only=only):
            say(line)
        raise typer.Exit(0)
    options: dict[str, Any] = {
        "csv": csv or [],
        "only": only,
        "leave": [what for what, kept in zip(ODD, (still, muted, short), strict=True) if not kept],
        "tell": say,
        "ray": ray,
        "seconds": seconds,
        "split": split,
        "strict": strict,
        "workers": workers,
        "worker_gb": worker_gb,
    }
    summary = run(src, dst, labels_csv=labels, **options)
    say(str(summary))
    raise typer.Exit(0 if summary.clips else 1)


def pack(
    out: Annotated[str, typer.Argument(help="Folder to create, to resume, or to add new clips to.")],
    recipe: Recipe = None,
    values: Overrides = None,
    evaluation: Annotated[
        bool, typer.Option("--eval", help="Pack the evaluation clips, not the training clips.")
    ] = False,
    width: Annotated[
        int | None, typer.Option(min=1, help="Width to keep of wide pictures, in pixels.", show_default="a square")
    ] = None,
    windows: Annotated[
        int,
        typer.Option(min=1, help="Windows of frames to store per clip, for training to draw from; an odd number."),
    ] = 1,
    workers: Workers = None,
    worker_gb: WorkerGB = 4.0,
) -> None:
    """Decode clips once and store them as arrays that feed a GPU: then train with data.source=packed."""
    from stella.data.pack import pack as run
    from stella.experiments.recipe import run_config
    from stella.runs.config import with_weights

    named, given = split(recipe, values)
    if named is None and not any(value.startswith("data.") for value in given):
        raise StellaError(f"say which clips: stella pack {out} data.source=folder data.path=VIDEOS, or name a recipe")
    data = with_weights(run_config(named, given))[0].data
    want, tasks = data.inputs(), data.all_tasks(evaluation)
    sizes: dict[str, Any] = {"pixels": want.pixels, "spec_frames": want.spec_frames, "size": want.size, "inputs": want}
    say(str(run(tasks, out, **sizes, width=width, windows=windows, workers=workers, worker_gb=worker_gb)))

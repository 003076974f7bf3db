"""The commands `stella scenes …`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="The embedded benchmark: procedural clips, no download.", no_args_is_help=True)
console = Console()

Task = Annotated[str, typer.Option(help="base, or task1 … task6.")]
Size = Annotated[str, typer.Option(help="scenes, scenes-hard, scenes-full or scenes-full-hard.")]
Seed = Annotated[int, typer.Option(help="Of the scenes; another seed is another set of clips.")]
Split = Annotated[str, typer.Option(help="train or eval.")]


@app.command("preview")
def scenes_preview(
    out: Annotated[Path, typer.Option(help="Folder for the sheet and the film.")] = Path("preview"),
    task: Task = "task1",
    clips: Annotated[int, typer.Option(min=1, help="How many.")] = 8,
    size: Size = "scenes",
    split: Split = "eval",
    seed: Seed = 0,
) -> None:
    """Write a contact sheet (frames with the sounding object outlined, spectrograms) and a film to watch and hear."""
    from stella.data.scenes import Scenes
    from stella.report.preview import film, sheet

    scenes = Scenes(task, split, clips, size=size, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    picture, movie = out / f"{size}-{task}.png", out / f"{size}-{task}.mp4"
    sheet(scenes, range(clips), picture)
    film(scenes, range(clips), movie)
    console.print(
        f"{picture}  contact sheet: the sounding object outlined, events in blue", highlight=False, soft_wrap=True
    )
    console.print(f"{movie}  the same clips to watch and hear", highlight=False, soft_wrap=True)


@app.command("audit")
def scenes_audit(
    clips: Annotated[int, typer.Option(min=10, help="Gallery clips per task.")] = 240,
    size: Size = "scenes",
    seed: Seed = 0,
) -> None:
    """What perfect knowledge of one cue alone would score: read it next to every A."""
    from stella.data.scenes import TASKS, Scenes
    from stella.data.scenes.audit import audit

    table = Table(
        title=f"Cue audit of {size}: A (mean of R@1/5/10, both ways, %) by one cue alone, {clips} clips per task",
        caption="Each query has one right answer. Ties fall at random.",
    )
    rows = audit({task: Scenes(task, "eval", clips, size=size, seed=seed) for task in TASKS})
    rows |= audit({"base": Scenes("base", "eval", clips, size=size, seed=seed)})
    for heading in ("gallery", *next(iter(rows.values()))):
        table.add_column(heading, justify="left" if heading == "gallery" else "right")
    for name, ceilings in rows.items():
        table.add_row(name, *(f"{value:.1f}" for value in ceilings.values()))
    console.print(table)


@app.command("render")
def scenes_render(
    out: Annotated[Path, typer.Argument(help="Folder to fill.")],
    task: Task = "task1",
    clips: Annotated[int, typer.Option(min=1, help="How many.")] = 40,
    size: Size = "scenes",
    split: Split = "train",
    seed: Seed = 0,
) -> None:
    """Write scenes as ordinary video files (H.264 and AAC), each with a JSON beside it, in a folder for each class."""
    from rich.progress import track

    from stella.data.scenes import Scenes
    from stella.data.scenes.export import export

    scenes = Scenes(task, split, clips, size=size, seed=seed)
    for _ in track(export(scenes, out), f"Rendering {task}", total=clips, console=console):
        pass
    console.print(f"{clips} clips in {out}", highlight=False, soft_wrap=True)

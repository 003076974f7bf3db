"""`stella scenes …`: the embedded benchmark."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from stella.cli.common import console, say
from stella.errors import number_of

app = typer.Typer(help="The embedded benchmark: rendered clips, nothing to download.", no_args_is_help=True)

Task = Annotated[str, typer.Option(help="Task to render: base, or task1 … task6.")]
Size = Annotated[str, typer.Option(help="Size of the clips: scenes, scenes-hard, scenes-full or scenes-full-hard.")]
Seed = Annotated[int, typer.Option(help="Seed of the clips; another seed gives other clips.")]
Split = Annotated[str, typer.Option(help="Split to render: train or eval.")]


@app.command()
def preview(
    out: Annotated[Path, typer.Option(help="Folder for the contact sheet and the film.")] = Path("preview"),
    task: Task = "task1",
    clips: Annotated[int, typer.Option(min=1, help="Number of clips.")] = 8,
    size: Size = "scenes",
    split: Split = "eval",
    seed: Seed = 0,
) -> None:
    """Write a contact sheet (frames with the sounding object outlined, spectrograms) and a film of the same clips."""
    from stella.data.scenes import Scenes
    from stella.report.sheet import contact_sheet, film

    scenes = Scenes(task, split, clips, size=size, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    picture, movie = out / f"{size}-{task}.png", out / f"{size}-{task}.mp4"
    title, times = f"{size} · {task} · {split} · seed {seed}", scenes.size.frame_times * scenes.size.duration
    contact_sheet([scenes[i] for i in range(clips)], picture, title, times=times)
    film(scenes, range(clips), movie)
    say(f"{picture}  contact sheet: the sounding object outlined, events in blue")
    say(f"{movie}  the same clips to watch and hear")


@app.command()
def audit(
    clips: Annotated[int, typer.Option(min=10, help="Number of gallery clips per task.")] = 240,
    size: Size = "scenes",
    seed: Seed = 0,
) -> None:
    """Print the score of a model that knows one cue perfectly and nothing else: compare every A with it."""
    from stella.data.scenes import TASKS, Scenes
    from stella.data.scenes.audit import BASES
    from stella.data.scenes.audit import audit as run
    from stella.report.tables import CEILINGS

    table = Table(
        title=f"Cue audit of {size}: A (mean of R@1/5/10, both directions, %) by one cue alone, "
        f"{number_of(clips, 'clip')} per task",
        caption="Each query has one correct answer. Ties are broken at random.",
    )
    rows = run({task: Scenes(task, "eval", clips, size=size, seed=seed) for task in TASKS})
    for base in BASES:
        rows |= run({base: Scenes(base, "eval", clips, size=size, seed=seed)})
    table.add_column("gallery")
    for cue in next(iter(rows.values())):
        table.add_column(CEILINGS[cue], justify="right")
    for name, ceilings in rows.items():
        table.add_row(name, *(f"{value:.1f}" for value in ceilings.values()))
    console.print(table)
    _audit_downstream(clips, size, seed)


def _audit_downstream(clips: int, size: str, seed: int) -> None:
    from stella.data.downstream import DOWNSTREAM
    from stella.data.scenes import Scenes, ScenesConfig
    from stella.data.scenes.audit import audit as run
    from stella.data.scenes.audit import class_cues
    from stella.transfer.ceilings import ceilings
    from stella.transfer.tasks import FIRST

    title = f"The downstream tasks on {size}, {number_of(clips, 'clip')} of each part per task"
    table = Table("task", "figure", "by", title=title)
    data = ScenesConfig(size=size, seed=seed, clips=clips, eval_clips=clips, cache="off")
    for task in DOWNSTREAM:
        found = ceilings(task, data.downstream(task), data.inputs().pixels)
        if task == "retrieval":
            found = run({"novel": Scenes("novel", "eval", clips, size=size, seed=seed)})["novel"]
        if task == "classify":
            found |= class_cues()
        table.add_row(task, FIRST[task], ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    console.print(table)


@app.command()
def render(
    out: Annotated[Path, typer.Argument(help="Folder to fill.")],
    task: Task = "task1",
    clips: Annotated[int, typer.Option(min=1, help="Number of clips.")] = 40,
    size: Size = "scenes",
    split: Split = "train",
    seed: Seed = 0,
) -> None:
    """Write scenes as video files (H.264 and AAC) with a JSON file each, in a folder for each class."""
    from rich.progress import track

    from stella.data.scenes import Scenes
    from stella.data.scenes.export import export

    scenes = Scenes(task, split, clips, size=size, seed=seed)
    for _ in track(
        export(scenes, out), f"Rendering {task}", total=clips, console=console, disable=not console.is_terminal
    ):
        pass
    say(f"{number_of(clips, 'clip')} in {out}")


@app.command()
def archive(
    out: Annotated[Path, typer.Argument(help="Folder to fill.")],
    like: Annotated[str, typer.Option(help="Layout: vggsound, audioset, video2dataset or cav-mae.")] = "vggsound",
    clips: Annotated[int, typer.Option(min=5, help="Number of training clips of each of two tasks.")] = 20,
    size: Size = "scenes",
    seed: Seed = 0,
) -> None:
    """Write scenes in the layout of a public data set, with missing and damaged parts, to rehearse `stella prepare`."""
    from rich.progress import track

    from stella.data.scenes.archive import archive as write

    total, names = write(like, out, clips, size, seed)
    for _ in track(names, f"Rendering {like}", total=total, console=console, disable=not console.is_terminal):
        pass
    say(f"{out}: {', '.join(sorted(path.name for path in out.iterdir())[:5])} …")

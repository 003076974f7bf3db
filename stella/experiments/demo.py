"""`stella demo`: three methods learn six tasks in sequence; a table and a page show what each has forgotten.

Then the last model is used: it searches films by their sound and shows where the sound comes from.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rich.console import Console

from stella.data.scenes import TASKS, Scenes
from stella.data.scenes.export import export
from stella.embed import load
from stella.embed.film import write_film
from stella.experiments.recipe import run_config
from stella.experiments.runner import run_all
from stella.report.found import write_found
from stella.report.page import BELOW_CLASS, ONE_SEED, write_page
from stella.report.tables import accuracy_table, results_table
from stella.runs.progress import say
from stella.runs.record import ceilings, group, read_run
from stella.search import Index

METHODS = ("finetune", "derpp", "stella_plus")
RECIPE = "demo"
FILMS = 8  # of each task, to search in
SHOWN = 6  # films that are found, or as many as it takes to show the right one
ASKED = (0, 2, 5)  # tasks whose first film is asked for by its sound

INTRODUCTION = (
    "[bold]Continual audio-video pre-training, on clips rendered here[/]\n"
    "Six tasks follow one another, four classes each; the model is not told when one ends. Later tasks show the looks "
    "of earlier ones with other sounds. After each task the model searches, among the clips of all six tasks, for the "
    "video that belongs to a sound and for the sound that belongs to a video. "
    "[dim]Finetune has no rehearsal memory; DER++ and STELLA+ have equally many bytes of it.[/]\n"
)

COMMANDS = (
    "stella learn HOME VIDEOS model.weights=base-small method=stella   # these models know rendered scenes alone",
    "stella index VIDEOS INDEX --model HOME",
    "stella search INDEX SOUND.wav --page found.html",
    "stella localise VIDEO.mp4 --model HOME --out heat.mp4",
)


def demo(folder: Path, console: Console) -> int:
    """Run what is missing in `folder`, print the tables and write the page; returns the exit code."""
    console.print(INTRODUCTION)
    base = run_config(RECIPE)
    outcome = run_all({name: replace(base, method=name) for name in METHODS}, [0], folder, console)
    if outcome.exit_code:
        return outcome.exit_code
    runs = [read_run(run) for run in outcome.runs]
    for run in runs:
        console.print(accuracy_table(run))
    cues = ceilings(runs)
    console.print(results_table(group(runs), cues))
    if cues and max(run.summary["A"] for run in runs) < cues["class"]:
        say(console, BELOW_CLASS, "dim")
    last = runs[-1].evaluations[-1]
    points, by_chance = (fmean(last[name]) for name in ("pointing", "pointing_chance"))
    say(
        console,
        f"STELLA+'s matching module is right about {last['avm_accuracy_by_task'][-1]:.0f}% of matched and mismatched "
        f"pairs of the last task ({last['avm_accuracy']:.0f}% over all six). The patch that it finds most important "
        f"lies on the sounding object in {points:.0f}% of the clips, {by_chance:.0f}% by chance.",
    )
    say(console, f"{ONE_SEED}: results/README.md has five.", "dim")
    console.print()
    beside = use(outcome.runs[-1], folder, console)
    page = write_page(outcome.runs, folder / "report.html", beside)
    say(console, f"All results, with plots and pictures of what each model finds: {page}")
    console.print("\n[bold]The same on your own folder[/]")
    activate = Path(sys.prefix, "bin", "activate")
    first = [f"source {activate}"] if shutil.which("stella") is None and activate.is_file() else []
    for line in [*first, *COMMANDS]:
        say(console, f"  {line}")
    return 0


def use(run: Path, folder: Path, console: Console) -> dict[str, str]:
    """Write films that no model has seen, ask for three of them by their sound, and show where one sound comes from.
    Returns the files to look at, and what each is."""
    films = [
        path.resolve() for task in TASKS for path in export(Scenes(task, "eval", FILMS, seed=1), folder / "videos")
    ]
    index, model = Index(folder / "index"), load(run)
    index.update(folder / "videos", model=model)
    console.print("[bold]What it is good for[/]")
    say(console, f"STELLA+ searches {len(films)} films that it has never seen, by a sound alone.")
    beside = {}
    for number, task in enumerate(ASKED, 1):
        film, page = films[FILMS * task], folder / f"found-{number}.html"
        found = index.search(film, k=len(films), by="audio", model=model)
        rank = 1 + [hit.file.resolve() for hit in found.hits].index(film)
        write_found(replace(found, hits=found.hits[: max(SHOWN, rank)]), page)
        beside[page.name] = f"films found by the sound of {film.name}"
        place = "comes first" if rank == 1 else f"is number {rank}"
        say(console, f"  the sound of {film.parent.name}/{film.name}: its own film {place} of {len(films)} ({page})")
    heat = folder / "heat.mp4"
    write_film(model, model.localise(film), film, heat)
    say(console, f"  where in the picture the last one comes from, as a film: {heat}")
    return beside | {heat.name: "where the last sound comes from, as a film"}

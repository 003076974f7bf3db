"""`stella demo`: watch three methods learn from a stream that changes, and see what each has forgotten."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from stella.config import resolve
from stella.experiments.compare import compare
from stella.report.page import write_page
from stella.report.tables import accuracy_table, results_table
from stella.runs.config import RunConfig
from stella.runs.record import ceilings, read_run

METHODS = ("finetune", "derpp", "stella_plus")
RECIPE = Path(__file__).with_suffix(".toml")

INTRODUCTION = (
    "[bold]Continual audio-video pre-training, on clips rendered here[/]\n"
    "Six tasks follow one another, four classes each; nobody tells the model when one ends. Later tasks show the looks "
    "of earlier ones with other sounds. After each task the model is asked which video belongs to a sound, and which "
    "sound to a video, among the clips of all six tasks. "
    "[dim]Finetune has no memory; DER++ and STELLA+ have the same bytes of it.[/]\n"
)


def demo(folder: Path, console: Console) -> int:
    """Run what is missing in `folder`, show the table and write the page; returns the exit code."""
    console.print(INTRODUCTION)
    base = resolve(RunConfig, RECIPE)
    done = compare({name: replace(base, method=name) for name in METHODS}, [0], folder, console)
    if done.exit_code:
        return done.exit_code
    runs = [read_run(run) for run in done.runs]
    for run in runs:
        console.print(accuracy_table(run))
    console.print(results_table(done.groups, ceilings(runs)))
    last = runs[-1].evaluations[-1]
    ratios = [ratio for ratio in last["importance_ratio"] if ratio is not None]
    console.print(
        f"STELLA+'s matching module tells pairs apart in {last['avm_accuracy_by_task'][-1]:.0f}% of cases in the last "
        f"task ({last['avm_accuracy']:.0f}% over all six), and finds the sounding object: patches on it are "
        f"{min(ratios):.0f} to {max(ratios):.0f} times as important as the others.",
        highlight=False,
    )
    console.print("[dim]One seed shows, it does not rank: results/README.md has five.[/]", highlight=False)
    page = write_page(done.runs, folder / "report.html")
    console.print(f"\nThe whole story, with pictures: [bold]{page}[/]", highlight=False)
    return 0

"""`stella demo`: three methods learn six tasks in sequence; a table and a page show what each has forgotten."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from stella.experiments.recipe import run_config
from stella.experiments.runner import run_all
from stella.report.page import write_page
from stella.report.tables import accuracy_table, results_table
from stella.runs.progress import say
from stella.runs.record import ceilings, group, read_run

METHODS = ("finetune", "derpp", "stella_plus")
RECIPE = "demo"

INTRODUCTION = (
    "[bold]Continual audio-video pre-training, on clips rendered here[/]\n"
    "Six tasks follow one another, four classes each; the model is not told when one ends. Later tasks show the looks "
    "of earlier ones with other sounds. After each task the model searches, among the clips of all six tasks, for the "
    "video that belongs to a sound and for the sound that belongs to a video. "
    "[dim]Finetune has no rehearsal memory; DER++ and STELLA+ have equally many bytes of it.[/]\n"
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
    console.print(results_table(group(runs), ceilings(runs)))
    last = runs[-1].evaluations[-1]
    ratios = [ratio for ratio in last["importance_ratio"] if ratio is not None]
    say(
        console,
        f"STELLA+'s matching module is right about {last['avm_accuracy_by_task'][-1]:.0f}% of matched and mismatched "
        f"pairs of the last task ({last['avm_accuracy']:.0f}% over all six) and finds the sounding object: patches on "
        f"it are {min(ratios):.0f} to {max(ratios):.0f} times as important as the others.",
    )
    say(console, "One seed illustrates, it does not rank methods: results/README.md has five.", "dim")
    console.print()
    say(console, f"All results, with plots: {write_page(outcome.runs, folder / 'report.html')}")
    return 0

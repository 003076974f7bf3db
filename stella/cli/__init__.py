"""The command line: thin commands over the library. Heavy imports happen inside the command that needs them."""

import os
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from stella.cli import data, learn, models, scenes, search, serve, train, transfer, use
from stella.cli.common import say
from stella.errors import StellaError, plain

SHARED = ("pretrain", "evaluate", "bench")  # the commands that several processes do together

app = typer.Typer(
    name="stella",
    help="Continual audio-video pre-training: learn from a changing stream of videos without forgetting.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Use": (search.index, search.search, serve.serve, use.embed, use.localise, use.classify),
    "Training": (train.demo, train.pretrain, train.compare, train.reproduce, learn.learn),
    "Models and results": (
        models.evaluate,
        transfer.transfer,
        models.report,
        models.methods,
        models.config,
        models.weights,
        models.grow,
        models.bench,
    ),
    "Data": (data.look, data.prepare, data.pack),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(scenes.app, name="scenes", rich_help_panel="Data")


def _print_version(wanted: bool) -> None:
    if wanted:
        from stella.runs.environment import environment
        from stella.train.device import runtime

        facts = environment(runtime("cpu"))
        commit = f", commit {facts['commit']}" if facts["commit"] else ""
        say(f"stella {facts['stella']}{commit}, torch {facts['torch']}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ and context.invoked_subcommand not in SHARED:
        from stella.train.processes import started

        if (count := started()) > 1:
            raise StellaError(
                f"torchrun has started stella {context.invoked_subcommand} {count} times; "
                f"processes share {', '.join(SHARED)} alone: leave torchrun out"
            )


def main() -> None:
    try:
        app()
    except StellaError as error:
        _let_the_first_say_it(error.told)
        _refuse(str(error))
    except OSError as error:
        _let_the_first_say_it()
        _refuse(f"{error.filename or 'a file'}: {error.strerror or error}; choose another path, or repair that one")


def _let_the_first_say_it(told: bool = False) -> None:
    """Processes of torchrun that fail alike before they know of one another: it ends the others meanwhile."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not told:
        from stella.train.processes import first

        time.sleep(0 if first() else 10)


def _refuse(sentence: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error:", "bold red"), f" {plain(sentence)}"))
    sys.exit(2)

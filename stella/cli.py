"""The command line: thin commands over the library. Heavy imports happen inside the command that needs them."""

import sys

import typer
from rich.console import Console

from stella.errors import StellaError

app = typer.Typer(
    name="stella",
    help="Continual audio-video pre-training: learn from a changing stream of videos without forgetting.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
scenes_app = typer.Typer(help="The embedded benchmark: procedural clips, no download.", no_args_is_help=True)
app.add_typer(scenes_app, name="scenes")


def main() -> None:
    try:
        app()
    except StellaError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {error}", highlight=False)
        sys.exit(2)

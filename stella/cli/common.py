"""What the commands share: the console, recipes and lists among their arguments."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stella.errors import StellaError
from stella.runs.progress import say as say_on

console = Console()

Recipe = Annotated[
    str | None,
    typer.Argument(help="Name of a shipped recipe such as scenes, or path of a TOML file.", show_default="none"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values over the recipe's: train.lr=1e-4 data.clips=400 …"),
]

Ray = Annotated[
    str | None,
    typer.Option(help="Spread the work over a Ray cluster: its address, auto, or local.", show_default="this process"),
]


def say(line: str, style: str = "") -> None:
    say_on(console, line, style)


def wide(columns: int) -> Console:
    """A console for wide tables: a pipe, which has no width, would get 80 columns."""
    return console if console.is_terminal else Console(width=columns)


def typed(context: typer.Context) -> list[Any]:
    """The parameters that the command line has."""
    sources = {param: context.get_parameter_source(str(param.name)) for param in context.command.params}
    return [param for param, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def split(recipe: str | None, values: list[str] | None) -> tuple[str | None, list[str]]:
    """The recipe and the overrides; a first argument of the form key=value is an override."""
    if recipe is not None and "=" in recipe and not Path(recipe).is_file():
        return None, [recipe, *(values or [])]
    return recipe, values or []


def listed(text: str) -> list[str]:
    """The entries of a comma-separated list, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in listed(text)]
    except ValueError as error:
        raise StellaError(f"{option} {text} must be whole numbers separated by commas") from error

"""`stella learn`: a model that goes on learning."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from stella.cli.common import console, say, typed, wide
from stella.errors import StellaError

ALONE = ("status", "rollback", "accept", "drop")  # options that do not learn
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def learn(
    context: typer.Context,
    home: Annotated[Path, typer.Argument(help="Folder of the learner; the first call makes it.")],
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SRC… KEY=VALUE…",
            help="Folders of videos, shards or packed clips, tar files; in the first call, values over the defaults.",
        ),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe of a new learner.", show_default="none")] = None,
    run: Annotated[
        Path | None,
        typer.Option("--from", help="Finished run to take over; without SRC no more is done.", show_default="none"),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs over the clips of a round.")] = 1,
    clips: Annotated[
        int | None, typer.Option("--round", min=1, help="Clips of a round.", show_default="all; 500 with --watch")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on as clips arrive, until a signal comes.")] = False,
    every: Annotated[str, typer.Option(help="With --watch: begin a smaller round after this time.")] = "1h",
    settle: Annotated[
        float, typer.Option(min=0, help="With --watch: seconds without a change after which a file is whole.")
    ] = 10.0,
    guard: Annotated[
        float | None,
        typer.Option(
            min=0, help="Keep a round apart if A on old clips falls by more points than this.", show_default="off"
        ),
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="Share of the recordings to set aside and measure with.", show_default="0.05")
    ] = None,
    held: Annotated[int | None, typer.Option(help="Clips to measure with, at most.", show_default="500")] = None,
    effort: Annotated[
        float | None,
        typer.Option(help="Clips to measure a round with, as a share of those it trains on.", show_default="0.08"),
    ] = None,
    keep: Annotated[int | None, typer.Option(help="States to keep for --rollback.", show_default="3")] = None,
    status: Annotated[bool, typer.Option("--status", help="Print the history and exit.")] = False,
    rollback: Annotated[
        int | None, typer.Option(metavar="N", help="Go back to the state after round N and exit.", show_default="none")
    ] = None,
    accept: Annotated[bool, typer.Option("--accept", help="Take the round that was kept apart, and exit.")] = False,
    drop: Annotated[
        bool, typer.Option("--drop", help="Throw the round away that is kept apart or in progress, and exit.")
    ] = False,
) -> None:
    """Go on learning from whatever is new. Clips that were learnt are never learnt again; a kill loses nothing."""
    from stella.learn import loop
    from stella.learn.home import Home, Settings
    from stella.learn.items import refuse_empty
    from stella.learn.status import status_table

    sources = [word for word in given or [] if "=" not in word or Path(word).exists()]
    values = [word for word in given or [] if word not in sources]
    there = Home(home)
    _check_alone(context, home)
    if status:
        wide(130).print(status_table(there))
    elif rollback is not None:
        loop.rollback(home, rollback, console)
    elif accept or drop:
        (loop.accept if accept else loop.drop)(home, console)
    else:
        if not sources and (watch or not run):
            raise StellaError("give at least one folder or archive to learn from: stella learn HOME SRC…")
        if run and (left_out := [*values, *([f"--recipe {recipe}"] if recipe else [])]):
            raise StellaError(f"--from {run} takes the values of that run; leave {', '.join(left_out)} out")
        base = there.settings if there.exists else Settings()
        settings = loop.with_changes(base, guard=guard, share=share, held=held, effort=effort, keep=keep)
        pause = _seconds(every)
        if not watch and not there.exists and len(sources) == 1:
            refuse_empty(sources[0])
        config = None if run else _config(there, recipe, values, sources)
        when = loop.Watch(clips or 500, pause, settle) if watch else None
        done = loop.learn(
            home, sources, config, settings, run=run, epochs=epochs, clips=clips, watch=when, console=console
        )
        say(there.in_use + (f"; model, history and page in {home}" if there.current else ""))
        raise typer.Exit(done.exit_code)


def _check_alone(context: typer.Context, home: Path) -> None:
    """Refuse anything beside an option that does not learn."""
    given = [param for param in typed(context) if param.name != "home"]
    chosen = next((option for option in given if option.name in ALONE), None)
    if chosen and len(given) > 1:
        value = context.params[str(chosen.name)]
        said = chosen.opts[0] if value is True else f"{chosen.opts[0]} {value}"
        raise StellaError(f"{chosen.opts[0]} stands alone: stella learn {home} {said}; leave out the rest")


def _config(home: Any, recipe: str | None, values: list[str], sources: list[str]) -> Any:
    """The configuration of a new learner, whose sizes follow from the first folder; or that of an old one, changed."""
    from stella.config import build, layered, to_tree
    from stella.experiments.recipe import run_config, run_tree
    from stella.learn.items import kind_of
    from stella.runs.build import without_effect
    from stella.runs.config import RunConfig

    if home.exists:
        return build(RunConfig, layered(RunConfig, to_tree(home.config), run_tree(recipe) if recipe else {}, values))
    if not any(value.startswith("data.source=") for value in values):
        kind, path = kind_of(sources[0])
        values = [f"data.source={kind}", f"data.path={path}", *values]
    config = run_config(recipe, values)
    for line in without_effect(config, values):
        say(line, "yellow")
    return config


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smhd])", text)
    if found is None:
        raise StellaError(f"--every {text} must be a number and a unit, such as 90s, 30m, 1h or 1d")
    return float(found[1]) * UNITS[found[2]]

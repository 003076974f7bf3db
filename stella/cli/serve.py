"""`stella serve`: the page of an index."""

from pathlib import Path
from typing import Annotated

import typer

from stella.cli.common import say


def serve(
    index: Annotated[Path, typer.Argument(help="Folder that `stella index` filled. It is only read.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any other than this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(help="Token that visitors need.", show_default="made and printed if --host asks for one"),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Host name under which the page is reached; may be repeated.", show_default="addresses only"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Weights that made the index: a name, a file, a run, a learner.", show_default="as it knows"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that decode and embed.")] = 2,
    most_mb: Annotated[float, typer.Option("--most-mb", min=0.001, help="Largest upload, in MB.")] = 50.0,
    most_seconds: Annotated[
        float, typer.Option("--most-seconds", min=0.1, help="Longest that an upload may take to decode and embed.")
    ] = 20.0,
) -> None:
    """A page to search an index by sounds and videos: what fits, playing, with where its sound comes from."""
    from stella.serve.run import serve as run
    from stella.serve.uploads import Limits

    limits = Limits(bytes=int(1e6 * most_mb), seconds=most_seconds, workers=workers)
    run(index, host=host, port=port, token=token, names=tuple(name or ()), model=model, limits=limits, log=say)

"""`stella index` and `stella search`: a folder becomes searchable by sound and picture."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from stella.cli.common import say, wide
from stella.errors import StellaError, number_of, plain

SHOWN_BAD = 20

Model = Annotated[
    str | None,
    typer.Option(help="Shipped name, weight file or run.", show_default="the index's own, or base-small"),
]
Device = Annotated[
    str | None, typer.Option(help="Where to run the model: cpu, cuda, …", show_default="the best there is")
]
Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="[SRC]… INDEX",
        help="Folders of videos and sounds, or of shards; then the index. Without SRC: the folders it knows.",
    ),
]
Overlap = Annotated[
    float | None,
    typer.Option(help="Share of a window that the next one repeats.", show_default="the index's own, or 0.5"),
]
Query = Annotated[
    str,
    typer.Argument(
        help="A sound (asks by its sound), a video (asks by its pictures), or FILE@12.5 for the window around that "
        "second. The vectors of a longer file's windows are averaged."
    ),
]
To = Annotated[
    Literal["video", "audio"] | None,
    typer.Option(help="Find pictures or sounds that fit.", show_default="pictures for a sound, sounds for pictures"),
]
By = Annotated[
    Literal["video", "audio"] | None,
    typer.Option(help="Ask by the query's pictures or by its sound.", show_default="its pictures if it has some"),
]
Glob = Annotated[str | None, typer.Option(help="Only files that match, such as 'cats/*'.", show_default="all")]
Label = Annotated[str | None, typer.Option(help="Only files with this label.", show_default="all")]


def index(
    paths: Paths,
    model: Model = None,
    device: Device = None,
    overlap: Overlap = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Embed everything again that another model or version has made.")
    ] = False,
    compact: Annotated[bool, typer.Option("--compact", help="Give the space of dropped vectors back.")] = False,
    faiss: Annotated[bool, typer.Option("--faiss", help="Also build the derived index for search --faiss.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Drop the folders SRC from the index.")] = False,
    state: Annotated[
        bool, typer.Option("--state", help="Change nothing; print what the index holds, and every bad file.")
    ] = False,
) -> None:
    """Make a folder searchable, or bring its index up to date. Stop it at any time and run it again."""
    from stella.report.found import state_table
    from stella.search.index import Index

    *sources, root = paths
    found = Index(root)
    if state:
        wide(100).print(state_table(found.state()))
        _list_bad(found, None)
        return
    if forget and not sources:
        raise StellaError("--forget needs the folders to drop: stella index --forget SRC INDEX")
    done = None
    if forget:
        for source in sources:
            found.forget(source)
            say(f"{source} is dropped; {number_of(sum(found.state().files.values()), 'file')} left")
    else:
        done = found.update(*sources, model=model, device=device, overlap=overlap, refresh=refresh, progress=True)
        _list_bad(found, SHOWN_BAD)
        say(str(done))
        if done.note:
            say(done.note, "yellow")
        _list_passed_over(done, root)
        if done.counts.added and (caveat := found.caveat()):
            learn = f"stella learn HOME SRC model.weights={found.serving().origin}"
            say(f"{caveat}: {learn}, then stella index {root} --refresh --model HOME", "yellow")
    if compact:
        say(f"{number_of(found.compact(), 'row')} of dropped windows removed")
    if faiss:
        found.build_ivf()
        say("search --faiss is ready")
    raise typer.Exit(bool(done and done.counts.passed_over))


def _list_passed_over(done: Any, root: Path) -> None:
    for folder, why in done.counts.passed_over.items():
        forget = f"; if its files are gone for good: stella index --forget {folder} {root}"
        say(plain(f"passed over: {why}{forget if folder in done.state.sources else ''}"), "yellow")


def _list_bad(found: Any, most: int | None) -> None:
    bad = found.bad()
    for one in bad[:most]:
        say(f"bad {plain(one.file)}: {one.reason}", "yellow")
    if most is not None and len(bad) > most:
        say(f"… and {len(bad) - most} more: stella index {plain(found.path)} --state lists them", "yellow")


def search(
    index: Annotated[Path, typer.Argument(help="Folder that `stella index` filled.")],
    query: Query,
    to: To = None,
    by: By = None,
    k: Annotated[int, typer.Option("-k", help="Number of moments to find.")] = 10,
    path: Glob = None,
    label: Label = None,
    all_windows: Annotated[
        bool, typer.Option("--all-windows", help="Show overlapping windows of a file too, not only the best.")
    ] = False,
    model: Model = None,
    device: Device = None,
    faiss: Annotated[
        bool, typer.Option("--faiss", help="Use the derived index: faster, approximate (stella index --faiss).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Also write an HTML page with playable clips.", show_default="none")
    ] = None,
) -> None:
    """Find the moments that fit a sound, a video or a moment of one."""
    import json

    from stella.report.found import asked_in_words, found_table, found_tree, write_found
    from stella.search.index import Index

    asked = {"to": to, "by": by, "path": path, "label": label, "merge": not all_windows}
    there = Index(index)
    found = there.search(query, k, **asked, model=model, device=device, faiss=faiss)  # type: ignore[arg-type]
    caveat = there.caveat(found.query.file)
    if page:
        write_found(found, page, caveat)
    if as_json:
        typer.echo(json.dumps(found_tree(found), indent=2))
        return
    if found.hits:
        say(asked_in_words(found), "dim")
        wide(120).print(found_table(found), highlight=False)
    else:
        say("nothing found: no file passes the filters" if path or label else "nothing found: the index is empty")
    if found.note:
        say(found.note, "yellow")
    if caveat and found.hits:
        say(caveat, "dim")
    if page:
        say(str(page))

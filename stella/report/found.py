"""What a search found: a table, JSON, and one HTML page with playable clips."""

import os
from base64 import b64encode
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.table import Table
from rich.text import Text

from stella.data.folder import AUDIO_SUFFIXES
from stella.errors import StellaError, number_of, plain, skippable
from stella.files import write_text
from stella.media.codecs import encode_jpegs
from stella.report.page import TEMPLATES
from stella.search import play
from stella.search.hits import Hit
from stella.search.index import Found
from stella.search.maintain import State

THUMBNAIL = 180  # pixels of the short side
LONGEST = 20.0  # seconds of a query that are cut out to be played


def clock(seconds: float) -> str:
    """`0:12.5`, `1:02:03.0`."""
    tenths = round(10 * seconds)
    hours, minutes, rest = tenths // 36_000, tenths // 600 % 60, tenths % 600 / 10
    return f"{hours}:{minutes:02d}:{rest:04.1f}" if hours else f"{minutes}:{rest:04.1f}"


def asked_in_words(found: Found) -> str:
    """What was searched for: `sounds that fit the pictures of dog.mp4, 0:10.0 – 0:12.6`."""
    query, wanted = found.query, "sounds" if found.to == "audio" else "pictures"
    if not query.file:
        return f"{wanted} that fit"
    by, moment = "sound" if query.by == "audio" else "pictures", f"{clock(query.start)} – {clock(query.end)}"
    return f"{wanted} that fit the {by} of {plain(Path(query.file).name)}, {moment}"


def found_table(found: Found) -> Table:
    labels = any(_own_label(hit) for hit in found.hits)
    table = Table("", "score", "moment", *(["label"] if labels else []), "file", box=None, padding=(0, 2, 0, 0))
    for number, hit in enumerate(found.hits, 1):
        moment = f"{clock(hit.start)} – {clock(hit.end)}"
        label = [Text(plain(_own_label(hit) or "–"))] if labels else []
        table.add_row(str(number), f"{hit.score:z.3f}", moment, *label, Text(plain(hit.path), overflow="fold"))
    return table


def _own_label(hit: Hit) -> str | None:
    """A label that the path does not show already."""
    return None if hit.label == Path(hit.path).parent.name else hit.label


def found_tree(found: Found) -> dict[str, Any]:
    """What `--json` prints. Names are as Python has them: bytes that are no UTF-8 become lone surrogates."""
    query = found.query
    return {
        "query": {"file": query.file, "by": query.by, "start": query.start, "end": query.end},
        "to": found.to,
        "exact": found.exact,
        "note": found.note,
        "seconds": found.seconds,
        "hits": [
            {
                "path": hit.path,
                "file": str(hit.file),
                "label": hit.label,
                "modality": hit.modality,
                "start": hit.start,
                "end": hit.end,
                "score": hit.score,
            }
            for hit in found.hits
        ],
    }


def state_table(state: State) -> Table:
    """Everything an index says of itself."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {
        "folders": ", ".join(map(plain, state.sources)) or "none",
        "files": ", ".join(f"{count:,} {name}" for name, count in state.files.items()) or "none",
        "windows": ", ".join(f"{count:,} {modality}" for modality, count in state.windows.items()),
        "model": _model(state.model),
    }
    files = number_of(state.stale, "file")
    if state.target:
        rows["refresh"] = f"to {_model(state.target)}: {files} to go"
    elif state.stale:
        rows["refresh"] = (
            f"the vectors of {files} are of another state of the learner than the one in use; --refresh embeds them"
        )
    rows["space"] = f"{state.bytes / 2**20:.1f} MiB of vectors"
    if state.dead:
        rows["space"] += f", {number_of(state.dead, 'row')} of dropped windows (--compact removes them)"
    for name, value in rows.items():
        table.add_row(Text(name), Text(value, overflow="fold"))
    return table


def _model(row: Any) -> str:
    return f"{plain(row.origin) or 'unknown'}, version {row.fingerprint[:12]}, D = {row.dim}" if row else "none"


def write_found(found: Found, out: Path, caveat: str = "") -> None:
    """The page: it plays files from where they are, so it works as long as they stay. What browsers cannot play is cut
    out and becomes a part of it. `caveat` is of the model."""
    out.parent.mkdir(parents=True, exist_ok=True)
    style = TEMPLATES.get_template("page.css").render() + TEMPLATES.get_template("found.css").render()
    query = found.query
    text = TEMPLATES.get_template("templates/found.html.j2").render(
        style=style,
        style_hash=b64encode(sha256(style.encode()).digest()).decode(),
        query={
            "name": plain(Path(query.file).name),
            "by": "sound" if query.by == "audio" else "pictures",
            "moment": f"{clock(query.start)} – {clock(query.end)}",
            **_media(Path(query.file).parent, Path(query.file).name, query.start, query.end, out),
        }
        if query.file
        else None,
        asked=asked_in_words(found),
        hits=[_card(hit, out, own=_same(query.file, hit.file)) for hit in found.hits],
        note=found.note,
        caveat=caveat,
    )
    write_text(out, text)


def _same(query: str, file: Path) -> bool:
    return bool(query) and Path(query).resolve() == file.resolve()


def _card(hit: Hit, out: Path, own: bool) -> dict[str, Any]:
    return {
        "own": own,
        "name": plain(Path(hit.path).name),
        "folder": "" if (folder := Path(hit.path).parent.as_posix()) == "." else plain(folder),
        "label": plain(_own_label(hit) or ""),
        "moment": f"{clock(hit.start)} – {clock(hit.end)}",
        "score": f"{hit.score:z.3f}",
        **_media(hit.root, hit.path, hit.start, hit.end, out),
    }


def _media(root: Path, path: str, start: float, end: float, out: Path) -> dict[str, Any]:
    """How to play a moment, and a picture of it: the file relative to the page, or the moment itself."""
    file, src, picture = root / path, "", ""
    sound = file.suffix.lower() in AUDIO_SUFFIXES
    if file.suffix.lower() in play.PLAYED and file.is_file():
        relative = quote(os.fsencode(os.path.relpath(file.resolve(), out.parent.resolve())))
        src = f"./{relative}#t={start:.2f},{end:.2f}"
    with suppress(StellaError), skippable(str(file)):
        if not sound and (frames := play.track(root, path, start, end, "video", 1, THUMBNAIL)) is not None:
            picture = _data("image/jpeg", encode_jpegs(frames)[0])
        if not src:
            data, kind = play.cut(root, path, start, min(end, start + LONGEST))
            src, sound = _data(kind, data), kind == "audio/flac"
    return {"src": src, "sound": sound, "poster": picture}


def _data(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"

"""What is said to the outside. No answer holds a path of this machine: files have a name below their folder."""

import re
from pathlib import Path
from typing import Any

from stella.data.folder import AUDIO_SUFFIXES
from stella.errors import ClipError, StellaError, plain
from stella.search.hits import Hit
from stella.search.index import Found
from stella.search.maintain import BadFile, State
from stella.search.nearest import Place

SHOWN_BAD = 100


class HttpError(StellaError):
    """An answer other than a result: an HTTP status and one sentence."""

    def __init__(self, status: int, sentence: str, retry: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.retry = status, retry  # retry: seconds after which to ask again


STOPPING = HttpError(503, "the server is stopping; try again later", retry=30)


def said(error: ClipError) -> str:
    """What is wrong with a file, in one sentence, without where it is."""
    if error.reason.startswith(("unforeseen", "broken link", "damaged shard")):  # these quote paths
        return f"{error.reason}; the server cannot use this file"
    return f"{error.reason}; {error.remedy}"


def id_of(place: Place) -> str:
    """The id of a moment in answers and addresses: where its vector is stored, which keeps its meaning."""
    return f"{place[0]}-{place[1]}"


def place_of(id: str) -> Place:
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", id, re.ASCII)
    if found is None:
        raise HttpError(404, "there is no such moment; search again")
    return int(found[1]), int(found[2])


def hit_tree(hit: Hit) -> dict[str, Any]:
    return {
        "id": id_of(hit.place),
        "name": plain(hit.path),  # of its file
        "label": plain(hit.label) if hit.label else None,
        "modality": hit.modality,
        "start": round(hit.start, 3),
        "end": round(hit.end, 3),
        "score": round(hit.score, 4),
        "sound": Path(hit.path).suffix.lower() in AUDIO_SUFFIXES,  # nothing to see
        "whole": hit.file.is_file(),  # else a clip in a shard: `media` has nothing, `clip` has
    }


def found_tree(found: Found, stale: str) -> dict[str, Any]:
    query = found.query
    return {
        "query": {"by": query.by, "start": round(query.start, 3), "end": round(query.end, 3)},
        "to": found.to,
        "hits": [hit_tree(hit) for hit in found.hits],
        "seconds": round(found.seconds, 4),
        "stale": found.note or stale,
    }


def state_tree(state: State, bad: list[BadFile], stale: str, limits: dict[str, float]) -> dict[str, Any]:
    model = state.model
    return {
        "files": state.files.get("ok", 0),
        "bad": state.files.get("bad", 0),
        "windows": state.windows,
        "folders": [plain(root.name) for root in state.sources],
        "model": {"name": plain(Path(model.origin).name) or "unknown", "version": model.fingerprint[:12]}
        if model
        else None,
        "bytes": state.bytes,
        "stale": stale,
        "bad_files": [
            {"name": plain(_below(one.file, state.sources)), "reason": plain(one.reason.split(";")[0])}
            for one in bad[:SHOWN_BAD]
        ],
        "limits": limits,
    }


def _below(file: Path, roots: list[Path]) -> Path | str:
    return next((file.relative_to(root) for root in roots if file.is_relative_to(root)), file.name)

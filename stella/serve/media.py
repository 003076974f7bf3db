"""Files of the index over HTTP: whole or in ranges, opened by a moment's id, and only as they were indexed."""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stella.search.index import Moment
from stella.serve.answers import HttpError

CHUNK = 1 << 18
OTHER = "application/octet-stream"
TYPES = {
    "video/mp4": ".mp4 .m4v",
    "video/quicktime": ".mov",
    "video/webm": ".webm",
    "video/x-matroska": ".mkv",
    "video/ogg": ".ogv",
    "video/x-msvideo": ".avi",
    "video/mpeg": ".mpg .mpeg .vob",
    "video/mp2t": ".ts .m2ts .mts",
    "video/3gpp": ".3gp",
    "audio/mpeg": ".mp3 .mp2",
    "audio/mp4": ".m4a",
    "audio/ogg": ".ogg .oga .opus",
    "audio/wav": ".wav",
    "audio/flac": ".flac",
    "audio/aac": ".aac",
    "audio/aiff": ".aif .aiff",
}
BY_SUFFIX = {suffix: kind for kind, suffixes in TYPES.items() for suffix in suffixes.split()}


@dataclass(frozen=True)
class Body:
    """What an answer sends: `count` bytes from `first` on, of `total`."""

    status: int
    headers: dict[str, str]
    first: int
    count: int


def open_media(moment: Moment) -> tuple[BinaryIO, str]:
    """A file of the index and its type. A file that has changed since it was indexed is not of the index."""
    try:
        file = os.fdopen(os.open(moment.hit.file, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)  # a pipe never waits
    except OSError:
        raise HttpError(404, "this file cannot be opened any more; bring the index up to date") from None
    try:
        _check(os.fstat(file.fileno()), moment)
    except HttpError:
        file.close()
        raise
    return file, BY_SUFFIX.get(Path(moment.hit.path).suffix.lower(), OTHER)


def has_file(moment: Moment) -> bool:
    """Whether a moment has a file, which must be as it was indexed. A clip in shards has none."""
    try:
        status = moment.hit.file.stat()
    except OSError:
        return False
    _check(status, moment)
    return True


def _check(status: os.stat_result, moment: Moment) -> None:
    if not stat.S_ISREG(status.st_mode) or (status.st_size, status.st_mtime_ns) != (moment.size, moment.mtime):
        raise HttpError(409, "this file has changed since it was indexed; bring the index up to date")


def body(total: int, kind: str, tag: str, wanted: str | None, if_range: str | None = None) -> Body:
    """How to answer a request with this `Range` header (RFC 9110): one range is served, several are ignored."""
    headers = {"content-type": kind, "accept-ranges": "bytes", "etag": tag, "cache-control": "private, max-age=3600"}
    found = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", (wanted or "").strip(), re.ASCII)
    if found is None or found.groups() == ("", "") or if_range not in (None, tag):
        return Body(200, headers | {"content-length": str(total)}, 0, total)
    if found[1]:
        first, last = int(found[1]), min(int(found[2] or total - 1), total - 1)
        if found[2] and int(found[2]) < first:
            return Body(200, headers | {"content-length": str(total)}, 0, total)
    else:
        first, last = max(0, total - int(found[2])), total - 1
    if first > last:
        return Body(416, headers | {"content-range": f"bytes */{total}", "content-length": "0"}, 0, 0)
    more = {"content-range": f"bytes {first}-{last}/{total}", "content-length": str(last - first + 1)}
    return Body(206, headers | more, first, last - first + 1)


def pieces(file: BinaryIO, first: int, count: int) -> Iterator[bytes]:
    """That part of a file, which is closed at the end."""
    with file:
        file.seek(first)
        while count > 0 and (piece := file.read(min(CHUNK, count))):
            count -= len(piece)
            yield piece

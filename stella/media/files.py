"""Opens media files. Files that FFmpeg would wait for, or report badly, are refused before it sees them."""

import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stella.errors import ClipError, require

PLAYLISTS = ("concat", "dash", "hls")  # formats that name other files


@contextmanager
def open_media(path: Path, deadline: float) -> Iterator[Any]:
    """A PyAV container; FFmpeg's errors while it is open become `ClipError`."""
    _check_file(path)
    av = require("av")
    left, opened = max(0.001, deadline - time.monotonic()), False
    # "file:" and the whitelist keep FFmpeg from opening anything else that a name or a playlist mentions
    options = {"protocol_whitelist": "file"}
    try:
        with av.open(f"file:{path}", options=options, metadata_errors="replace", timeout=left) as container:
            opened = True
            if container.format.name in PLAYLISTS:
                raise ClipError(path, "not a media file", "it is a playlist: give the paths of its videos")
            yield container
    except av.error.ExitError as error:
        raise _late(path) from error
    except av.error.FFmpegError as error:
        if opened:
            raise ClipError(path, "unreadable file", f"FFmpeg says {error.strerror!r}: fetch it again") from error
        remedy = "it is damaged, truncated or of another format: fetch it again or leave it out"
        raise ClipError(path, "not a media file", remedy) from error


def _check_file(path: Path) -> None:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ClipError(path, "not a regular file", "give the path of a video file")
        path.open("rb").close()
    except FileNotFoundError as error:
        if path.is_symlink():
            raise ClipError(path, "broken link", f"its target {path.readlink()} is missing: repair it") from error
        raise ClipError(path, "missing file", "check the path") from error
    except PermissionError as error:
        raise ClipError(path, "no permission", "make it readable (chmod +r)") from error
    except OSError as error:
        raise ClipError(path, "unreadable file", f"the system says {error.strerror!r}: check the disk") from error
    if not status.st_size:
        raise ClipError(path, "empty file", "fetch it again")


def check_time(path: Path, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise _late(path)


def _late(path: Path) -> ClipError:
    return ClipError(path, "time limit", "it takes too long to decode: re-encode it, or raise the limit")

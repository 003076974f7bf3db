"""Opens media files: the only place where FFmpeg is given one, and where bad files are refused.

A file is data, never a list of other places to read from: FFmpeg may open no network address, no second file, and only
the formats listed here.
"""

import errno
import io
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stella.errors import ClipError, ConfigError, require

# FFmpeg's names of the formats that people have. None of them names other files, as playlists, SDP or image
# sequences do.
FORMATS = (
    *("mov", "matroska", "avi", "mpegts", "mpeg", "mpegvideo", "flv", "asf", "ogg", "mxf", "dv", "nut", "rm", "gif"),
    *("wav", "w64", "flac", "mp3", "aac", "aiff", "caf", "amr", "ac3"),
)


ASF, ASF_PROPERTIES = (
    bytes.fromhex(guid) for guid in ("3026b2758e66cf11a6d900aa0062ce6c", "a1dcab8c47a9cf118ee400c00c205365")
)


@dataclass(frozen=True)
class Limits:
    """What is accepted of a media file."""

    strict: bool = True  # refuse content that FFmpeg finds damaged; false: take it where FFmpeg conceals the damage
    pixels: int = 40_000_000  # of one picture, refused before it is decoded; 8K video has 35 million

    def __post_init__(self) -> None:
        if not 1 <= self.pixels < 2**31:
            raise ConfigError(f"a limit of {self.pixels} pixels makes no sense; give one of 1 … 2^31 - 1")

    @property
    def codec_options(self) -> dict[str, str]:
        return {"max_pixels": str(self.pixels)} | ({"err_detect": "explode"} if self.strict else {})


LIMITS = Limits()


@contextmanager
def open_media(path: Path, deadline: float, limits: Limits = LIMITS) -> Iterator[Any]:
    """A PyAV container. Bad files, and FFmpeg's errors while it is open, become `ClipError`."""
    check_file(path)
    av = require("av")
    left, opened = max(0.001, deadline - time.monotonic()), False
    try:
        with _container(f"file:{path}", "file", FORMATS, limits, timeout=left) as container:
            opened = True
            for stream in container.streams.video:
                context = stream.codec_context  # FFmpeg gives it no size at all beyond `max_pixels`
                if context and not 0 < context.width * context.height <= limits.pixels:
                    remedy = f"a picture of 1 to {limits.pixels:,} pixels is accepted: scale it, or raise the limit"
                    raise ClipError(path, "picture too large or of unknown size", remedy)
            yield container
    except av.error.ExitError as error:
        raise late(path) from error
    except av.error.FFmpegError as error:
        if error.errno == errno.ENOMEM:
            raise ClipError(path, "too much memory", "re-encode it, or allow a worker more memory") from error
        if opened:
            raise ClipError(path, "unreadable file", f"FFmpeg says {error.strerror!r}: fetch it again") from error
        remedy = "it is damaged, truncated, a playlist or of another format: fetch it again or leave it out"
        raise ClipError(path, "not a media file", remedy) from error


@contextmanager
def in_memory(data: bytes) -> Iterator[Path]:
    """The path of a file with this content, which is in memory as long as the block lasts."""
    if not hasattr(os, "memfd_create"):  # not Linux
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            yield Path(file.name)
        return
    descriptor = os.memfd_create("clip")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@contextmanager
def open_bytes(data: bytes, format: str) -> Iterator[Any]:
    """A PyAV container of a file in memory, which is of this format and nothing else."""
    with _container(io.BytesIO(data), "none", (format,), LIMITS, format=format) as container:
        yield container


@contextmanager
def _container(file: Any, protocols: str, formats: tuple[str, ...], limits: Limits, **more: Any) -> Iterator[Any]:
    # "file:" and the whitelists keep FFmpeg from opening anything else that a name or a playlist mentions
    outside = {"protocol_whitelist": protocols, "format_whitelist": ",".join(formats)}
    probing = {"max_pixels": str(limits.pixels)}
    av = require("av")
    if int(av.__version__.split(".")[0]) < 19:  # later ones take any text
        more["metadata_errors"] = "replace"
    with av.open(file, options=probing, container_options=outside, **more) as container:
        for stream in container.streams:
            if stream.codec_context is not None:
                stream.codec_context.options = limits.codec_options
        yield container


def check_file(path: Path) -> None:
    """Refuse files that FFmpeg would wait for, or report badly."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ClipError(path, "not a regular file", "give the path of a video file")
        path.open("rb").close()
    except FileNotFoundError:
        if path.is_symlink():
            raise ClipError(path, "broken link", f"its target {path.readlink()} is missing: repair it") from None
        raise ClipError(path, "missing file", "check the path") from None
    except PermissionError:
        raise ClipError(path, "no permission", "make it readable (chmod +r)") from None
    except OSError as error:
        raise ClipError(path, "unreadable file", f"the system says {error.strerror!r}: check the disk") from error
    if not status.st_size:
        raise ClipError(path, "empty file", "fetch it again")


def shorter_than_stated(path: Path) -> bool:
    """Whether a file lacks a part of the bytes that its header states. Of AVI, WAV and ASF: FFmpeg takes the length of
    a cut one for granted. A size of 0 or of all ones was never filled in."""
    with path.open("rb") as file:
        head = file.read(1 << 13)
    stated = 0
    if head.startswith(b"RIFF"):
        stated = (int.from_bytes(head[4:8], "little") + 1) % 2**32 - 1
    elif head.startswith(ASF) and (at := head.find(ASF_PROPERTIES)) > 0:
        stated = int.from_bytes(head[at + 40 : at + 48], "little")
    return path.stat().st_size < 0.99 * stated


def check_time(path: Path, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise late(path)


def late(path: Path) -> ClipError:
    return ClipError(path, "time limit", "it takes too long to decode: re-encode it, or raise the limit")

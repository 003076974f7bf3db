"""Videos in tar archives, read as a stream: nothing is unpacked to a disk, and a name in an archive is never a path."""

import gzip
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from stella.data.folder import VIDEO_SUFFIXES
from stella.errors import ClipError

ARCHIVE = re.compile(r"(?!shard-\d{6}[.-]).+\.(tar|tar\.gz|tgz)")  # our own shards are none
VIDEO2DATASET = re.compile(r"\d+\.tar")
BUFFER = 1 << 20
MOST_BYTES = 1 << 30  # of one member
YOUTUBE = re.compile(r"(?:v=|youtu\.be/|/embed/|/shorts/)([\w-]{11})")


def compressed(name: str) -> bool:
    """Whether an archive of this name can only be read from its beginning."""
    return not name.endswith(".tar")


@dataclass(frozen=True)
class Member:
    """A video of an archive. `data` is None if it was not wanted, or was never fetched (`failed` says why)."""

    name: str  # without folders
    data: bytes | None
    about: dict[str, Any]  # the JSON beside it in an archive of video2dataset, else empty
    failed: str | None = None

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def names(self) -> list[str]:
        """What a list may call it: its name, or of video2dataset the YouTube id of its address, with its time."""
        found = YOUTUBE.search(str(self.about.get("url", "")))
        if not found:
            return [self.stem]
        clips = self.about.get("clips") or []
        start = _seconds(clips[0][0]) if clips and isinstance(clips[0], list) and clips[0] else None
        return [self.stem, *([] if start is None else [f"{found[1]}_{int(start):06d}"]), found[1]]


def _seconds(time: object) -> float | None:
    """`00:01:30.500`, or a number."""
    try:
        parts = [float(part) for part in str(time).split(":")]
    except ValueError:
        return None
    return sum((part * 60.0**power for power, part in enumerate(reversed(parts))), 0.0)


class Archive:
    """One archive. `read` is the number of its bytes that were read so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        self.video2dataset = VIDEO2DATASET.fullmatch(path.name) is not None
        self._raw: BinaryIO | None = None
        self.finished = False  # all of it has been read, now or before

    @property
    def read(self) -> int:
        if self.finished or self._raw is None:
            return self.size * self.finished
        return self.size if self._raw.closed else self._raw.tell()

    def members(self, wanted: Callable[[str], bool]) -> Iterator[Member]:
        """The videos in their order, with the bytes of those whose stem is wanted.

        An archive that ends or cannot be read on in its middle raises `ClipError` there, after what could be read.
        """
        files = self._files(wanted)
        yield from (
            self._with_json(files)
            if self.video2dataset
            else (Member(name, data, {}) for name, data in files if _is_video(name))
        )

    def _files(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes | None]]:
        if not self.path.is_file():  # a pipe would be waited for
            raise ClipError(self.path, "not a regular file", "give the path of an archive")
        with ExitStack() as stack:
            try:
                self._raw = stack.enter_context(self.path.open("rb"))
                raw = self._raw
                stream: Any = _ToTheEnd(gzip.GzipFile(fileobj=raw)) if compressed(self.path.name) else raw
                tar = stack.enter_context(tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER))
                passed: list[str] = []  # the member before, if it was not read: the next one shows that it is whole
                while (member := tar.next()) is not None:
                    yield from ((name, None) for name in passed)
                    passed.clear()
                    tar.members.clear()  # type: ignore[attr-defined]  # it would list them all
                    name = PurePosixPath(member.name).name
                    if member.isfile() and (_is_video(name) or name.endswith(".json")):
                        if self.video2dataset or wanted(PurePosixPath(name).stem):
                            yield name, self._content(tar, member)
                        else:
                            passed.append(name)
                self._check_end(tar)
                yield from ((name, None) for name in passed)
            except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
                what = " ".join(str(error).split())[:120]
                raise ClipError(self.path, "damaged archive", f"{what}: fetch it again for the rest of it") from error

    def _content(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        file = tar.extractfile(member)
        if file is None or member.size > MOST_BYTES:
            return b""
        return file.read()

    def _check_end(self, tar: tarfile.TarFile) -> None:
        """tarfile takes a damaged header for the end: behind the true end there are zeros alone."""
        rest: Any = tar.fileobj
        while chunk := rest.read(BUFFER):
            if chunk.strip(b"\0"):
                raise tarfile.ReadError("it is damaged in its middle")

    def _with_json(self, files: Iterator[tuple[str, bytes | None]]) -> Iterator[Member]:
        """Files of one key follow one another."""
        key, group = "", dict[str, bytes]()
        for name, data in files:
            if PurePosixPath(name).stem != key:
                yield from _member(group)
                key, group = PurePosixPath(name).stem, {}
            group[name] = data or b""
        yield from _member(group)


class _ToTheEnd:
    """A compressed stream that gives all bytes before a damaged place, and fails with the next read."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        try:
            while size > 0 and (part := self._stream.read1(size)):
                parts.append(part)
                size -= len(part)
        except (EOFError, zlib.error, OSError):
            if not parts:
                raise
        return b"".join(parts)


def _is_video(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in VIDEO_SUFFIXES


def _member(group: dict[str, bytes]) -> Iterator[Member]:
    about: Any = {}
    for name, data in group.items():
        if name.endswith(".json"):
            try:
                about = json.loads(data)
            except (ValueError, RecursionError):
                about = {}
    about = about if isinstance(about, dict) else {}
    videos = [name for name in group if _is_video(name)]
    for name in videos:
        yield Member(name, group[name], about)
    if not videos and about:
        why = about.get("error_message") or about.get("status") or "no video"
        yield Member(next(iter(group)), None, about, failed=" ".join(str(why).split())[:120])

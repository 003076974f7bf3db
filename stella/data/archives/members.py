"""Videos in a tar archive, each read where it lies. `tar.py` reads archives as a stream, compressed ones too."""

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from stella.data.archives.tar import ARCHIVE, MOST_BYTES, compressed
from stella.data.folder import VIDEO_SUFFIXES
from stella.errors import ClipError
from stella.media.files import in_memory


def is_tar(name: str) -> bool:
    """Whether the videos of an archive of this name can be read one by one."""
    return ARCHIVE.fullmatch(name) is not None and not compressed(name)


@dataclass(frozen=True)
class Place:
    """Where a file lies in its archive."""

    start: int
    size: int


@dataclass(frozen=True)
class Listing:
    videos: dict[str, Place]  # by name; of several with the same name the last, as if they were unpacked
    whole: bool  # False if the archive is damaged behind these, or still being written


def list_videos(archive: Path) -> Listing:
    """The videos of a tar archive. Reads the headers alone."""
    status = archive.stat()
    return _listed(archive, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _listed(archive: Path, size: int, changed: int) -> Listing:
    """`size` and `changed` say whether the archive is still the one that was listed."""
    videos: dict[str, Place] = {}
    with archive.open("rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                    name = _plain(member.name)
                    video = member.isreg() and not member.issparse() and name.suffix.lower() in VIDEO_SUFFIXES
                    if video and not name.name.startswith(".") and member.offset_data + member.size <= size:
                        videos[str(name)] = Place(member.offset_data, member.size)
                file.seek(tar.offset)
        except tarfile.TarError:
            return Listing(videos, whole=False)
        return Listing(videos, whole=not file.read(tarfile.RECORDSIZE).strip(b"\0"))  # tarfile ends at damage too


def _plain(name: str) -> PurePosixPath:
    """A name without anything that leads out of the archive."""
    return PurePosixPath(*(part for part in PurePosixPath(name).parts if part not in ("/", "//", "..")))


def archive_of(path: Path) -> Path | None:
    """The tar archive of ARCHIVE.tar/NAME; None for other paths."""
    return next((each for each in path.parents if is_tar(each.name) and each.is_file()), None)


@contextmanager
def readable(path: Path) -> Iterator[Path]:
    """A path that can be opened: the path itself, or for ARCHIVE.tar/NAME that of a copy in memory."""
    if (archive := archive_of(path)) is None:
        yield path
        return
    place = list_videos(archive).videos.get(path.relative_to(archive).as_posix())
    if place is None:
        raise ClipError(path, "missing file", "restore it in its archive, or leave it")
    if place.size > MOST_BYTES:
        raise ClipError(path, "too large", f"unpack it: in an archive a video may have {MOST_BYTES >> 30} GiB")
    with archive.open("rb") as file:
        file.seek(place.start)
        data = file.read(place.size)
    try:
        with in_memory(data) as copy:
            yield copy
    except ClipError as error:
        raise ClipError(path, error.reason, error.remedy) from error

"""What an index is made of: the media files of a folder, or the clips in shards of `stella prepare`."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from stella.clip import SAMPLE_RATE
from stella.data.folder import MEDIA_SUFFIXES, find_videos
from stella.data.shards import Shards
from stella.embed import Embeddings, Model
from stella.errors import ClipError, StellaError
from stella.media.files import check_file

Both = tuple[Embeddings | None, Embeddings | None]  # pictures, sound


@dataclass(frozen=True)
class Item:
    """One file as it was when it was listed. A file of another size or time is looked at again."""

    path: str  # below the source's root; any bytes, as `os.fsdecode` gives them
    size: int
    mtime: int  # nanoseconds
    ctime: int
    label: str | None


class Source(Protocol):
    root: Path

    def items(self) -> Iterator[Item]: ...

    def digest(self, item: Item) -> bytes | None:
        """A hash of the content; None if it cannot be read."""
        ...

    def embed(self, model: Model, item: Item, overlap: float) -> Both:
        """The windows of pictures and of sound, or `ClipError`."""
        ...


def open_source(root: Path) -> Source:
    if not root.is_dir():
        raise StellaError(f"{root} is not a folder; give one of videos and sounds, or of shards of `stella prepare`")
    return ShardClips(root) if any(root.glob("shard-*.tar")) else MediaFolder(root)


class MediaFolder:
    """All videos and sounds below a folder. A file's label is the name of its folder, unless that is the root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def items(self) -> Iterator[Item]:
        for path in find_videos(self.root, MEDIA_SUFFIXES):
            try:
                status = (self.root / path).stat()
                stamp = status.st_size, status.st_mtime_ns, status.st_ctime_ns
            except OSError:
                stamp = -1, 0, 0  # a broken link: `embed` will say so
            yield Item(path, *stamp, Path(path).parent.name or None)

    def digest(self, item: Item) -> bytes | None:
        path = self.root / item.path
        try:
            check_file(path)  # a pipe would be waited for
            with path.open("rb") as file:
                return hashlib.file_digest(file, _hash).digest()
        except (ClipError, OSError):
            return None

    def embed(self, model: Model, item: Item, overlap: float) -> Both:
        return model.embed_both(self.root / item.path, overlap=overlap)


class ShardClips:
    """The clips in shards of `stella prepare`. A path is a clip's id; times are those of the video it was cut from."""

    def __init__(self, root: Path) -> None:
        self.root, self.clips = root, Shards(root)
        self._positions: dict[str, int] = {}

    def items(self) -> Iterator[Item]:
        for index in range(len(self.clips)):
            shard, entry = self.clips.entry(index)
            status = shard.stat()
            self._positions[entry.id] = index
            yield Item(entry.id, status.st_size, status.st_mtime_ns, status.st_ctime_ns, entry.label)

    def digest(self, item: Item) -> bytes | None:
        try:
            meta = self.clips.head(self._positions[item.path]).meta
        except ClipError:
            return None
        return _hash(json.dumps([meta["sizes"], meta["crc32"]]).encode()).digest()

    def whole(self, path: str) -> tuple[float, Tensor, Tensor, float]:
        """When a clip begins in its video, its frames uint8 [N, 3, H, W], its waveform [S], and the frames a second."""
        index = self._position(path)
        return self.clips.entry(index)[1].start, *self.clips.whole(index)

    def stamp(self, path: str) -> tuple[int, int]:
        """Size and time of a clip's shard, as its `Item` has them."""
        status = self.clips.entry(self._position(path))[0].stat()
        return status.st_size, status.st_mtime_ns

    def _position(self, path: str) -> int:
        if not self._positions:
            self._positions = {self.clips.entry(index)[1].id: index for index in range(len(self.clips))}
        if path not in self._positions:
            raise ClipError(path, "missing clip", "it is not in the shards: bring the index up to date")
        return self._positions[path]

    def embed(self, model: Model, item: Item, overlap: float) -> Both:
        start, frames, waveform, fps = self.whole(item.path)
        video = model.embed_video((frames, fps), overlap=overlap)
        audio = model.embed_audio((waveform, SAMPLE_RATE), overlap=overlap)
        return _later(video, start), _later(audio, start)


def _later(found: Embeddings, seconds: float) -> Embeddings:
    return replace(found, start=found.start + seconds, end=found.end + seconds)


def _hash(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)

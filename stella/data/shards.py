"""WebDataset tar shards with random access. `writer` writes them.

A folder holds `shard-000000.tar` with its index `shard-000000.json`. A sample is KEY.json, KEY.000.jpg … (frames at a
fixed rate), KEY.flac. The JSON comes first and holds the sizes and checksums of the other files, so that four frames
are read without the rest and damage is detected. `….tar.part` is being written.
"""

import hashlib
import io
import json
import math
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from torch import Tensor

from stella.clip import MIDDLE, SAMPLE_RATE, Clip, Labels, Origin
from stella.data.mirror import opened
from stella.data.tasks import DecodedConfig
from stella.errors import ClipError, StellaError, require
from stella.files import encoded, is_address, read_json, write_json
from stella.media.codecs import decode_flac, decode_jpegs, encode_flac, encode_jpegs
from stella.media.decode import Plan
from stella.media.inputs import Inputs

PREPARED = "prepare.json"  # the settings that `stella prepare` filled a folder with
SLACK = 0.01  # seconds: rounding of lengths
END_OF_TAR = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class ShardsConfig(DecodedConfig):
    source: Literal["shards"] = "shards"  # tar files made by `stella prepare`

    def open(self, evaluation: bool = False) -> "Shards":
        place = self.eval_path if evaluation else self.path
        inputs = self.inputs()
        return Shards(place or "", inputs.frames, inputs.span, inputs.size, inputs.duration)

    def following(self, inputs: Inputs | None) -> Self:
        """Without weights a clip takes the seconds that the shards say they hold."""
        held = None if inputs or self.duration else stated_seconds(self.path)
        return super().following(replace(Inputs(), duration=held) if held else inputs)

    def remarks(self) -> list[str]:
        taken = self.inputs().duration
        places = dict.fromkeys(path for path in (self.path, self.eval_path) if path)
        return [
            f"the clips of {place} hold {held:g} s, of which the first {taken:g} are taken"
            for place in places
            if (held := stated_seconds(place)) and held > taken + SLACK
        ]


@dataclass(frozen=True)
class Entry:
    """A line of a shard's index: one clip."""

    id: str
    source: str  # the video's path below the folder it was prepared from
    start: float  # seconds into that video
    offset: int  # bytes into the shard
    label: str | None = None
    task: str | None = None
    duration: float | None = None  # seconds; none: only the sample itself says
    split: str | None = None  # train or test, of a clip of a list
    classes: list[str] | None = None  # all of them, of a clip of a list
    row: int | None = None  # its place in the list
    nth: int | None = None  # its place among the listed clips of its class and split
    odd: list[str] | None = None  # still picture, silent, short

    def __post_init__(self) -> None:
        texts = (self.id, self.source, self.label or "", self.task or "")
        if not all(isinstance(text, str) for text in texts) or type(self.offset) is not int or self.offset < 0:
            raise TypeError("names are no texts, or the offset is no position")
        if not math.isfinite(self.start):
            raise ValueError(f"a clip cannot start at {self.start}")
        if self.duration is not None and not 0 <= self.duration < math.inf:
            raise ValueError(f"a clip cannot last {self.duration} s")


class DamagedSampleError(Exception):
    """Bytes that are not a whole sample: a killed writer's last one, or a damaged shard."""


class Shards:
    """The clips of a folder, or address, that `stella prepare` filled, in the order of their sources and start times.

    A clip has `frames` frames out of a window of `span` seconds (None: the whole clip), scaled to a short side of
    `size` (None: as stored). It is the first `duration` seconds of what is stored (None: all); a folder that was
    prepared for less is refused.
    """

    def __init__(
        self,
        place: Path | str,
        frames: int = 4,
        span: float | None = 4.0,
        size: int | None = None,
        duration: float | None = None,
    ) -> None:
        self.frames, self.span, self.size = frames, span, size
        self._there = opened(place)
        self.place, self.root = self._there.place, self._there.folder
        self.duration = math.inf if duration is None else duration
        found = {shard: read_index(self.root / shard, self._there.size) for shard in finished_shards(self.root)}
        indexed = [(shard, entry) for shard, entries in found.items() for entry in entries]
        if not indexed:
            raise StellaError(f"{self.place} holds no finished shards; fill it with: stella prepare SRC {self.place}")
        self._clips = sorted(indexed, key=lambda clip: (clip[1].source, clip[1].start))
        if duration and (held := stated_seconds(self.root)) and held < duration - SLACK:
            raise StellaError(
                f"the clips of {self.place} hold {held:g} s and {duration:g} s are wanted, so that the rest would be "
                f"padding; set data.duration={held:g}, or prepare them with --seconds {duration:g}"
            )

    def changed(self, change: Callable[[Entry], Entry]) -> Self:
        """The same clips with other lines in the index: another class or task."""
        self._clips = [(shard, change(entry)) for shard, entry in self._clips]
        return self

    def __len__(self) -> int:
        return len(self._clips)

    def location(self, index: int) -> str:
        shard, entry = self._clips[index]
        return f"{self.place}/{shard}, {entry.id}"

    def entry(self, index: int) -> tuple[Path, Entry]:
        """A clip's shard and its line in the index."""
        shard, entry = self._clips[index]
        return self.root / shard, entry

    def origin(self, index: int) -> Origin:
        _, entry = self._clips[index]
        return Origin(entry.id, entry.source)

    def stamp(self, index: int) -> str:
        shard, entry = self._clips[index]
        return f"{shard}, byte {entry.offset}"

    def seconds(self, index: int) -> float:
        _, entry = self._clips[index]
        return float(self.head(index).meta["duration"]) if entry.duration is None else entry.duration

    def labels(self, index: int) -> Labels:
        _, entry = self.entry(index)
        others = tuple(name for name in entry.classes or () if name != entry.label)
        return Labels(entry.label, entry.task, others=others)

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index)

    def clip(self, index: int, window: float = MIDDLE) -> Clip:
        def picks(count: int, fps: float) -> list[int]:
            count = min(count, math.ceil(self.duration * fps - 1e-6)) if self.duration < math.inf else count
            times = Plan(frames=self.frames, span=self.span).times(0, count / fps, window)
            return [min(int(time * fps + 1e-6), count - 1) for time in times]

        head, frames, waveform = self._read(index, picks)
        if self.duration < math.inf:
            waveform = waveform[: round(self.duration * SAMPLE_RATE)]
        return Clip(head.meta["id"], frames, waveform, self.labels(index))

    def head(self, index: int) -> "Head":
        """What a clip's sample says of itself: id, source, start, fps, sizes and checksums of its files."""
        with self._open(index) as (_, head):
            return head

    def whole(self, index: int) -> tuple[Tensor, Tensor, float]:
        """All stored frames uint8 [N, 3, H, W], the waveform [S], and the frames a second."""
        head, frames, waveform = self._read(index, lambda count, _: list(range(count)))
        return frames, waveform, float(head.meta["fps"])

    @contextmanager
    def _open(self, index: int) -> Iterator[tuple[BinaryIO, "Head"]]:
        """The shard of a clip and the head of its sample. Whatever is wrong with it becomes `ClipError`."""
        shard, entry = self._clips[index]
        try:
            with io.BufferedReader(self._there.open(shard)) as file:
                head = read_head(file, entry.offset)
                if head.meta["id"] != entry.id:
                    raise DamagedSampleError(f"{head.meta['id']} where {entry.id} should be")
                yield file, head
        except (OSError, DamagedSampleError, ValueError, require("av.error").FFmpegError) as error:
            remedy = f"{error}; delete the shard with its .json and prepare again"
            if is_address(self.place):
                remedy += f", or, if it is whole there, delete {self.root} and run again"
            raise ClipError(self.location(index), "damaged shard", remedy) from error

    def _read(self, index: int, picks: Callable[[int, float], list[int]]) -> tuple["Head", Tensor, Tensor]:
        """A sample's head, the frames that `picks(frames, fps)` chooses, and its waveform."""
        with self._open(index) as (file, head):
            sound = len(head.offsets) - 1  # the frames come before it
            chosen = picks(sound, float(head.meta["fps"]))
            parts = {member: head.read(file, member) for member in {*chosen, sound}}
            return head, decode_jpegs([parts[pick] for pick in chosen], self.size), decode_flac(parts[sound])


def sample(meta: dict[str, Any], frames: Tensor, waveform: Tensor, fps: float) -> bytes:
    """One sample in tar format. `meta` needs id, source, start and duration; label and task are optional."""
    members = [*encode_jpegs(frames), encode_flac(waveform)]
    names = [f"{number:03d}.jpg" for number in range(len(members) - 1)] + ["flac"]
    meta = meta | {"fps": fps, "sizes": [len(m) for m in members], "crc32": [zlib.crc32(m) for m in members]}
    text = encoded(json.dumps(meta, ensure_ascii=False))
    parts: list[bytes] = []
    for name, data in zip(["json", *names], [text, *members], strict=True):
        info = tarfile.TarInfo(f"{_key(meta['id'])}.{name}")
        info.size = len(data)
        parts += [info.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % tarfile.BLOCKSIZE)]
    return b"".join(parts)


@dataclass(frozen=True)
class Head:
    """The first file of a sample, with the positions of the others."""

    meta: dict[str, Any]
    offsets: Sequence[int]  # of each file's data
    end: int

    def read(self, file: BinaryIO, member: int) -> bytes:
        data = _read(file, self.offsets[member], self.meta["sizes"][member])
        if zlib.crc32(data) != self.meta["crc32"][member]:
            raise DamagedSampleError(f"file {member} of {self.meta['id']} fails its checksum")
        return data


def read_head(file: BinaryIO, offset: int) -> Head:
    try:
        size = tarfile.TarInfo.frombuf(_read(file, offset, tarfile.BLOCKSIZE), "utf-8", "strict").size
        meta = json.loads(_read(file, offset + tarfile.BLOCKSIZE, size))
        meta["sizes"], meta["fps"] = [int(size) for size in meta["sizes"]], float(meta["fps"])
        entry_of(meta, offset)
        if len(meta["crc32"]) != len(meta["sizes"]) or len(meta["sizes"]) < 2 or not 0 < meta["fps"] <= 1000:
            raise DamagedSampleError(f"its JSON at byte {offset} describes no clip")
        offsets, end = [], offset
        for length in [size, *meta["sizes"]]:
            offsets.append(end + tarfile.BLOCKSIZE)
            end = offsets[-1] + length + -length % tarfile.BLOCKSIZE
    except (tarfile.HeaderError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedSampleError(f"no sample begins at byte {offset}") from error
    return Head(meta, offsets[1:], end)


def scan(path: Path) -> tuple[list[Entry], int]:
    """The whole samples at the beginning of a shard, checked to the last byte, and where they end."""
    entries: list[Entry] = []
    end, total = 0, path.stat().st_size
    with path.open("rb") as file, suppress(DamagedSampleError):
        while end < total:
            head = read_head(file, end)
            for member in range(len(head.offsets)):
                head.read(file, member)
            if head.end > total:  # the padding of its last file is missing
                break
            entries.append(entry_of(head.meta, end))
            end = head.end
    return entries, end


def finished_shards(root: Path) -> list[str]:
    if not root.is_dir():
        raise StellaError(f"{root} is not a folder; give one that `stella prepare` filled")
    files = [path for path in root.iterdir() if re.fullmatch(r"shard-\d{6}(-\d{4})?\.(tar|json)", path.name)]
    return sorted({path.with_suffix(".tar").name for path in files})


def write_index(shard: Path, entries: list[Entry]) -> None:
    index = {"bytes": shard.stat().st_size, "clips": [asdict(entry) for entry in entries]}
    write_json(shard.with_suffix(".json"), index)


def read_index(shard: Path, size_of: Callable[[str], int] | None) -> list[Entry]:
    """The entries of a shard, after checking its size; `size_of` returns that of a name, or is None: unchecked."""
    index = shard.with_suffix(".json")
    remedy = "restore it, or delete both files and run stella prepare again"
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        entries = [Entry(**clip) for clip in content["clips"]]
        size = size_of(shard.name) if size_of else content["bytes"]
    except FileNotFoundError as error:
        lost = error.filename
        other = shard if lost == str(index) else index
        raise StellaError(f"{lost} is missing beside {other.name}; {remedy}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StellaError(f"{index} is not an index of shards ({error}); {remedy}") from error
    if size != content["bytes"]:
        raise StellaError(f"{shard} is damaged: it has {size} bytes and its index says {content['bytes']}; {remedy}")
    return entries


def entry_of(meta: dict[str, Any], offset: int) -> Entry:
    times = float(meta["start"]), float(meta["duration"])
    listed = {name: meta.get(name) for name in ("split", "classes", "row", "nth", "odd")}
    return Entry(meta["id"], meta["source"], times[0], offset, meta.get("label"), meta.get("task"), times[1], **listed)


def stated_seconds(place: Path | str) -> float | None:
    """The length in seconds that the clips of a folder were prepared for; None if it does not say."""
    path = opened(place).folder / PREPARED
    seconds = read_json(path).get("seconds") if path.is_file() else None
    if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise StellaError(f"{path} says that clips last {seconds} s; restore it, or prepare them again elsewhere")
    return seconds


def _key(id: str) -> str:
    """A readable name, unique for the id, that WebDataset accepts (no dots, no folders) and fits a tar header."""
    return f"{re.sub(r'[^0-9A-Za-z-]+', '_', id)[-60:]}_{hashlib.blake2b(encoded(id), digest_size=6).hexdigest()}"


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    if size < 0 or offset + size > (end := file.seek(0, io.SEEK_END)):
        raise DamagedSampleError(
            f"the file ends at byte {end} instead of {offset + size}" if size >= 0 else "a size < 0"
        )
    file.seek(offset)
    return file.read(size)

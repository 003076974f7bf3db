"""WebDataset tar shards that can be read at random, and the writer that `prepare` fills them with.

A folder of shards holds `shard-000000.tar` with its index `shard-000000.json`. A sample is KEY.json, KEY.000.jpg …
(frames at a fixed rate), KEY.flac; the JSON comes first and tells the sizes and checksums of the files that follow, so
that four frames of a clip are read without the others, and damage is noticed. `….tar.part` is still being written.
"""

import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from stella.clip import SAMPLE_RATE, Clip, Labels
from stella.errors import ClipError, StellaError, require
from stella.media.decode import Plan

JPEG_QUANTISER = 3  # of 1 (best) to 31; at 256 px about 38 dB and 10 KB a frame
END_OF_TAR = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Entry:
    """Where a clip lies in its shard, and what is known of it without reading it."""

    id: str
    source: str  # the video's path below the folder it was prepared from
    start: float  # seconds into that video
    offset: int  # bytes into the shard
    label: str | None = None
    task: str | None = None


class DamagedSampleError(Exception):
    """Bytes that are not a whole sample: the end of what a killed writer left, or a damaged shard."""


class Shards:
    """The clips of a folder that `stella prepare` filled, in the order of their source files and start times.

    `frames` of each are read, from the middles of as many equal parts of the central `span` seconds (None: of the
    whole clip), and scaled to a short side of `size` (None: as stored).
    """

    def __init__(self, root: Path | str, frames: int = 4, span: float | None = 4.0, size: int | None = None) -> None:
        self.root, self.frames, self.span, self.size = Path(root), frames, span, size
        indexed = [(shard, entry) for shard in _finished(self.root) for entry in _read_index(self.root / shard)]
        if not indexed:
            raise StellaError(f"{self.root} holds no finished shards; fill it with: stella prepare SRC {self.root}")
        self._clips = sorted(indexed, key=lambda clip: (clip[1].source, clip[1].start))

    def __len__(self) -> int:
        return len(self._clips)

    def place(self, index: int) -> str:
        shard, entry = self._clips[index]
        return f"{self.root / shard}, {entry.id}"

    def labels(self, index: int) -> Labels:
        """The labels of a clip, without reading it."""
        _, entry = self._clips[index]
        return Labels(name=entry.label, task=entry.task)

    def __getitem__(self, index: int) -> Clip:
        shard, entry = self._clips[index]
        path = self.root / shard
        try:
            with path.open("rb") as file:
                head = read_head(file, entry.offset)
                if head.meta["id"] != entry.id:
                    raise DamagedSampleError(f"{head.meta['id']} where {entry.id} should be")
                sound = len(head.sizes) - 1
                picks = self._pick(sound, float(head.meta["fps"]))
                parts = {member: head.read(file, member) for member in {*picks, sound}}
        except (OSError, DamagedSampleError) as error:
            remedy = f"{error}; delete the shard with its .json and prepare again"
            raise ClipError(self.place(index), "damaged shard", remedy) from error
        frames = _decode_jpegs([parts[pick] for pick in picks], self.size)
        return Clip(entry.id, frames, _decode_flac(parts[sound]), self.labels(index))

    def _pick(self, stored: int, fps: float) -> list[int]:
        """Which stored frames are shown at the wanted times."""
        times = Plan(frames=self.frames, span=self.span).times(0, stored / fps)
        return [min(int(time * fps + 1e-6), stored - 1) for time in times]


def pack(meta: dict[str, Any], frames: Tensor, waveform: Tensor, fps: float) -> bytes:
    """One sample as a stretch of a tar file. `meta` needs id, source, start, duration; label and task may be there."""
    members = [*_encode_jpegs(frames), _encode_flac(waveform)]
    names = [f"{number:03d}.jpg" for number in range(len(members) - 1)] + ["flac"]
    meta = meta | {"fps": fps, "sizes": [len(m) for m in members], "crc32": [zlib.crc32(m) for m in members]}
    text = json.dumps(meta, ensure_ascii=False).encode()
    key = _key(meta["id"])
    return b"".join(
        _header(f"{key}.{name}", len(data)) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
        for name, data in zip(["json", *names], [text, *members], strict=True)
    )


class ShardWriter:
    """Appends samples to shards. Opened where it was killed, it keeps all whole samples and goes on after the last.

    A sample is in the folder once `append` returned, whatever happens to the process; `ids` has those that are there.
    """

    def __init__(self, root: Path, shard_bytes: int) -> None:
        self.root, self.shard_bytes = root, shard_bytes
        self.ids: set[str] = set()
        for shard in _finished(root):
            index = (root / shard).with_suffix(".json")
            if not index.exists():  # killed between the renaming and the indexing
                _write_index(root / shard, scan(root / shard)[0])
            self.ids.update(entry.id for entry in _read_index(root / shard))
        self._number = 1 + max((int(shard[6:-4]) for shard in _finished(root)), default=-1)
        self._entries, self._end = scan(self._part) if self._part.exists() else ([], 0)
        self._file = self._part.open("r+b" if self._part.exists() else "w+b", buffering=0)
        self._cut()
        self.ids.update(entry.id for entry in self._entries)

    def append(self, sample: bytes) -> None:
        """Write what `pack` made; a shard that is then full is closed."""
        entry = _entry(read_head(io.BytesIO(sample), 0).meta, self._end)
        if entry.id in self.ids:
            raise ValueError(f"{entry.id} is in {self.root} already")
        self._write(sample)
        self._end += len(sample)
        self._entries.append(entry)
        self.ids.add(entry.id)
        if self._end >= self.shard_bytes:
            self._finish()
            self._number += 1
            self._entries, self._end = [], 0
            self._file = self._part.open("w+b", buffering=0)

    def close(self) -> None:
        if self._entries:
            self._finish()
        else:
            self._file.close()
            self._part.unlink()

    @property
    def _part(self) -> Path:
        return self.root / f"shard-{self._number:06d}.tar.part"

    def _cut(self) -> None:
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._cut()  # leave whole samples only
            raise StellaError(
                f"{self._part} cannot be written ({error.strerror}); free some space and run again"
            ) from error

    def _finish(self) -> None:
        self._write(END_OF_TAR)
        os.fsync(self._file.fileno())
        self._file.close()
        shard = self._part.with_suffix("")
        self._part.rename(shard)
        _write_index(shard, self._entries)


@dataclass(frozen=True)
class Head:
    """The first file of a sample, and where the others lie."""

    meta: dict[str, Any]
    sizes: Sequence[int]
    offsets: Sequence[int]  # of the data of each file
    end: int

    def read(self, file: BinaryIO, member: int) -> bytes:
        data = _read(file, self.offsets[member], self.sizes[member])
        if zlib.crc32(data) != self.meta["crc32"][member]:
            raise DamagedSampleError(f"file {member} of {self.meta['id']} fails its checksum")
        return data


def read_head(file: BinaryIO, offset: int) -> Head:
    try:
        size = tarfile.TarInfo.frombuf(_read(file, offset, tarfile.BLOCKSIZE), "utf-8", "strict").size
        meta = json.loads(_read(file, offset + tarfile.BLOCKSIZE, size))
        sizes = [int(s) for s in meta["sizes"]]
        if not {"id", "source", "start", "fps", "crc32"} <= meta.keys() or len(meta["crc32"]) != len(sizes):
            raise DamagedSampleError(f"its JSON at byte {offset} is incomplete")
    except (tarfile.HeaderError, ValueError, KeyError, TypeError) as error:
        raise DamagedSampleError(f"no sample begins at byte {offset}") from error
    offsets = []
    end = offset + tarfile.BLOCKSIZE + _padded(size)
    for size in sizes:
        offsets.append(end + tarfile.BLOCKSIZE)
        end = offsets[-1] + _padded(size)
    return Head(meta, sizes, offsets, end)


def scan(path: Path) -> tuple[list[Entry], int]:
    """The whole samples that a shard begins with, checked to the last byte, and where they end."""
    entries: list[Entry] = []
    end = 0
    with path.open("rb") as file:
        total = path.stat().st_size
        while end < total:
            try:
                head = read_head(file, end)
                for member in range(len(head.sizes)):
                    head.read(file, member)
            except DamagedSampleError:
                break
            if head.end > total:  # only the padding of its last file is missing
                break
            entries.append(_entry(head.meta, end))
            end = head.end
    return entries, end


def _finished(root: Path) -> list[str]:
    if not root.is_dir():
        raise StellaError(f"{root} is not a folder; give one that `stella prepare` filled")
    names = {
        path.with_suffix(".tar").name for path in root.iterdir() if re.fullmatch(r"shard-\d{6}\.(tar|json)", path.name)
    }
    return sorted(names)


def _write_index(shard: Path, entries: list[Entry]) -> None:
    index = {"bytes": shard.stat().st_size, "clips": [asdict(entry) for entry in entries]}
    fresh = shard.with_suffix(".json.tmp")
    fresh.write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    fresh.replace(shard.with_suffix(".json"))


def _read_index(shard: Path) -> list[Entry]:
    """The entries of a shard, once it is sure that the shard is there and whole."""
    index = shard.with_suffix(".json")
    remedy = "bring it back, or delete both files and run stella prepare again"
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        entries = [Entry(**clip) for clip in content["clips"]]
        size = shard.stat().st_size
    except FileNotFoundError as error:
        lost = Path(error.filename)
        other = shard if lost == index else index
        raise StellaError(f"{lost} is missing beside {other.name}; {remedy}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StellaError(f"{index} is not an index of shards ({error}); {remedy}") from error
    if size != content["bytes"]:
        raise StellaError(f"{shard} is damaged: it has {size} bytes and its index says {content['bytes']}; {remedy}")
    return entries


def _entry(meta: dict[str, Any], offset: int) -> Entry:
    return Entry(meta["id"], meta["source"], float(meta["start"]), offset, meta.get("label"), meta.get("task"))


def _key(id: str) -> str:
    """A name that WebDataset takes (no dots, no folders) and a tar header holds: readable, and one for each id."""
    return f"{re.sub(r'[^0-9A-Za-z-]+', '_', id)[-60:]}_{hashlib.blake2b(id.encode(), digest_size=6).hexdigest()}"


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padded(size: int) -> int:
    return size + -size % tarfile.BLOCKSIZE


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) < size:
        raise DamagedSampleError(f"it ends at byte {offset + len(data)} instead of {offset + size}")
    return data


def _encode_jpegs(frames: Tensor) -> list[bytes]:
    """JPEG files of uint8 [N, 3, H, W]."""
    av = require("av")
    codec = av.CodecContext.create("mjpeg", "w")
    codec.height, codec.width = frames.shape[-2:]
    codec.pix_fmt, codec.framerate = "yuvj420p", 1
    codec.qmin = codec.qmax = JPEG_QUANTISER
    packets = []
    for number, pixels in enumerate(frames.permute(0, 2, 3, 1).contiguous().numpy()):
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuvj420p", interpolation=_exact())
        frame.pts = number
        packets += codec.encode(frame)
    return [bytes(packet) for packet in [*packets, *codec.encode(None)]]


def _decode_jpegs(files: list[bytes], size: int | None) -> Tensor:
    av = require("av")
    codec = av.CodecContext.create("mjpeg", "r")
    frames = [frame for file in files for frame in codec.decode(av.Packet(file))] + codec.decode(None)
    height, width = frames[0].height, frames[0].width
    scale = size / min(height, width) if size else 1.0
    height, width = max(1, round(height * scale)), max(1, round(width * scale))
    frames = [frame.reformat(width, height, "rgb24", interpolation=_exact()) for frame in frames]
    pixels = np.stack([frame.to_ndarray() for frame in frames])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()  # [T, 3, H, W]


def _exact() -> Any:
    """Colours converted without the scaler's usual short cuts, which darken by one or two steps."""
    flags = require("av.video.reformatter").Interpolation
    return flags.BILINEAR | flags.ACCURATE_RND | flags.FULL_CHR_H_INT


def _encode_flac(waveform: Tensor) -> bytes:
    av = require("av")
    samples = (waveform * 32768).round().clamp(-32768, 32767).to(torch.int16)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=SAMPLE_RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples.numpy()[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = SAMPLE_RATE, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def _decode_flac(file: bytes) -> Tensor:
    av = require("av")
    with av.open(io.BytesIO(file)) as container:
        samples = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
    return torch.from_numpy(samples).float() / 32768  # [S]

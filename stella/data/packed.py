"""Clips as plain arrays in a folder: `stella pack` writes them once, and epochs read them at the speed of the disk.

`clips.json` holds shapes, ids and labels. `frames.u8` [N, K, T, 3, H, W], `waveforms.i16` [N, S] at 16 kHz and
`lengths.i64` [N] are raw rows, little-endian. The frames of a clip come from K windows spread evenly over it: training
draws one, evaluation takes the middle one. Waveforms are rounded to 16 bits. `clips.json` is written last, and holds a
checksum for each row; rows behind those that it names are being added.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stella.clip import MIDDLE, SAMPLE_RATE, Clip, Device, Labels, Origin, send
from stella.data.mirror import Disk, Local, Mirror, Remote, opened
from stella.data.tasks import FilesConfig, recording_of
from stella.errors import StellaError
from stella.files import is_address, read_json
from stella.media.inputs import Inputs, derived

VERSION = 3
HEADER = "clips.json"
ARRAYS = FRAMES, WAVEFORMS, LENGTHS = "frames.u8", "waveforms.i16", "lengths.i64"
SCALE = 32768  # a sample of 1.0
RESTORE = "restore it, or delete the folder and pack again"
DOWNLOADS = 16  # rows read at once from an address
PREFETCHED = 3  # batches read, or on their way to a GPU, before they are used


@dataclass(frozen=True)
class PackedConfig(FilesConfig):
    """The clips have the sizes that they were packed for."""

    source: Literal["packed"] = "packed"  # arrays made by `stella pack`

    def open(self, evaluation: bool = False) -> "Packed":
        packed = Packed((self.eval_path if evaluation else self.path) or "")
        if evaluation:
            own, other = _sizes(read_header(opened(self.path))), _sizes(packed.header)
            if differ := [f"{key} {own[key]} and {other[key]}" for key in own if own[key] != other[key]]:
                raise StellaError(
                    f"data.path={self.path} and data.eval_path={self.eval_path} were packed with different "
                    f"{', '.join(differ)}; pack both with the same"
                )
        return packed

    def inputs(self) -> Inputs:
        header = read_header(opened(self.path))
        sizes = derived(header.pixels, header.spec_frames, header.frames[0])
        return Inputs(**header.inputs) if header.inputs else sizes


@dataclass(frozen=True)
class Header:
    """The content of `clips.json`. `pixels` and `spec_frames` are the model's sizes that the clips were packed for."""

    version: int
    pixels: int
    spec_frames: int
    frames: list[int]  # [T, 3, H, W]
    samples: int
    windows: int = 1  # K
    ids: list[str] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    tasks: list[str | None] = field(default_factory=list)
    inputs: dict[str, Any] | None = None  # how the clips were made, as far as it is known
    frames_crc32: list[int] = field(default_factory=list)  # of each window of each clip
    sound_crc32: list[int] = field(default_factory=list)  # of each waveform, followed by its length


class _Rows:
    """The rows of one array. Each is checked when it is first read; a file that shrinks meanwhile is an error."""

    def __init__(self, there: Disk | Mirror, name: str, dtype: str, shape: Sequence[int], crc32: Sequence[int]) -> None:
        self.path, self.dtype, self.shape, self.crc32 = f"{there.place}/{name}", np.dtype(dtype), tuple(shape), crc32
        self.bytes = int(np.prod(shape)) * self.dtype.itemsize
        self._file = _open(there, name)
        if self._file.size < (wanted := len(crc32) * self.bytes):
            raise StellaError(f"{self.path} is damaged: it has {self._file.size} bytes instead of {wanted}; {RESTORE}")
        self._checked = bytearray(len(crc32))

    def read(self, row: int, into: "np.ndarray[Any, Any] | None" = None, tail: bytes = b"") -> "np.ndarray[Any, Any]":
        """A row. `tail` are bytes that belong to it and lie elsewhere."""
        into = np.empty(self.shape, self.dtype) if into is None else into
        rest, at = memoryview(into.data).cast("B"), row * self.bytes
        while rest:
            if not (got := self._file.read_at(rest, at)):
                raise StellaError(f"{self.path} ends at byte {at}, in row {row}; {RESTORE}")
            rest, at = rest[got:], at + got
        if not self._checked[row]:
            if zlib.crc32(tail, zlib.crc32(into.data)) != self.crc32[row]:
                raise StellaError(f"{self.path} is damaged: row {row} fails its checksum; {RESTORE}")
            self._checked[row] = 1
        return into


class Packed:
    """The clips of a folder, or address, that `pack` filled, in its order. Batches are read ahead by a thread."""

    def __init__(self, place: Path | str) -> None:
        there = opened(place)
        self.place, self.root = there.place, there.folder
        self.header = header = read_header(there)
        self._frames = _Rows(there, FRAMES, "u1", header.frames, header.frames_crc32)  # N · K of [T, 3, H, W]
        self._waveforms = _Rows(there, WAVEFORMS, "<i2", [header.samples], header.sound_crc32)
        self._lengths = self._read_lengths(there)
        self._reader = ThreadPoolExecutor(1)
        self._rows_at_once = ThreadPoolExecutor(DOWNLOADS).map if is_address(self.place) else map
        self._prefetched: dict[tuple[object, ...], Future[tuple[Tensor, Tensor]]] = {}
        self._sent: deque[torch.cuda.Event] = deque()

    def __reduce__(self) -> tuple[type["Packed"], tuple[str]]:
        return Packed, (self.place,)  # another process opens the files itself

    def __len__(self) -> int:
        return len(self.header.ids)

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index)

    def clip(self, index: int, window: float = MIDDLE) -> Clip:
        """The frames are those of the stored window nearest to `window`."""
        if not 0 <= index < len(self):
            raise IndexError(f"clip {index} of {len(self)}")
        whole = self._waveforms.read(index, None, self._tail(index))
        samples = torch.from_numpy(whole[: int(self._lengths[index])].astype(np.float32))
        [row] = self._rows([index], [window])
        frames = torch.from_numpy(self._frames.read(row))
        return Clip(self.header.ids[index], frames, samples / SCALE, self.labels(index))

    def origin(self, index: int) -> Origin:
        id = self.header.ids[index]
        return Origin(id, recording_of(id))

    def stamp(self, index: int) -> str:
        first, k = index * self.header.windows, self.header.windows
        checksums = [*self.header.frames_crc32[first : first + k], self.header.sound_crc32[index]]
        return f"{int(self._lengths[index])} samples, checksum {zlib.crc32(repr(checksums).encode()):08x}"

    def seconds(self, index: int) -> float:
        return int(self._lengths[index]) / SAMPLE_RATE

    def labels(self, index: int) -> Labels:
        return Labels(self.header.names[index], self.header.tasks[index])

    def location(self, index: int) -> str:
        return f"{self.place}, {self.header.ids[index]}"

    def lengths(self, indices: Sequence[int]) -> Tensor:
        return self._lengths[list(indices)]

    def _rows(self, indices: Sequence[int], windows: Sequence[float] | None) -> list[int]:
        """The rows of `_frames` that hold these windows of these clips."""
        k = self.header.windows
        windows = [MIDDLE] * len(indices) if windows is None else windows
        return [index * k + min(int(window * k), k - 1) for index, window in zip(indices, windows, strict=True)]

    def expect(self, indices: Sequence[int], device: Device = "cpu", windows: Sequence[float] | None = None) -> None:
        rows = self._rows(indices, windows)
        key = (torch.device(device), *rows)
        if key in self._prefetched:
            return
        while len(self._prefetched) >= PREFETCHED:  # an abandoned stream never fetched them
            self._prefetched.pop(next(iter(self._prefetched)))
        pinned = torch.device(device).type == "cuda"  # pinned here: the thread must not call CUDA during a capture
        frames = torch.empty((len(indices), *self.header.frames), dtype=torch.uint8, pin_memory=pinned)
        waveforms = torch.empty((len(indices), self.header.samples), dtype=torch.int16, pin_memory=pinned)
        self._prefetched[key] = self._reader.submit(self._read, rows, list(indices), frames, waveforms)

    def tensors(
        self, indices: Sequence[int], device: Device = "cpu", windows: Sequence[float] | None = None
    ) -> tuple[Tensor, Tensor]:
        self.expect(indices, device, windows)
        read = self._prefetched.pop((torch.device(device), *self._rows(indices, windows))).result()
        frames, waveforms = (send(rows, device) for rows in read)
        if frames.is_cuda:
            self._sent.append(torch.cuda.current_stream().record_event())
            if len(self._sent) > PREFETCHED:  # wait, so that at most PREFETCHED batches occupy pinned memory
                self._sent.popleft().synchronize()
        return frames, waveforms.float() / SCALE

    def _read(self, rows: list[int], indices: list[int], frames: Tensor, waveforms: Tensor) -> tuple[Tensor, Tensor]:
        def read(row: int, index: int, picture: "np.ndarray[Any, Any]", sound: "np.ndarray[Any, Any]") -> None:
            self._frames.read(row, picture)
            self._waveforms.read(index, sound, self._tail(index))

        deque(self._rows_at_once(read, rows, indices, frames.numpy(), waveforms.numpy()), maxlen=0)
        return frames, waveforms

    def _tail(self, index: int) -> bytes:
        return np.array(int(self._lengths[index]), "<i8").tobytes()

    def _read_lengths(self, there: Disk | Mirror) -> Tensor:
        with _open(there, LENGTHS) as file:
            data = file.readall()[: 8 * len(self)]
        lengths = np.frombuffer(data, "<i8") if len(data) == 8 * len(self) else None
        if lengths is None or not ((lengths >= 0) & (lengths <= self.header.samples)).all():
            raise StellaError(f"{self.place}/{LENGTHS} is damaged; {RESTORE}")
        return torch.from_numpy(lengths.astype(np.int64))


def _open(there: Disk | Mirror, name: str) -> Local | Remote:
    try:
        return there.open(name)
    except FileNotFoundError as error:
        raise StellaError(f"{there.place}/{name} is missing; {RESTORE}") from error


def _sizes(header: Header) -> dict[str, Any]:
    """What the clips of two folders must have in common to be used together."""
    sizes = {"pixels": header.pixels, "spec_frames": header.spec_frames, "frames": header.frames[0]}
    return sizes | {"inputs": header.inputs}


def read_header(there: Disk | Mirror) -> Header:
    path = there.folder / HEADER
    if not path.is_file():
        raise StellaError(
            f"{there.place} holds no packed clips; make them with: "
            f"stella pack {there.place} data.source=folder data.path=VIDEOS"
        )
    tree = read_json(path)
    version = tree.get("version") if isinstance(tree, dict) else None
    if version != VERSION:
        raise StellaError(f"{path} has version {version} and this program reads version {VERSION}; pack again")
    try:
        header = Header(**tree)
        counts = {len(header.ids), len(header.names), len(header.tasks), len(header.sound_crc32)}
        if counts == {0} or counts != {len(header.frames_crc32) // header.windows}:
            raise ValueError("ids, names, tasks and checksums differ in number")
        if len(header.frames) != 4 or not all(type(n) is int and n > 0 for n in (*header.frames, header.samples)):
            raise ValueError(f"frames={header.frames} and samples={header.samples} are no sizes")
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise StellaError(f"{path} does not describe packed clips ({error}); pack them again") from error
    return header

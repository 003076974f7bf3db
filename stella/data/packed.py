"""Clips as plain arrays in a folder: `stella pack` writes them once, and epochs read them at the speed of the disk.

`clips.json` holds shapes, ids and labels. `frames.u8` [N, K, T, 3, H, W], `waveforms.i16` [N, S] at 16 kHz and
`lengths.i64` [N] are raw rows, little-endian. The frames of a clip come from K windows spread evenly over it: training
draws one, evaluation takes the middle one. Waveforms are rounded to 16 bits. A folder being written is `….tmp`.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stella.clip import MIDDLE, Clip, Device, Labels, Origin, send
from stella.data.tasks import FilesConfig, recording_of
from stella.errors import StellaError
from stella.files import read_json
from stella.media.inputs import Inputs, derived

VERSION = 2
FRAMES, WAVEFORMS, LENGTHS = "frames.u8", "waveforms.i16", "lengths.i64"
SCALE = 32768  # a sample of 1.0
AHEAD = 3  # batches read, or on their way to a GPU, before they are used


@dataclass(frozen=True)
class PackedConfig(FilesConfig):
    """The clips have the sizes that they were packed for."""

    source: Literal["packed"] = "packed"  # arrays made by `stella pack`

    def open(self, evaluation: bool = False) -> "Packed":
        return Packed((self.eval_path if evaluation else self.path) or "")

    def inputs(self) -> Inputs:
        header = read_header(Path(self.path))
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


class Packed:
    """The clips of a folder that `pack` filled, in its order. Batches are read ahead by a thread."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.header = header = read_header(self.root)
        self._frames = self._open(FRAMES, "u1", len(self) * header.windows, *header.frames)  # [N * K, T, 3, H, W]
        self._waveforms = self._open(WAVEFORMS, "<i2", len(self), header.samples)
        self._lengths = torch.from_numpy(np.array(self._open(LENGTHS, "<i8", len(self))))
        self._reader = ThreadPoolExecutor(1)
        self._ahead: dict[tuple[object, ...], Future[tuple[Tensor, Tensor]]] = {}
        self._sent: deque[torch.cuda.Event] = deque()

    def __reduce__(self) -> tuple[type["Packed"], tuple[Path]]:
        return Packed, (self.root,)  # another process opens the files itself

    def __len__(self) -> int:
        return len(self.header.ids)

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index)

    def clip(self, index: int, window: float = MIDDLE) -> Clip:
        """The frames are those of the stored window nearest to `window`."""
        if not 0 <= index < len(self):
            raise IndexError(f"clip {index} of {len(self)}")
        samples = torch.from_numpy(self._waveforms[index, : int(self._lengths[index])].astype(np.float32))
        [row] = self._rows([index], [window])
        frames = torch.from_numpy(np.array(self._frames[row]))
        return Clip(self.header.ids[index], frames, samples / SCALE, self.labels(index))

    def origin(self, index: int) -> Origin:
        id = self.header.ids[index]
        return Origin(id, recording_of(id))

    def stamp(self, index: int) -> str:
        return f"{int(self._lengths[index])} samples"

    def labels(self, index: int) -> Labels:
        return Labels(self.header.names[index], self.header.tasks[index])

    def location(self, index: int) -> str:
        return f"{self.root}, {self.header.ids[index]}"

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
        if key in self._ahead:
            return
        while len(self._ahead) >= AHEAD:  # an abandoned stream never fetched them
            self._ahead.pop(next(iter(self._ahead)))
        pinned = torch.device(device).type == "cuda"  # pinned here: the thread must not call CUDA during a capture
        frames = torch.empty((len(indices), *self.header.frames), dtype=torch.uint8, pin_memory=pinned)
        waveforms = torch.empty((len(indices), self.header.samples), dtype=torch.int16, pin_memory=pinned)
        self._ahead[key] = self._reader.submit(self._read, rows, list(indices), frames, waveforms)

    def tensors(
        self, indices: Sequence[int], device: Device = "cpu", windows: Sequence[float] | None = None
    ) -> tuple[Tensor, Tensor]:
        self.expect(indices, device, windows)
        read = self._ahead.pop((torch.device(device), *self._rows(indices, windows))).result()
        frames, waveforms = (send(rows, device) for rows in read)
        if frames.is_cuda:
            self._sent.append(torch.cuda.current_stream().record_event())
            if len(self._sent) > AHEAD:  # wait, so that at most AHEAD batches occupy pinned memory
                self._sent.popleft().synchronize()
        return frames, waveforms.float() / SCALE

    def _read(self, rows: list[int], indices: list[int], frames: Tensor, waveforms: Tensor) -> tuple[Tensor, Tensor]:
        for array, which, into in ((self._frames, rows, frames), (self._waveforms, indices, waveforms)):
            np.take(array, which, 0, out=into.numpy(), mode="clip")  # the default mode would copy twice
        return frames, waveforms

    def _open(self, name: str, dtype: str, *shape: int) -> "np.ndarray[Any, Any]":
        path = self.root / name
        wanted = int(np.prod(shape)) * np.dtype(dtype).itemsize
        found = path.stat().st_size if path.is_file() else None
        if found != wanted:
            what = "is missing" if found is None else f"is damaged: it has {found} bytes instead of {wanted}"
            raise StellaError(f"{path} {what}; restore it, or delete the folder and pack again")
        return np.memmap(path, dtype, "r", shape=shape)


def read_header(root: Path) -> Header:
    path = root / "clips.json"
    if not path.is_file():
        raise StellaError(
            f"{root} holds no packed clips; make them with: stella pack {root} data.source=folder data.path=VIDEOS"
        )
    tree = read_json(path)
    version = tree.get("version") if isinstance(tree, dict) else None
    if version != VERSION:
        raise StellaError(f"{path} has version {version} and this program reads version {VERSION}; pack again")
    try:
        header = Header(**tree)
        if not len(header.ids) == len(header.names) == len(header.tasks) > 0:
            raise ValueError("ids, names and tasks differ in number")
    except (ValueError, TypeError) as error:
        raise StellaError(f"{path} does not describe packed clips ({error}); pack them again") from error
    return header

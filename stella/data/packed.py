"""Clips as plain arrays in a folder: `stella pack` writes it once, and epochs read it as fast as the disk gives it.

`clips.json` tells the shapes, ids and labels. `frames.u8` [N, T, 3, H, W], `waveforms.i16` [N, S] at 16 kHz and
`lengths.i64` [N] are raw rows, little-endian. Sixteen bits are what sound files hold; a source with finer samples
(scenes) is rounded to steps of 1/32768. A folder being written is `….tmp`, and gets its name once it is whole.
"""

import json
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stella.clip import Clip, Labels, send
from stella.errors import StellaError

VERSION = 1
FRAMES, WAVEFORMS, LENGTHS = "frames.u8", "waveforms.i16", "lengths.i64"
SCALE = 32768  # a sample of 1.0
AHEAD = 3  # batches that are read, or on their way to a GPU, before they are used


@dataclass(frozen=True)
class Header:
    """What `clips.json` holds. `pixels` and `spec_frames` are a model's sizes, for which the clips were packed."""

    version: int
    pixels: int
    spec_frames: int
    frames: list[int]  # [T, 3, H, W]
    samples: int
    ids: list[str] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    tasks: list[str | None] = field(default_factory=list)

    def rows(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of a clip's row in each array."""
        return {FRAMES: ("u1", tuple(self.frames)), WAVEFORMS: ("<i2", (self.samples,)), LENGTHS: ("<i8", ())}


class Packed:
    """The clips of a folder that `pack` filled, in its order. Batches are read ahead by a thread."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.header = read_header(self.root)
        arrays = {name: self._open(name, *row) for name, row in self.header.rows().items()}
        self._frames, self._waveforms = arrays[FRAMES], arrays[WAVEFORMS]
        self._lengths = torch.from_numpy(np.array(arrays[LENGTHS]))
        self._reader = ThreadPoolExecutor(1)
        self._ahead: dict[tuple[object, ...], Future[tuple[Tensor, Tensor]]] = {}
        self._sent: deque[torch.cuda.Event] = deque()

    def __reduce__(self) -> tuple[type["Packed"], tuple[Path]]:
        return Packed, (self.root,)  # another process opens the files for itself

    def __len__(self) -> int:
        return len(self.header.ids)

    def __getitem__(self, index: int) -> Clip:
        if not 0 <= index < len(self):
            raise IndexError(f"clip {index} of {len(self)}")
        samples = torch.from_numpy(self._waveforms[index, : int(self._lengths[index])].astype(np.float32))
        frames = torch.from_numpy(np.array(self._frames[index]))
        return Clip(self.header.ids[index], frames, samples / SCALE, self.labels(index))

    def labels(self, index: int) -> Labels:
        return Labels(self.header.names[index], self.header.tasks[index])

    def place(self, index: int) -> str:
        return f"{self.root}, {self.header.ids[index]}"

    def lengths(self, indices: Sequence[int]) -> Tensor:
        return self._lengths[list(indices)]

    def expect(self, indices: Sequence[int], device: torch.device | str = "cpu") -> None:
        key = (torch.device(device), *indices)
        if key in self._ahead:
            return
        while len(self._ahead) >= AHEAD:  # a stream that was left did not come for them
            self._ahead.pop(next(iter(self._ahead)))
        pinned = torch.device(device).type == "cuda"  # taken here: another thread must not call CUDA during a capture
        frames = torch.empty((len(indices), *self.header.frames), dtype=torch.uint8, pin_memory=pinned)
        waveforms = torch.empty((len(indices), self.header.samples), dtype=torch.int16, pin_memory=pinned)
        self._ahead[key] = self._reader.submit(self._read, np.array(indices), frames, waveforms)

    def tensors(self, indices: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        self.expect(indices, device)
        read = self._ahead.pop((torch.device(device), *indices)).result()
        frames, waveforms = (send(rows, device) for rows in read)
        if frames.is_cuda:
            self._sent.append(torch.cuda.current_stream().record_event())
            if len(self._sent) > AHEAD:  # the host has run far enough ahead: what it reads must stay in pinned memory
                self._sent.popleft().synchronize()
        return frames, waveforms.float() / SCALE

    def _read(self, rows: "np.ndarray[Any, Any]", frames: Tensor, waveforms: Tensor) -> tuple[Tensor, Tensor]:
        for array, into in ((self._frames, frames), (self._waveforms, waveforms)):
            np.take(array, rows, 0, out=into.numpy(), mode="clip")  # the default mode would copy twice
        return frames, waveforms

    def _open(self, name: str, dtype: str, row: tuple[int, ...]) -> "np.ndarray[Any, Any]":
        path, shape = self.root / name, (len(self), *row)
        wanted = int(np.prod(shape)) * np.dtype(dtype).itemsize
        found = path.stat().st_size if path.is_file() else None
        if found != wanted:
            what = "is missing" if found is None else f"is damaged: it has {found} bytes instead of {wanted}"
            raise StellaError(f"{path} {what}; bring it back, or delete the folder and pack the clips again")
        return np.memmap(path, dtype, "r", shape=shape)


def read_header(root: Path) -> Header:
    path = root / "clips.json"
    if not path.is_file():
        raise StellaError(
            f"{root} holds no packed clips; make such a folder with:"
            f" stella pack {root} data.source=folder data.path=VIDEOS"
        )
    try:
        header = Header(**json.loads(path.read_text(encoding="utf-8")))
        fits = header.version == VERSION and len(header.ids) == len(header.names) == len(header.tasks) > 0
    except (OSError, ValueError, TypeError) as error:
        raise StellaError(f"{path} does not describe packed clips ({error}); pack them again") from error
    if not fits:
        raise StellaError(
            f"{path} is of version {header.version}, or incomplete; this program reads version {VERSION}: pack again"
        )
    return header

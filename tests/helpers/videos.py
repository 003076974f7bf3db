"""Sources of made-up videos. They have a module of their own, with few imports, for worker processes to import."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stella.clip import Clip, Labels
from stella.errors import ClipError


@dataclass(frozen=True)
class Videos:
    """Clips of different lengths, with sound between the steps of sixteen bits.

    Some are bad, hang for ever, or kill their process: always, or once, if their file does not exist.
    """

    length: int
    task: str | None = None  # other tasks have other clips
    width: int = 18
    widths: int = 1  # how many different ones
    frames: int = 2
    bad: frozenset[int] = frozenset()
    hang: frozenset[int] = frozenset()
    deadly: frozenset[int] = frozenset()
    once: dict[int, Path] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Clip:
        if index in self.bad:
            raise ClipError(f"file{index}.mp4", ("no audio track", "not a media file")[index % 2], "leave it out")
        if index in self.hang:
            time.sleep(1000)
        if (flag := self.once.get(index)) and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if index in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        gen = torch.Generator().manual_seed(1000 * len(self.task or "") + index)
        shape = (self.frames, 3, 18, self.width + index % self.widths)
        video = torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8)
        audio = torch.rand(2000 + 700 * (index % 4), generator=gen) * 2 - 1
        return Clip(f"{self.task}/{index}", video, audio, Labels(f"c{index % 2}", self.task))

    def location(self, index: int) -> str:
        return f"file{index}.mp4"


class Batched(Videos):
    """The same clips, made many at once and only so."""

    def __getitem__(self, index: int) -> Clip:
        raise AssertionError("a batch source is asked for batches")

    def tensors(self, indices: Sequence[int], device: Any = "cpu") -> Any:
        clips = [Videos.__getitem__(self, index) for index in indices]
        sound = torch.stack([torch.nn.functional.pad(clip.audio, (0, 4100 - len(clip.audio))) for clip in clips])
        return torch.stack([clip.video for clip in clips]).to(device), sound.to(device)


class Long(Videos):
    """All frames tell the window that was asked for (0 … 80), and whether the clip is odd (100)."""

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index, 0.5)

    def clip(self, index: int, window: float) -> Clip:
        level = round(80 * window) + 100 * (index % 2)
        return replace(super().__getitem__(index), video=torch.full((2, 3, 18, 18), level, dtype=torch.uint8))

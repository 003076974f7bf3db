"""Sources of made-up videos. They have a module of their own, with few imports, for worker processes to import."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stella.clip import Clip, Labels
from stella.errors import ClipError


@dataclass(frozen=True)
class Videos:
    """Square or wide clips of different lengths, with sound between the steps of sixteen bits; some are bad."""

    length: int
    task: str | None = None
    width: int = 18
    bad: frozenset[int] = frozenset()
    hang: frozenset[int] = frozenset()
    frames: int = 2

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Clip:
        if index in self.bad:
            raise ClipError(f"file{index}.mp4", "no audio track", "leave it out")
        if index in self.hang:
            time.sleep(1000)
        gen = torch.Generator().manual_seed(1000 * len(self.task or "") + index)
        video = torch.randint(0, 256, (self.frames, 3, 18, self.width), generator=gen, dtype=torch.uint8)
        audio = (torch.rand(2000 + 700 * (index % 4), generator=gen) * 2 - 1).clamp(-1, 1)
        return Clip(f"{self.task}/{index}", video, audio, Labels(f"c{index % 2}", self.task))

    def location(self, index: int) -> str:
        return f"file{index}.mp4"


class Batched(Videos):
    """The same clips, made many at once: augmented as scenes are."""

    def tensors(self, indices: Sequence[int], device: Any = "cpu") -> Any:
        clips = [self[index] for index in indices]
        sound = torch.stack([torch.nn.functional.pad(clip.audio, (0, 4080 - len(clip.audio))) for clip in clips])
        return torch.stack([clip.video for clip in clips]).to(device), sound.to(device)


class Short(Videos):
    def __getitem__(self, index: int) -> Clip:
        clip = super().__getitem__(index)
        return replace(clip, audio=clip.audio[:100]) if index == 1 else clip


@dataclass(frozen=True)
class Long(Videos):
    """All frames tell the window that was asked for, and the clip."""

    def __getitem__(self, index: int) -> Clip:
        return self.clip(index, 0.5)

    def clip(self, index: int, window: float) -> Clip:
        level = round(80 * window) + 100 * (index % 2)
        return replace(super().__getitem__(index), video=torch.full((2, 3, 18, 18), level, dtype=torch.uint8))

"""Scenes as a source of clips, rendered as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stella.clip import BACKGROUND, SAMPLE_RATE, Clip, Device, Labels
from stella.data.scenes.classes import classes
from stella.data.scenes.draw import EASY, HARD, SLOTS, Draw, Variant, draw
from stella.data.scenes.picture import masks, pictures
from stella.data.scenes.sound import waveforms
from stella.errors import ConfigError

TENTHS = 10
Events = NDArray[np.bool_]  # [B, 10]
SPLITS = ("train", "validation", "eval")


@dataclass(frozen=True)
class SceneSize:
    pixels: int
    duration: float  # seconds
    frames: int = SLOTS
    variant: Variant = EASY

    @property
    def frame_times(self) -> Tensor:
        """Times of the sampled frames, in clip lengths: the middle of each slot."""
        return (torch.arange(self.frames) + 0.5) / self.frames

    @property
    def spec_frames(self) -> int:
        return round(self.duration * 100)


SIZES = {
    "scenes": SceneSize(96, 2.56),
    "scenes-hard": SceneSize(96, 2.56, variant=HARD),
    "scenes-full": SceneSize(224, 10.24),
    "scenes-full-hard": SceneSize(224, 10.24, variant=HARD),
}


class Scenes:
    """One task's clips of one split. `scenes[i]` is a function of (seed, task, split, i) alone."""

    def __init__(self, task: str, split: str, length: int, *, size: str = "scenes", seed: int = 0) -> None:
        if size not in SIZES:
            raise ConfigError(f"unknown scenes size {size!r}; choose one of {', '.join(SIZES)}")
        classes(task)  # refuses an unknown task
        if split not in SPLITS:
            raise ConfigError(f"unknown split {split!r} of scenes; choose one of {', '.join(SPLITS)}")
        if length < 1:
            raise ConfigError(f"scenes need at least one clip, not {length}")
        self.task, self.split, self.size, self.seed = task, split, SIZES[size], seed
        self._length, self.size_name = length, size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Clip:
        if not 0 <= index < self._length:
            raise IndexError(f"clip {index} of {self._length}")
        d, device = self.draw([index]), torch.device("cpu")
        picture = pictures(d, self.size.frame_times, self.size.pixels, device)
        audio = waveforms(d, self.size.duration, SAMPLE_RATE, device)
        return Clip(self.id(index), picture.frames[0], audio[0], self._labels(d, picture.mask))

    def id(self, index: int) -> str:
        return f"{self.size_name}/{self.seed}/{self.task}/{self.split}/{index:06d}"

    def labels(self, index: int) -> Labels:
        """`scenes[i].labels`, without rendering the clip."""
        d = self.draw([index])
        return self._labels(d, masks(d, self.size.frame_times, self.size.pixels))

    def class_of(self, index: int) -> str:
        return self._classes[index]

    @cached_property
    def _classes(self) -> list[str]:
        return [classes(self.task)[int(label)].name for label in self.draw(range(len(self))).label]

    def _labels(self, d: Draw, mask: Tensor) -> Labels:
        name = classes(self.task)[int(d.label[0])].name
        return Labels(name, self.task, mask[0], torch.from_numpy(events(d)[0]))

    def draw(self, indices: Sequence[int]) -> Draw:
        return draw(self.seed, self.task, self.split, indices, self.size.variant)

    def tensors(self, indices: Sequence[int], device: Device = "cpu") -> tuple[Tensor, Tensor]:
        """Frames uint8 [B, T, 3, N, N] and waveforms float32 [B, S]."""
        device = torch.device(device)
        chunk = 4 if device.type == "cpu" else 128  # fits the CPU's cache or the GPU's memory
        draws = [self.draw(indices[start : start + chunk]) for start in range(0, len(indices), chunk)]
        frames = [pictures(d, self.size.frame_times, self.size.pixels, device).frames for d in draws]
        return torch.cat(frames), torch.cat([waveforms(d, self.size.duration, SAMPLE_RATE, device) for d in draws])

    def film(self, index: int, fps: float = 25) -> Tensor:
        """All frames of a clip at a rate to watch, uint8 [N, 3, H, W]; the sampled frames are among them."""
        d = self.draw([index])
        times = torch.arange(round(self.size.duration * fps)) / (self.size.duration * fps)
        parts = [times[i : i + 16] for i in range(0, len(times), 16)]
        return torch.cat([pictures(d, t, self.size.pixels, torch.device("cpu")).frames[0] for t in parts])


class SceneSegments:
    """The tenths of scenes as clips of their own: clip 10·i + k is tenth k of scene i, with frames of its own.

    Its sound is the tenth's, silence before and after it. Its class is the scene's where the object sounds, else
    `BACKGROUND`.
    """

    def __init__(self, scenes: Scenes) -> None:
        self.scenes = scenes
        self._events: Events | None = None

    def __len__(self) -> int:
        return TENTHS * len(self.scenes)

    def __getitem__(self, index: int) -> Clip:
        frames, audio = self.tensors([index])
        return Clip(f"{self.scenes.id(index // TENTHS)}/{index % TENTHS}", frames[0], audio[0], self.labels(index))

    def labels(self, index: int) -> Labels:
        return Labels(self.class_of(index), self.scenes.task)

    def class_of(self, index: int) -> str:
        scene, tenth = divmod(index, TENTHS)
        if self._events is None:
            self._events = events(self.scenes.draw(range(len(self.scenes))))
        return self.scenes.class_of(scene) if self._events[scene, tenth] else BACKGROUND

    def tensors(self, indices: Sequence[int], device: Device = "cpu") -> tuple[Tensor, Tensor]:
        size, device = self.scenes.size, torch.device(device)
        times = ((torch.arange(TENTHS)[:, None] + size.frame_times) / TENTHS).flatten()  # [10 T]
        wanted = list(dict.fromkeys(index // TENTHS for index in indices))
        made = [self._tenths(self.scenes.draw([scene]), times, device) for scene in wanted]
        frames, audio = (torch.cat(column) for column in zip(*made, strict=True))
        rows = [TENTHS * wanted.index(index // TENTHS) + index % TENTHS for index in indices]
        return frames[rows], audio[rows]

    def _tenths(self, d: Draw, times: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        size = self.scenes.size
        frames = pictures(d, times, size.pixels, device).frames[0]
        frames = frames.view(TENTHS, size.frames, *frames.shape[1:])
        sound = waveforms(d, size.duration, SAMPLE_RATE, device)[0]
        tenth = len(sound) // TENTHS
        audio = sound.new_zeros(TENTHS, len(sound))
        first = (len(sound) - tenth) // 2
        audio[:, first : first + tenth] = sound[: TENTHS * tenth].view(TENTHS, tenth)
        return frames, audio


def events(d: Draw) -> Events:
    """Which tenths of each clip the sounding object sounds in for at least a quarter of their time, [B, 10]."""
    start = np.arange(TENTHS) / TENTHS
    begin, end = d.onset[:, :, None], (d.onset + d.length)[:, :, None]
    overlap = np.minimum(end, start + 1 / TENTHS) - np.maximum(begin, start)  # [B, 2, 10]
    return np.asarray((overlap.clip(0).sum(1) * TENTHS) >= 0.25)

"""How a file becomes what a model takes. A weight file stores this beside its tensors."""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from stella.errors import ConfigError
from stella.media.augment import center_crop
from stella.media.decode import Plan
from stella.media.fbank import MEAN, SHIFT, STD, fbank

PER_SECOND = 16_000 // SHIFT  # time steps of a spectrogram
PATCH = 16  # time steps of a patch of the spectrogram


@dataclass(frozen=True)
class Inputs:
    """The defaults are the paper's. Pixels are normalised by the model itself."""

    duration: float = 10.24  # seconds of a clip
    pixels: int = 224  # width and height of a frame as the model takes it
    size: int = 256  # short side of a frame as it is decoded, before the centre square becomes `pixels` wide
    frames: int = 4  # of a clip
    span: float | None = 4.0  # seconds in the middle of a clip that the frames come from; none: the whole clip
    spec_frames: int = 1024  # time steps of the spectrogram
    mels: int = 128
    mean: float = MEAN  # of the log-mel values, subtracted …
    std: float = STD  # … and divided by

    def __post_init__(self) -> None:
        for name in ("duration", "pixels", "size", "frames", "spec_frames", "mels", "std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"inputs.{name}={getattr(self, name)} must be above 0")
        self.plan()

    @property
    def seconds(self) -> float:
        """How much sound a spectrogram shows."""
        return self.spec_frames / PER_SECOND

    def plan(self, start: float = 0.0) -> Plan:
        """The clip that begins at `start` seconds of a file, for `decode`."""
        return Plan(start, self.duration, self.frames, self.size, self.span)

    def crop(self, video: Tensor) -> Tensor:
        """uint8 [B, T, 3, H, W] → [B, T, 3, pixels, pixels], as evaluation crops."""
        return center_crop(video, self.pixels)

    def resized(self, pixels: int, spec_frames: int) -> "Inputs":
        """The same for a model of larger inputs."""
        size, duration = self.size * pixels / self.pixels, self.duration * spec_frames / self.spec_frames
        return replace(self, pixels=pixels, size=round(size), spec_frames=spec_frames, duration=duration)

    def spectrogram(self, waveforms: Tensor, lengths: Tensor | None = None) -> Tensor:
        """[B, S] at 16 kHz → [B, spec_frames, mels]; `lengths` [B] says where padding begins, as in `fbank`."""
        spec = fbank(waveforms, lengths, frames=self.spec_frames, mels=self.mels, normalise=False)
        return (spec - self.mean) / self.std


def time_steps(duration: float) -> int:
    """The time steps of the spectrogram of so many seconds, in whole patches: 1024 for 10.24, 304 for 3."""
    return -(-round(duration * PER_SECOND) // PATCH) * PATCH


def with_margin(pixels: int) -> int:
    """The short side to decode for crops of `pixels` that can move: 256 for 224."""
    return -(-pixels * 8 // 7)


def derived(pixels: int, spec_frames: int, frames: int, mels: int = 128) -> Inputs:
    """The inputs of a model of which only the sizes are known: with the paper's span, decoded with a margin."""
    duration = spec_frames / PER_SECOND
    return Inputs(duration, pixels, with_margin(pixels), frames, spec_frames=spec_frames, mels=mels)

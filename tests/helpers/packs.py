"""Clips packed as arrays, for the tests of what writes and of what reads them."""

from pathlib import Path
from typing import Any

import torch

from stella.clip import Clip
from stella.data.pack import pack
from stella.data.packed import Packed
from stella.data.stream import StreamConfig

CONFIG = StreamConfig(batch_size=4, epochs=2, size=16, spec_frames=24, mels=8, seed=3)


def packed(root: Path, clips: Any, **more: Any) -> Packed:
    sizes = {"pixels": 16, "spec_frames": 24, "size": 18, "workers": 0, "progress": False}
    pack(clips, root, **sizes | more)
    return Packed(root)


def close(ours: Clip, theirs: Clip, samples: int = 4080) -> bool:
    """The same clip, its sound rounded to sixteen bits and cut to what filterbanks look at."""
    cut = theirs.audio[:samples]
    alike = torch.equal(ours.video, theirs.video) and ours.audio.shape == cut.shape
    return alike and (ours.audio - cut).abs()[cut < 0.9999].max().item() <= 0.501 / 32768


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def levels(video: torch.Tensor) -> list[int]:
    return [int(level) for level in video[:, 0, 0, 0, 0]]

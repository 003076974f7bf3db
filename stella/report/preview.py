"""Previews of scenes: a contact sheet, and a film with sound."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stella.data.scenes.source import Scenes
from stella.report.sheet import contact_sheet


def sheet(scenes: Scenes, indices: Sequence[int], path: Path) -> None:
    """Write these clips as a contact sheet."""
    title = f"{scenes.size_name} · {scenes.task} · {scenes.split} · seed {scenes.seed}"
    contact_sheet([scenes[i] for i in indices], path, title, scenes.size.frame_times * scenes.size.duration)


def film(scenes: Scenes, indices: Sequence[int], path: Path, fps: int = 25) -> None:
    """Write these clips one after another as an mp4, small ones enlarged."""
    from stella.media.encode import encode

    zoom = max(1, 384 // scenes.size.pixels)
    frames: list[Tensor] = []
    for index in indices:
        shown = scenes.film(index, fps)
        frames.append(shown.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3))
    _, sound = scenes.tensors(list(indices))
    encode(path, torch.cat(frames), sound.flatten(), fps)

"""Writes scenes as ordinary files: an mp4 (H.264 and AAC) and a JSON for each clip."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stella.data.scenes.source import SIZES, SPLITS, Scenes
from stella.files import write_json
from stella.media.encode import encode

FPS = 25  # the sampled frames of every size fall on whole frames at this rate
NAME = re.compile(rf"({'|'.join(SIZES)})-\d+-[\w-]+-({'|'.join(SPLITS)})-\d{{6}}", re.ASCII)


def run_lengths(mask: Tensor) -> list[int]:
    """Run-length encoding of a mask [H, W], row by row; the first run is outside the mask and may be 0."""
    values, lengths = torch.unique_consecutive(mask.flatten(), return_counts=True)
    runs: list[int] = lengths.tolist()
    return [0, *runs] if values[0] else runs


def is_scene(path: Path | str) -> bool:
    """Whether a file, or a clip that was made of one, has a name that `export` gives."""
    return NAME.match(Path(path).name) is not None


def export(scenes: Scenes, folder: Path) -> Iterator[Path]:
    """Write every clip as `CLASS/ID.mp4` and `.json`; yields each path once it is written. Existing files are kept."""
    for index in range(len(scenes)):
        clip = scenes[index]
        assert clip.labels.name is not None and clip.labels.events is not None and clip.labels.mask is not None
        path = folder / clip.labels.name.replace("→", "-to-").replace(", ", "_") / f"{clip.id.replace('/', '-')}.mp4"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {
                "id": clip.id,
                "class": clip.labels.name,
                "task": clip.labels.task,
                "events": clip.labels.events.int().tolist(),
                "mask": [run_lengths(frame) for frame in clip.labels.mask],
                "duration": scenes.size.duration,
            }
            write_json(path.with_suffix(".json"), about)
            encode(path, scenes.film(index, FPS), clip.audio, FPS)
        yield path

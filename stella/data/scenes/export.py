"""Scenes as ordinary files: an mp4 (H.264 and AAC) with a JSON beside it, for every tool that reads videos."""

import json
from collections.abc import Iterator
from pathlib import Path

from stella.data.scenes.source import Scenes

FPS = 25  # the sampled frames of every size fall on whole frames at this rate


def export(scenes: Scenes, folder: Path) -> Iterator[Path]:
    """Write every clip as `CLASS/ID.mp4` and `.json`; yields each path when it is whole. What exists is left alone."""
    from stella.media.encode import encode

    for index in range(len(scenes)):
        clip = scenes[index]
        assert clip.labels.name is not None and clip.labels.events is not None
        path = folder / clip.labels.name.replace("→", "-to-").replace(", ", "_") / f"{clip.id.replace('/', '-')}.mp4"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {
                "id": clip.id,
                "class": clip.labels.name,
                "task": clip.labels.task,
                "events": clip.labels.events.int().tolist(),
                "duration": scenes.size.duration,
            }
            path.with_suffix(".json").write_text(json.dumps(about, ensure_ascii=False) + "\n", encoding="utf-8")
            encode(path, scenes.film(index, FPS), clip.audio, FPS)
        yield path

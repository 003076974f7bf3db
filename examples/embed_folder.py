"""Embed a folder of videos and find the moment of any of them that fits a sound.

python examples/embed_folder.py VIDEOS SOUND [MODEL]
"""

import sys
from pathlib import Path

import torch

import stella
from stella.errors import ClipError


def main(folder: Path, sound: Path, name: str = "base-small") -> None:
    model = stella.load(name)
    moments: list[tuple[Path, float]] = []
    vectors: list[torch.Tensor] = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            found = model.embed_video(path, overlap=0.5)
        except ClipError as error:  # says what is wrong and what to do
            print(f"skipped {error}")
            continue
        vectors.append(found.vectors)
        moments += [(path, start) for start in found.start.tolist()]
    query = model.embed_audio(sound).vectors.mean(0)
    scores = torch.cat(vectors) @ query
    best = scores.topk(min(5, len(scores)))
    for score, row in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        path, start = moments[row]
        print(f"{score:6.3f}  {path.name} at {start:.1f} s")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} VIDEOS SOUND [MODEL]")
    main(*map(Path, sys.argv[1:3]), *sys.argv[3:4])

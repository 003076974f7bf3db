"""Make a folder searchable, then find the moments that fit a sound: python search_folder.py FOLDER SOUND [MODEL]

The index goes beside the folder, as FOLDER.index. The second run embeds only what has changed.
"""

import sys
from pathlib import Path

import stella


def main(folder: str, sound: str, model: str = "base-small") -> None:
    index = stella.Index(Path(f"{folder}.index"))
    print(index.update(folder, model=model))
    for bad in index.bad():
        print(f"left out: {bad.file}: {bad.reason}")

    found = index.search(sound, k=5)  # a sound asks for pictures; `to="audio"` for sounds like it
    for hit in found.hits:
        print(f"{hit.score:.3f}  {hit.path}  {hit.start:.1f}–{hit.end:.1f} s")

    if found.hits:  # more like the best one: by its pictures, among pictures
        for hit in index.search(index.vector(found.hits[0]), k=3, to="video").hits[1:]:
            print(f"alike  {hit.path}  {hit.start:.1f} s")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} FOLDER SOUND [MODEL]")
    main(*sys.argv[1:])

"""The vectors of many files in one file, for other programs."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from stella.data.folder import MEDIA_SUFFIXES, find_videos
from stella.embed.model import Embeddings, Model
from stella.errors import ClipError, StellaError, number_of
from stella.files import whole
from stella.media.windows import KINDS


def media_files(given: Sequence[Path], suffixes: Sequence[str] = MEDIA_SUFFIXES) -> list[Path]:
    """The files themselves, and those with these suffixes below folders, each once."""
    found = [[path / name for name in find_videos(path, suffixes)] if path.is_dir() else [path] for path in given]
    return list(dict.fromkeys(file for files in found for file in files))


Both = tuple[Embeddings | None, Embeddings | None]


def embed_each(model: Model, files: Sequence[Path], **how: Any) -> Iterator[tuple[Path, Both | ClipError]]:
    """The embeddings of each file's picture and sound, or why there are none; `how` is of `Model.embed_both`."""
    for file in files:
        try:
            yield file, model.embed_both(file, **how)
        except ClipError as error:
            yield file, error


class Collected:
    """Rows of vectors on their way to `out`, which `write` makes: a row for the picture or sound of one window.

    Arrays: `vectors` float32 [N, D], `start` and `end` float64 [N] in seconds, `file_index` [N] into `files`, `kind`
    int64 [N], 0 for video and 1 for audio. `files` and the model's `fingerprint` are arrays of an npz and metadata of a
    safetensors file.
    """

    def __init__(self, out: Path) -> None:
        if out.suffix not in (".npz", ".safetensors"):
            raise StellaError(f"{out} must end in .npz or .safetensors: these are what vectors are written as")
        out.parent.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.files: list[str] = []
        self.parts: list[tuple[int, int, Embeddings]] = []

    def add(self, file: Path, *both: Embeddings | None) -> None:
        """The embeddings of a file's picture and sound."""
        self.parts += [(len(self.files), kind, each) for kind, each in enumerate(both) if each is not None]
        self.files.append(str(file))

    def write(self, model: Model) -> str:
        """Write everything; returns what there is, in words."""
        tensors = {
            name: torch.cat([getattr(each, name) for *_, each in self.parts]) for name in ("vectors", "start", "end")
        }
        counts = [(file, kind, len(each)) for file, kind, each in self.parts]
        for name, column in (("file_index", 0), ("kind", 1)):
            tensors[name] = torch.cat([torch.full((row[2],), row[column]) for row in counts])
        with whole(self.out) as fresh:
            if self.out.suffix == ".npz":
                arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
                with fresh.open("wb") as stream:
                    np.savez(stream, **arrays, files=np.array(self.files), fingerprint=np.array(model.fingerprint))
            else:
                about = {"files": json.dumps(self.files), "fingerprint": model.fingerprint, "kinds": json.dumps(KINDS)}
                fresh.write_bytes(safetensors.torch.save(tensors, about))
        windows = [sum(count for _, kind, count in counts if kind == number) for number in range(len(KINDS))]
        return f"{number_of(windows[0], 'window')} of video and {windows[1]:,} of sound"

"""Embeddings of the clips that are set aside, by key."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stella.embed.translate import Measured
from stella.errors import StellaError
from stella.evaluate.retrieval import Embeddings

Vectors = dict[str, tuple[Tensor, Tensor]]  # of sound and picture


def write_vectors(path: Path, found: Vectors, state: str) -> None:
    rows = rows_of(found, list(found))
    Measured(state, list(found), rows.a, rows.v).write(path)


def read_vectors(path: Path) -> Vectors:
    found = Measured.read(path)
    return {key: (a, v) for key, a, v in zip(found.keys, found.a, found.v, strict=True)}


def known_vectors(path: Path) -> Vectors | None:
    """None if there are none, or if they are damaged: they are computed again."""
    try:
        return read_vectors(path)
    except (FileNotFoundError, StellaError):
        return None


def rows_of(found: Vectors, keys: Sequence[str]) -> Embeddings:
    """The embeddings of these clips; their ids are their positions."""
    a, v = (torch.stack([found[key][n] for key in keys]) if keys else torch.empty(0, 1) for n in (0, 1))
    return Embeddings(a, v, torch.arange(len(keys)))

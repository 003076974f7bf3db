"""Queries for vectors of another version: after new lessons, the vectors of an index are stale.

An orthogonal map carries embeddings of the new version into the space of the old one. It is fitted on clips that both
versions have embedded: orthogonal Procrustes (Schönemann, 1966), R = U Vᵀ from the singular value decomposition of
newᵀ old. Sounds and pictures share one space, so both are fitted together. Unit vectors stay unit vectors, and the
map back is the transpose.
"""

from pathlib import Path

import torch
from torch import Tensor

from stella.errors import StellaError
from stella.learn.home import Home

LEAST = 32  # clips to fit on: fewer turn the space towards themselves alone


def procrustes(new: Tensor, old: Tensor) -> Tensor:
    """The orthogonal R [D, D] that minimises ‖new R − old‖, for the same clips by both versions, [N, D] each."""
    if new.shape != old.shape:
        raise StellaError(f"{list(new.shape)} and {list(old.shape)} are not the same clips; embed the same by both")
    u, _, vh = torch.linalg.svd(new.double().T @ old.double())
    rotation: Tensor = u @ vh
    return rotation.to(new.dtype)


def translation(home: Home | Path | str, to: int) -> Tensor:
    """R that carries embeddings by the state in use into the space of round `to`: `query @ R`. Its transpose goes back.

    It is fitted on the held-out clips that both states have embedded, sounds and pictures together.
    """
    home = home if isinstance(home, Home) else Home(home)
    here = home.current
    if not 1 <= to <= here or not home.round(to).embeddings.exists():
        raise StellaError(f"{home.root} has no embeddings of round {to}; its rounds are 1 to {here}")
    old, new = (torch.load(home.round(n).embeddings, map_location="cpu", weights_only=True) for n in (to, here))
    rows = {key: i for i, key in enumerate(old["keys"])}
    both = [(i, rows[key]) for i, key in enumerate(new["keys"]) if key in rows]
    if len(both) < LEAST:
        raise StellaError(f"{len(both)} clips are known to rounds {to} and {here} and a translation needs {LEAST}")
    i, j = (torch.tensor(each) for each in zip(*both, strict=True))
    return procrustes(torch.cat([new["a"][i], new["v"][i]]), torch.cat([old["a"][j], old["v"][j]]))

"""Queries for vectors of another state of the same learner: after new lessons, the vectors of an index are stale.

An orthogonal map carries embeddings of the new state into the space of the old one. It is fitted on clips that both
states have embedded: orthogonal Procrustes (Schönemann, 1966), R = U Vᵀ from the singular value decomposition of
newᵀ old. Sounds and pictures share one space, so both are fitted together. Unit vectors stay unit vectors, and the
map back is the transpose.

A learner leaves these embeddings in HOME/rounds/*/embeddings.pt, each with the fingerprint of its state; those of
states that were rolled back are in HOME/undone.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from stella.errors import StellaError
from stella.files import write_bytes

LEAST = 16  # clips to fit on
PRIOR = 1.0  # weight of "nothing has turned" against the clips: states of a learner differ little (results/learner)


@dataclass(frozen=True)
class Measured:
    """What one state of a learner makes of clips that are set aside."""

    fingerprint: str
    keys: list[str]  # of the clips
    a: Tensor  # float32 [N, D], unit vectors
    v: Tensor

    def write(self, path: Path) -> None:
        buffer = io.BytesIO()
        torch.save({"fingerprint": self.fingerprint, "keys": self.keys, "a": self.a, "v": self.v}, buffer)
        write_bytes(path, buffer.getvalue())

    @classmethod
    def read(cls, path: Path) -> "Measured":
        try:
            tree = torch.load(path, map_location="cpu", weights_only=True)
            return cls(tree.get("fingerprint", ""), tree["keys"], tree["a"], tree["v"])
        except OSError:
            raise
        except Exception as error:  # torch has many for a file that is not its own
            raise StellaError(f"{path} is damaged; delete it: vectors of that state are not translated") from error

    def both(self, keys: Sequence[str]) -> Tensor:
        """Sounds and pictures of these clips, [2 N, D]."""
        rows = {key: i for i, key in enumerate(self.keys)}
        chosen = [rows[key] for key in keys]
        return torch.cat([self.a[chosen], self.v[chosen]])


def procrustes(new: Tensor, old: Tensor, prior: float = 0.0) -> Tensor:
    """The orthogonal R [D, D] that minimises ‖new R − old‖² + prior N ‖R − 1‖² / D, for rows of both states, [N, D]."""
    if new.shape != old.shape:
        raise StellaError(f"{list(new.shape)} and {list(old.shape)} are not the same clips; embed the same by both")
    n, dim = new.shape
    same = prior * n / dim * torch.eye(dim, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(new.double().T @ old.double() + same)
    rotation: Tensor = u @ vh
    return rotation.to(new.dtype)


def is_learner(name: Path | str) -> bool:
    return (Path(name) / "home.json").is_file()


def state_in_use(home: Path | str) -> str:
    """The fingerprint of a learner's state in use; empty if it is not known."""
    return _fingerprint(Path(home) / "current" / "embeddings.pt")


def moved(home: Path | str, fingerprint: str) -> str:
    """Where a learner went from a state that is not in use any more, in words."""
    number = int((Path(home) / "current").readlink().name)
    back = any(_fingerprint(path) == fingerprint for path in Path(home).glob("undone/*/embeddings.pt"))
    if back and not any(_fingerprint(path) == fingerprint for path in Path(home).glob("rounds/*/embeddings.pt")):
        return f"the learner went back to round {number}"
    return f"the learner has gone on learning (round {number})"


def kept_weights(home: Path | str, fingerprint: str) -> Path | None:
    """The weights of a state of a learner, which keeps those of its last rounds; None if they are gone."""
    for path in _states(home):
        file = path.with_name("model.safetensors")
        if file.exists() and _fingerprint(path) == fingerprint:
            return file
    return None


def has_state(home: Path | str, fingerprint: str) -> bool:
    """Whether a learner, wherever its folder is now, has been in that state."""
    return is_learner(home) and any(_fingerprint(path) == fingerprint for path in _states(home))


def _fingerprint(path: Path) -> str:
    """Of the state that embedded what is in this file, which is read once; empty if it cannot be read."""
    try:
        status = path.stat()
        return _read_fingerprint(path.resolve(), status.st_mtime_ns, status.st_size)
    except (OSError, StellaError):
        return ""


@lru_cache(maxsize=1024)
def _read_fingerprint(path: Path, mtime: int, size: int) -> str:
    return Measured.read(path).fingerprint


def _states(home: Path | str) -> list[Path]:
    """The files of what each state of a learner has embedded: later rounds first, also those that were rolled back."""
    paths = [path for folder in ("rounds", "undone") for path in Path(home).glob(f"{folder}/*/embeddings.pt")]
    return sorted(paths, key=lambda path: path.parts[-2], reverse=True)


def translation(home: Path | str, query: str, to: str) -> Tensor:
    """R that carries embeddings by one state of a learner into the space of another: `query @ R`.

    States are named by the fingerprints of their models. Where two have too few clips in common, the way leads over
    states between them.
    """
    between: list[Measured] = []  # from the later of the two states back to the earlier one
    for found in map(Measured.read, _states(home)):
        if between or found.fingerprint in (query, to):
            between.append(found)
        # a round that trained on nothing has measured the same state again
        if found.fingerprint in (query, to) and found.fingerprint != between[0].fingerprint:
            break
    else:
        raise StellaError(f"{home} has not kept how its states {query[:12]} and {to[:12]} embed the same clips")
    turn = _along(home, between)
    return turn if between[0].fingerprint == query else turn.T


def _along(home: Path | str, between: Sequence[Measured]) -> Tensor:
    turn, here = torch.eye(between[0].a.shape[1]), 0
    while here < len(between) - 1:
        far = next(
            (n for n in range(len(between) - 1, here, -1) if len(_common(between[here], between[n])) >= LEAST), 0
        )
        if not far:
            raise StellaError(f"{home} has measured with too few clips to translate; {LEAST} are needed")
        keys = _common(between[here], between[far])
        turn = turn @ procrustes(between[here].both(keys), between[far].both(keys), PRIOR)
        here = far
    return turn


def _common(one: Measured, other: Measured) -> list[str]:
    known = set(other.keys)
    return [key for key in one.keys if key in known]

"""Checkpoints that are whole or not there.

A checkpoint is written under a temporary name, forced to the disk and renamed; its name ends with the hash of its
content, so that a file damaged by a kill, a full disk or a bad disk is recognised and never loaded.

One process writes a file, `step-00000120-HASH.pt`. Several write a folder, `step-00000120-HASH.dcp`, each a part of it
(`train/parts.py`). Both have the same content, and any number of processes reads either.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from stella.errors import StellaError
from stella.files import publish, sweep, temporary
from stella.peers import ALONE, Peers
from stella.train import parts

State = dict[str, Any]


class Checkpoints:
    """The newest `keep` checkpoints of a run, in a folder of their own."""

    def __init__(self, folder: Path, keep: int = 2, peers: Peers = ALONE) -> None:
        self.folder, self.keep, self.peers = folder, keep, peers
        self.damaged: list[Path] = []  # renamed by `load`

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove old ones. If writing fails, existing checkpoints stay."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            if self.peers.count > 1:
                path = parts.write(self.folder, f"step-{step:08d}", state, self.peers)
                if self.peers.first:
                    self._remove_older(path)
                return path
            with temporary(self.folder / f"step-{step:08d}") as fresh:
                with fresh.open("wb") as file:
                    writer = _Writer(file)
                    torch.save(_compact(state), cast("IO[bytes]", writer))
                    writer.finish()
                path = self.folder / f"step-{step:08d}-{writer.digest}.pt"
                publish(fresh, path)
        except OSError as error:
            raise StellaError(
                f"checkpoint of step {step} cannot be written to {self.folder} ({error.strerror}); nothing earlier is "
                "lost: free some space and continue with --resume"
            ) from error
        self._remove_older(path)
        return path

    def _remove_older(self, newest: Path) -> None:
        for old in [other for other in self._found() if other != newest][self.keep - 1 :]:
            parts.remove(old)

    def load(self) -> State | None:
        """The newest intact checkpoint, on the CPU; None if there is none. Damaged ones are renamed to `.broken`.

        Its tensors are memory-mapped: copy what is kept, or the deleted file still occupies the disk.
        """
        path = self.peers.tell(self._intact() if self.peers.first else None)[0]
        if path is None:
            return None
        if path.is_dir():
            return parts.read(path)
        state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state

    def _intact(self) -> Path | None:
        """The newest one that is not damaged."""
        if self.folder.is_dir():
            sweep(self.folder)
            parts.sweep(self.folder)
        for path in self._found():
            if (parts.digest(path) if path.is_dir() else digest(path)) == path.stem.rpartition("-")[2]:
                return path
            self.damaged.append(path.rename(path.with_suffix(".broken")))
        if broken := sorted(self.folder.glob("step-*.broken")):
            raise StellaError(
                f"all checkpoints in {self.folder} are damaged ({', '.join(path.name for path in broken)}), so the run "
                "cannot resume; check the disk, and start a new run in another folder"
            )
        return None

    def _found(self) -> list[Path]:
        """Files and folders named like a checkpoint, newest first."""
        files = [*self.folder.glob("step-*.pt"), *self.folder.glob("step-*.dcp")]
        named = [path for path in files if re.fullmatch(r"step-\d{8,}-[0-9a-f]{16}", path.stem)]
        return sorted(named, key=lambda path: (int(path.stem.split("-")[1]), path.stat().st_mtime_ns), reverse=True)


def size_of(path: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _compact(tree: Any) -> Any:
    """The same tree with views copied: torch.save would write the whole storage of a view."""
    if isinstance(tree, Mapping):
        return {key: _compact(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_compact(value) for value in tree]
    if isinstance(tree, Tensor) and tree.untyped_storage().nbytes() > tree.numel() * tree.element_size():
        return tree.clone()
    return tree


class _Writer:
    """A file that hashes what it writes and defers errors to `finish`: torch.save does not survive exceptions."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hashed = hashlib.sha256()
        self._error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self._error is None:
            try:
                self._file.write(data)
                self._hashed.update(data)
            except OSError as error:
                self._error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        if self._error is not None:
            raise self._error

    @property
    def digest(self) -> str:
        return self._hashed.hexdigest()[:16]

"""Checkpoints that are whole or not there.

A checkpoint is written under a temporary name, forced to the disk and renamed; its name ends with the hash of its
content, so that a file damaged by a kill, a full disk or a bad disk is recognised and never loaded.

One process writes a file, `step-00000120-HASH.pt`. Several write a folder, `step-00000120-HASH.dcp`, each a part of it
(`train/dcp.py`). Both have the same content, and any number of processes reads either.

A run goes on while a checkpoint is written: `begin` copies the state, and a thread writes the copy.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from stella.errors import StellaError
from stella.files import file_hash, publish, sweep, temporary
from stella.peers import ALONE, Peers
from stella.train import dcp
from stella.train.device import free_bytes

State = dict[str, Any]
GONE = 60.0  # seconds after which processes that do not answer are no longer waited for, when a run ends by an error


class DamagedError(StellaError):
    """There are checkpoints, and all of them are damaged."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that is on the disk."""

    step: int
    path: Path
    seconds: float  # from its beginning


class Checkpoints:
    """The newest `keep` checkpoints of a run, in a folder of their own."""

    def __init__(self, folder: Path, keep: int = 2, peers: Peers = ALONE) -> None:
        self.folder, self.keep, self.peers = folder, keep, peers
        self.damaged: list[Path] = []  # renamed by `load`
        self._writing: _Writing | None = None

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove old ones. If writing fails, existing checkpoints stay."""
        return self._write(step, state, self.peers)

    def begin(self, step: int, state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint as `save` does, of the state as it is now; `finished` tells when it is written.

        Where main memory has no room for a copy, this waits until it is written.
        """
        assert self._writing is None, "one at a time: ask `finished` for the one before"
        peers = self.peers.aside
        room = 2 * peers.neighbours * _size(state) < free_bytes("cpu")
        copy = copied(state) if room else state
        self._writing = _Writing(step, lambda: self._write(step, fetched(copy), peers))
        if not room:
            self._writing.join()

    def finished(self, wait: bool) -> Written | None:
        """What was begun, once it is written; None if there is none yet. Raises what prevented it."""
        writing = self._writing
        if writing is None or (writing.is_alive() and not wait):
            return None
        writing.join()
        self._writing = None
        return writing.result()

    def close(self) -> None:
        """Wait for what is being written, whatever becomes of it; not forever for processes that may be gone."""
        if self._writing is not None:
            self._writing.join(None if self.peers.count == 1 else GONE)

    def _write(self, step: int, state: Mapping[str, Any], peers: Peers) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            if peers.count > 1:
                path = dcp.write(self.folder, f"step-{step:08d}", state, peers)
                if peers.first:
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
            dcp.remove(old)

    def load(self) -> State | None:
        """The newest intact checkpoint, on the CPU; None if there is none. Damaged ones are renamed to `.broken`,
        and if all are, that is a `DamagedError`.

        Its tensors are memory-mapped: copy what is kept, or the deleted file still occupies the disk.
        """
        path = self.peers.gather_objects(self._intact() if self.peers.first else None)[0]
        if path is None:
            return None
        if path.is_dir():
            return dcp.read(path)
        state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state

    @property
    def newest_is_intact(self) -> bool:
        """Whether there is a checkpoint and the newest is not damaged. Nothing is changed."""
        newest = self._found()[:1]
        return bool(newest) and _is_intact(newest[0])

    def _intact(self) -> Path | None:
        """The newest one that is not damaged."""
        if self.folder.is_dir():
            sweep(self.folder)
            dcp.sweep(self.folder)
        for path in self._found():
            if _is_intact(path):
                return path
            self.damaged.append(path.rename(path.with_suffix(".broken")))
        if broken := sorted(self.folder.glob("step-*.broken")):
            raise DamagedError(
                f"all checkpoints in {self.folder} are damaged ({', '.join(path.name for path in broken)}), so the run "
                "cannot resume; check the disk, and start a new run in another folder"
            )
        return None

    def _found(self) -> list[Path]:
        """Files and folders named like a checkpoint, newest first."""
        files = [*self.folder.glob("step-*.pt"), *self.folder.glob("step-*.dcp")]
        named = [path for path in files if re.fullmatch(r"step-\d{8,}-[0-9a-f]{16}", path.stem)]
        return sorted(named, key=lambda path: (int(path.stem.split("-")[1]), path.stat().st_mtime_ns), reverse=True)


def _is_intact(path: Path) -> bool:
    """Whether a checkpoint has the hash that its name ends with."""
    return (dcp.digest(path) if path.is_dir() else file_hash(path)) == path.stem.rpartition("-")[2]


class _Writing(threading.Thread):
    """A checkpoint that a thread writes."""

    def __init__(self, step: int, write: Callable[[], Path]) -> None:
        super().__init__(name=f"checkpoint of step {step}", daemon=True)
        self.step, self.write, self.began = step, write, time.monotonic()
        self.outcome: Written | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = Written(self.step, self.write(), time.monotonic() - self.began)
        except BaseException as error:
            self.outcome = error
        del self.write  # and the copy with it

    def result(self) -> Written:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


def size_of(path: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size


def _size(tree: Any) -> int:
    """Bytes of all tensors; of divided ones, own rows."""
    return sum((each.to_local() if hasattr(each, "to_local") else each).nbytes for each in _tensors(tree))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(value)
    elif isinstance(tree, Tensor):
        yield tree


def copied(tree: Any) -> Any:
    """The same tree with copies of its tensors: on their device if it has twice the room, else in main memory.

    A copy stays on a GPU during the next steps, until `fetched` has brought it.
    """
    tensors = list(_tensors(tree))
    devices = {tensor.device for tensor in tensors}
    sizes = {device: _size([tensor for tensor in tensors if tensor.device == device]) for device in devices}
    spare = {device for device, size in sizes.items() if 2 * size <= free_bytes(device)}

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().to(tensor.device if tensor.device in spare else "cpu", copy=True)

    return _mapped(copy, tree)


def fetched(tree: Any) -> Any:
    """The same tree in main memory. A GPU computes meanwhile: tensors come by a stream of their own."""
    with ExitStack() as streams:
        for device in {tensor.device for tensor in _tensors(tree)}:
            if device.type == "cuda":
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.default_stream(device))
                streams.enter_context(torch.cuda.stream(stream))
        return _mapped(Tensor.cpu, tree)


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mapped(function, value) for value in tree]
    return function(tree) if isinstance(tree, Tensor) else tree


def _compact(tree: Any) -> Any:
    """The same tree with views copied: torch.save would write the whole storage of a view."""

    def compact(tensor: Tensor) -> Tensor:
        whole = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
        return tensor if whole else tensor.clone()

    return _mapped(compact, tree)


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

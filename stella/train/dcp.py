"""A checkpoint that several processes write together, each a part of it, with torch.distributed.checkpoint (DCP).

`step-00000120-HASH.dcp/` has DCP's files and `parts.json`, the hash of each of them; HASH is that of `parts.json`. What
all processes have alike is written once, by turns; the rows of the memory, by whoever keeps them. It is written under a
temporary name and renamed by the first process when all parts are on the disk.

DCP is given tensors alone. The rest of the state is one of them: the tree with its tensors replaced by their names, as
torch.save writes it.
"""

import io
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stella.errors import StellaError
from stella.files import file_hash, full_disk, sync_folder
from stella.peers import Peers
from stella.train.distributed import World

TREE = "tree"
HASHES = "parts.json"


def write(folder: Path, name: str, state: Mapping[str, Any], peers: Peers) -> Path:
    """Write a checkpoint; called by all processes, with the same state but for the memory's rows."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    assert isinstance(peers, World)
    fresh = Path(peers.gather_objects(str(folder / f"{name}.{uuid.uuid4().hex[:8]}.tmp"))[0])
    error: BaseException | None = None
    own: dict[str, str] = {}
    try:
        tensors = named(state, peers)
        writer = FileSystemWriter(fresh, single_file_per_rank=True, sync_files=True)
        save(tensors, storage_writer=writer, process_group=peers.hosts)
        own = {file.name: file_hash(file) for file in fresh.glob(f"__{peers.rank}_*")}
    except CheckpointException as failure:  # no Exception; of any process
        error = next(iter(failure.failures.values()))[0]
    except Exception as failure:  # of this process; the others must know
        error = failure
    told = peers.gather_objects((own, _why(error, folder) if error else ""))
    if any(why for _, why in told):
        if peers.first:
            shutil.rmtree(fresh, ignore_errors=True)
        why = next(why for _, why in told if why)
        raise StellaError(
            f"checkpoint {name} cannot be written to {folder} ({why}); nothing earlier is lost: free some space and "
            "continue with --resume"
        ) from error
    hashes = {file: hash for each, _ in told for file, hash in each.items()}
    path = publish(fresh, folder, name, hashes) if peers.first else None
    return Path(peers.gather_objects(path)[0])


def _why(error: BaseException, folder: Path) -> str:
    """Why a part cannot be written. torch may tell of a full disk as of an unexpected position in its file."""
    if full := full_disk(error):
        return full.strerror or str(full)
    if any(word in str(error) for word in ("inline_container", "PytorchStreamWriter")):
        free = shutil.disk_usage(folder).free
        return f"the disk is probably full: {free / 1e6:,.0f} MB are free"
    return str(error) or repr(error)


def publish(fresh: Path, folder: Path, name: str, hashes: dict[str, str]) -> Path:
    """Write the list of parts and give the folder its name."""
    hashes[".metadata"] = file_hash(fresh / ".metadata")
    with (fresh / HASHES).open("w") as file:
        json.dump(hashes, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(fresh)
    path = folder / f"{name}-{file_hash(fresh / HASHES)}.dcp"
    fresh.rename(path)
    sync_folder(folder)
    return path


def digest(path: Path) -> str | None:
    """The hash that its name must have; None if a part is missing or damaged."""
    try:
        hashes = json.loads((path / HASHES).read_text())
        whole = all(file_hash(path / name) == hash for name, hash in hashes.items())
        return file_hash(path / HASHES) if whole else None
    except (OSError, ValueError, AttributeError):
        return None


def read(path: Path) -> dict[str, Any]:
    """The state, with the memory's rows by slot, on the CPU."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    known = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {
        name: torch.empty(about.size, dtype=about.properties.dtype)  # type: ignore[union-attr]
        for name, about in known.items()
    }
    with warnings.catch_warnings():  # that this process loads on its own is meant
        warnings.simplefilter("ignore", UserWarning)
        load(tensors, storage_reader=reader, no_dist=True)
    tree = torch.load(io.BytesIO(tensors.pop(TREE).numpy().tobytes()), weights_only=True)
    rows = {}
    for name, (pieces, length) in tree.pop("rows").items():
        parts = [tensors.pop(f"rows/{name}/{rank}") for rank in range(pieces)]
        rows[name] = parts[0].new_empty(length, *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            rows[name][rank::pieces] = part
    state: dict[str, Any] = _filled(tree["state"], tensors)
    if rows:
        state["trainer"]["memory"]["rows"] = rows
    return state


def named(state: Mapping[str, Any], peers: Peers) -> dict[str, Tensor]:
    """The tensors of a state by name, and the tree without them."""
    memory = state["trainer"]["memory"]
    rows = {} if memory is None else memory["rows"]
    if memory is not None:
        trainer = {**state["trainer"], "memory": {**memory, "rows": {}}}
        state = {**state, "trainer": trainer}
    tensors: dict[str, Tensor] = {}
    tree = _emptied(state, "state", tensors)
    pieces = {}
    for name, each in rows.items():
        alone = name == "id"
        pieces[name] = (1, len(each)) if alone else (peers.count, len(rows["id"]))
        tensors[f"rows/{name}/{0 if alone else peers.rank}"] = each
    file = io.BytesIO()
    torch.save({"state": tree, "rows": pieces}, file)
    return tensors | {TREE: torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}


def _emptied(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with each tensor's name, as ["tensor", name], in its place."""
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach().cpu()
        return ["tensor", path]
    if isinstance(tree, Mapping):
        return {key: _emptied(value, f"{path}/{key}", tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return ["list", *(_emptied(value, f"{path}/{i}", tensors) for i, value in enumerate(tree))]
    return tree


def _filled(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _filled(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return tensors[tree[1]] if tree[0] == "tensor" else [_filled(value, tensors) for value in tree[1:]]
    return tree


def remove(path: Path) -> None:
    """A checkpoint, file or folder. A folder loses its name first: what a kill leaves is swept."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    going = path.with_name(f"{path.stem}.{uuid.uuid4().hex[:8]}.tmp")
    path.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what killed writers left. Only the holder of the run's lock may call this."""
    for left in folder.iterdir():
        if re.fullmatch(r"step-.+\.[0-9a-f]{8}\.tmp", left.name) and left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)

"""Named tensors of a file that anyone may have written, by safetensors or `torch.save`. Nothing in it is run as code.

Whatever is wrong with a file ends in one `WeightsError`.
"""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stella.errors import StellaError
from stella.model.layouts import State


class WeightsError(StellaError):
    """A weight file that cannot be read or does not fit."""


def read_safetensors(path: Path) -> tuple[State, dict[str, str]]:
    """Tensors and metadata."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # any damage ends here: safetensors raises several kinds
        what = "neither a torch checkpoint nor a whole safetensors file"
        raise WeightsError(f"{path} is {what} ({error}); copy or download it again") from error


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; none of a damaged one, which is refused when its tensors are read."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except Exception:  # safetensors raises several kinds
        return {}


def read_torch(path: Path) -> State:
    """The tensors of a state_dict, or of the one that a checkpoint has under `model` or `state_dict`."""
    try:
        if zipfile.is_zipfile(path):
            _check_zip(path)
        tree: Any = torch.load(path, map_location="cpu", weights_only=True)
    except WeightsError:
        raise
    except pickle.UnpicklingError as error:  # its own text advises to run the code
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        held = f"holds the Python object {found.group(1)}" if found else "is damaged or a pickle of something"
        raise WeightsError(
            f"{path} {held} besides tensors and is not opened, since that could run code; save its state_dict alone"
        ) from error
    except Exception as error:  # any damage ends here: reading raises whatever the bytes lead to
        reason = " ".join(str(error).split())[:160]
        raise WeightsError(f"{path} is damaged ({reason}); copy or download it again") from error
    for key in ("model", "state_dict"):
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    state = {k: v for k, v in tree.items() if isinstance(v, Tensor)} if isinstance(tree, dict) else {}
    if not state:
        raise WeightsError(f"{path} holds no named tensors; save a model's state_dict")
    return state


def _check_zip(path: Path) -> None:
    """Refuse an archive that would unpack to more than it is, or fails its checksums: torch looks at neither."""
    with zipfile.ZipFile(path) as archive:
        members, packed = archive.infolist(), path.stat().st_size
        if (size := sum(member.file_size for member in members)) > packed:
            raise WeightsError(
                f"{path} has {packed:,} bytes and would unpack to {size:,}; torch does not compress: "
                "save it with torch.save"
            )
        checked = any(member.CRC for member in members)  # all are 0 after set_crc32_options(False) of torch
        if checked and (bad := archive.testzip()) is not None:
            raise WeightsError(f"{path} is damaged: {bad} in it fails its checksum; copy or download it again")

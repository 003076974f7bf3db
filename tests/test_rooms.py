"""Rooms import one way; and with torch alone everything imports, scenes render and a step trains."""

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import stella
from stella.errors import MissingExtraError, require

# Rooms from the ground up: a room may import those above it in this list, and nothing else of the package.
ROOMS = (
    "errors",
    "rng",
    "config",
    "files",
    "clip",
    "peers",
    "routes",
    "media",
    "data",
    "losses",
    "selection",
    "codec",
    "columns",
    "memory",
    "model",
    "methods",
    "evaluate",
    "fast",
    "train",
    "runs",
    "embed",
    "search",
    "transfer",
    "bench",
    "report",
    "learn",
    "experiments",
    "serve",
    "cli",
)
ONLY_FOR = {"fast": {"train", "bench"}}  # the only rooms that may import it


def imports() -> Iterator[tuple[str, str, str]]:
    """Every import of the package by the package: (file, its room, the room imported)."""
    root = Path(stella.__file__).parent
    for path in sorted(root.rglob("*.py")):
        here = path.relative_to(root).parts
        room = here[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module == "stella":
                names = [f"stella.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                if name.startswith("stella."):
                    yield "/".join(here), room, name.split(".")[1]


def test_rooms_import_one_way() -> None:
    """No two rooms import each other: data flows from the first to the last."""
    order = {room: number for number, room in enumerate(ROOMS)}
    found = [(file, room, other) for file, room, other in imports() if not room.startswith("__") and room != other]
    assert {room for _, room, _ in found} <= order.keys() and len(found) > 100
    wrong = [f"{file} imports {other}" for file, room, other in found if order.get(other, 99) > order[room]]
    assert not wrong


def test_speed_is_applied_from_outside() -> None:
    """Nothing that computes a result knows of `fast`."""
    wrong = [file for file, room, other in imports() if other in ONLY_FOR and room not in {other, *ONLY_FOR[other]}]
    assert not wrong


PROCESSES = {"rank", "peers", "world", "dist", "World", "Peers", "WORLD_SIZE", "LOCAL_RANK", "RANK", "cuda:0"}


def words(path: Path) -> set[str]:
    """All names and strings of a file's code."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    fields = [getattr(node, name, None) for node in tree for name in ("id", "attr", "arg", "value", "module", "name")]
    return {each for each in fields if isinstance(each, str)}


def test_only_the_trainer_talks_to_other_processes() -> None:
    """Who computes knows of none; the stream and the memory know their share; torch.distributed is for `train`."""
    root = Path(stella.__file__).parent
    assert words(root / "train" / "distributed.py") >= {"rank", "dist", "World"}
    assert "WORLD_SIZE" in words(root / "train" / "processes.py")
    for path in sorted(root.rglob("*.py")):
        room = path.relative_to(root).parts[0].removesuffix(".py")
        found = words(path)
        if room in ("media", "losses", "selection", "codec", "columns", "model", "methods", "fast"):
            assert not found & PROCESSES, path
        assert room == "train" or not any(word.startswith("torch.distributed") for word in found), path
        assert room == "train" or not found & {"WORLD_SIZE", "LOCAL_RANK", "RANK"}, path


BLOCKED = (
    "av",
    "webdataset",
    "gradio",
    "tensorboard",
    "faiss",
    "torchcodec",
    "ray",
    "kaldi_native_fbank",
    "huggingface_hub",
    "h5py",
    "fastapi",
    "uvicorn",
)

SCRIPT = f"""
import importlib.abc, importlib, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import stella
for module in pkgutil.walk_packages(stella.__path__, "stella."):
    # Triton comes with torch where there is a GPU; the routes are declared by FastAPI's decorators
    if module.name not in ("stella.fast.kernels", "stella.serve.app"):
        importlib.import_module(module.name)

import torch
from stella.data.scenes import Scenes
from stella.media.fbank import fbank
from stella.model.cav import CAV, preset, split_by_noise
from stella import losses
from stella.errors import MissingExtraError
from stella.media.decode import Plan, decode

video, waveforms = Scenes("task1", "train", 4).tensors(range(4))
audio = fbank(waveforms, frames=256)
model = CAV(preset("tiny"))
out = model.pretrain(
    model.patches_a(audio), model.patches_v(video),
    split_by_noise(torch.rand(4, 128), 25), split_by_noise(torch.rand(4, 144), 28),
)
loss = losses.reconstruction(out.recon_a, out.target_a).mean() + losses.contrastive(out.z_a, out.z_v).mean()
loss.backward()
assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
try:
    decode(__file__ if "__file__" in globals() else sys.executable, Plan())
except MissingExtraError as error:
    assert "pip install av" in str(error), error
else:
    raise SystemExit("decode worked without av")
print("trained")
"""


def test_without_optional_packages_all_imports_and_a_step_trains() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained\n")


def test_a_missing_package_names_its_remedy() -> None:
    with pytest.raises(MissingExtraError, match=r"; in a clone of stella: pip install '\.\[tensorboard\]'"):
        require("no_such_module_xyz", "tensorboard")
    with pytest.raises(MissingExtraError, match="pip install no_such_module_xyz"):
        require("no_such_module_xyz.part")
    assert require("json").__name__ == "json"


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_how_threads_wait_is_the_users_to_say(given: dict[str, str], spins: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    script = "import os, stella; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", script], env=kept | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == spins

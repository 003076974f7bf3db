"""Training in several processes, forks of this one, beside the same in one.

Double precision: Adam's first steps have the size of the learning rate wherever a gradient is not zero, be it rounding.
"""

import json
import math
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.method_toys import TOY, method
from helpers.noise import Noise
from stella.data.stream import Stream, StreamConfig
from stella.peers import ALONE, Peers
from stella.train.config import TrainConfig
from stella.train.device import runtime
from stella.train.distributed import World
from stella.train.fsdp import full_tensor
from stella.train.trainer import Trainer

SHAPES: dict[str, Any] = {"size": TOY.image_size, "spec_frames": TOY.spec_frames, "mels": TOY.mel_bins}


def _wait(pids: list[int], files: list[Path]) -> None:
    """Until all have ended. Where one has failed the others may wait for it for ever: they are killed."""
    left, end = set(pids), math.inf
    while left:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        if end == math.inf and any(file.exists() and '"failed"' in file.read_text() for file in files):
            end = time.monotonic() + 60
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            end = math.inf
        time.sleep(0.02)


def fork(count: int, work: Callable[[World], Any]) -> list[Any]:
    """What each of so many processes returns (as JSON)."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(count):
            if pid := os.fork():
                pids.append(pid)
                continue
            try:
                torch.set_num_threads(1)  # a fork that computes with several hangs
                store = dist.FileStore(f"{folder}/store", count)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=120)
                )
                text = json.dumps(work(World(minutes=2)))
            except BaseException:
                text = json.dumps({"failed": traceback.format_exc()})
            try:
                Path(folder, str(rank)).write_text(text)
            finally:  # whatever happens, no fork goes on with the tests
                os._exit(0)
        files = [Path(folder, str(rank)) for rank in range(count)]
        _wait(pids, files)
        found = [json.loads(file.read_text()) if file.exists() else {"failed": f"no word: {file}"} for file in files]
    failed = [each["failed"] for each in found if isinstance(each, dict) and "failed" in each]
    assert not failed, "\n".join(failed)
    return found


def trainer(name: str, clips: int, peers: Peers = ALONE, **train: Any) -> Trainer:
    """Batches of 6, short ones of 1 and 5; with 4 processes the short ones are not shared or shared unevenly."""
    tasks = [("one", Noise(1, 19)), ("two", Noise(2, 23))]
    stream = Stream(tasks, StreamConfig(batch_size=6, epochs=3, **SHAPES), "cpu", None, peers)
    coded = name.endswith("+dct")
    name, _, draws = name.removesuffix("+dct").partition("/")
    args = {"draws": float(draws)} if draws else {}
    one = method(name, clips, dtype=torch.float64, coded=coded, **args)
    return Trainer(one, stream, TrainConfig(lr=1e-3, **train), runtime("cpu"), peers)


def history(
    name: str, clips: int, steps: int, peers: Peers = ALONE, static: bool = False, **train: Any
) -> dict[str, list[Tensor]]:
    """All that must not depend on the number of processes."""
    one = trainer(name, clips, peers, **train)
    if one.world:
        one.world.static = static
    gradients: list[Tensor] = []

    def before_step() -> None:
        type(one.method).before_step(one.method)
        if one.counters.step in (1, 2, 6):
            gradients.extend(full_tensor(p.grad).clone() for p in one.method.parameters() if p.grad is not None)

    one.method.before_step = before_step  # type: ignore[method-assign]
    losses = []
    while one.counters.step < steps and one.advance():
        losses.append(torch.tensor(list(one.meter.read().values()), dtype=torch.float64))
    one.settle()
    assert not one.counters.skipped
    state = {name: full_tensor(value) for name, value in one.method.state_dict().items()}
    found = {"losses": losses, "gradients": gradients, "weights": [v for v in state.values() if v.is_floating_point()]}
    if one.slow is not None:
        found["slow"] = list(one.plain(one.slow.model).state_dict().values())
    if (memory := one.method.memory) is not None:
        rows = memory.state_dict()["rows"]
        found["memory"] = [all_slots(memory.peers, each, name) for name, each in rows.items()]
        found["ids"] = [torch.tensor([memory.seen, one.counters.clips])]
    return found


def all_slots(peers: Peers, rows: Tensor, name: str) -> Tensor:
    """The rows of all slots."""
    if peers.count == 1 or name == "id":
        return rows
    parts = peers.gather_objects(rows)
    out = rows.new_empty(sum(map(len, parts)), *rows.shape[1:])
    for rank, part in enumerate(parts):
        out[rank :: peers.count] = part
    return out


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    assert [t.shape for t in ours] == [t.shape for t in theirs]
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True)]
    return max((((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() for a, b in pairs if a.numel()), default=0)


def compare(count: int, steps: int, cases: list[str], **train: Any) -> dict[str, dict[str, float]]:
    """The largest relative differences of losses, gradients, weights and stored rows.

    A case is `METHOD/DRAWS+dct:CLIPS`, with so many clips in memory; all but the method may be left out.
    """
    wanted = [(name, int(clips or 12), steps) for name, _, clips in (case.partition(":") for case in cases)]
    alone = {case: history(*each, **train) for case, each in zip(cases, wanted, strict=True)}

    def work(world: World) -> Any:
        found = {case: history(*each, world, **train) for case, each in zip(cases, wanted, strict=True)}
        return {case: {k: difference(found[case][k], alone[case][k]) for k in alone[case]} for case in cases}

    first: dict[str, dict[str, float]] = fork(count, work)[0]
    return first

"""How a step scales over processes: measured where it can be, and a model of where it cannot.

    python -m benchmarks.scaling cpu --out results/scaling/cpu.csv      1, 2 and 4 processes on this machine, by gloo
    python -m benchmarks.scaling gpu --out results/scaling/gpu.csv      one GPU: no process group beside NCCL and DDP
    python -m benchmarks.scaling model MS --batch 48                    efficiency at 8, 64, 512 GPUs if a step takes MS

The model's assumptions stand in results/scaling/README.md.
"""

import argparse
import csv
import json
import os
import socket
import statistics
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stella.bench.steps import Synthetic, settle_draws, step_times
from stella.clip import Batch
from stella.config import resolve
from stella.methods import METHODS
from stella.model.cav import CAV, preset
from stella.peers import ALONE, Peers
from stella.runs.build import build_method
from stella.runs.config import RunConfig, machine, model_config
from stella.train.distributed import World
from stella.train.trainer import Trainer

FIELDS = ("place", "method", "processes", "batch", "ms", "clips_per_second", "spread")


class Part(Synthetic):
    """Synthetic batches, of which a process has its rows."""

    def __init__(self, peers: Peers, *args: Any) -> None:
        super().__init__(*args)
        self.peers, self.total = peers, len(self._batches[0])

    def __next__(self) -> Batch:
        return super().__next__()[self.peers.rows(self.total)]


def trainer(method: str, batch: int, values: list[str], peers: Peers) -> Trainer:
    config = resolve(RunConfig, None, [f"method={method}", f"stream.batch_size={batch}", *values])
    place = machine(config.train)
    stream: Any = Part(peers, model_config(config), batch, place.device)
    return Trainer(build_method(config, place.device), stream, config.train, place, peers)


def measured(one: Trainer, steps: int) -> tuple[float, float]:
    """Median milliseconds of a step, and the spread between its quartiles."""
    settle_draws(one)
    step_times(one, 6)
    times = step_times(one, steps)
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, high - low


def fork(count: int, port: int, method: str, batch: int, values: list[str], steps: int, out: Path) -> None:
    pids = []
    for rank in range(count):
        if pid := os.fork():
            pids.append(pid)
            continue
        torch.set_num_threads(1)
        peers: Peers = ALONE
        if count > 1:
            where = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", where, timedelta(minutes=5), rank=rank, world_size=count)
            peers = World()
        found = measured(trainer(method, batch, values, peers), steps)
        if rank == 0:
            out.write_text(json.dumps(found))
        os._exit(0)
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        raise SystemExit("a process failed")


def cpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Strong scaling: the same batch, shared by more processes, each on one thread."""
    values, rows = ["model.preset=tiny", "train.device=cpu", "memory.clips=256"], []
    for method in args.methods.split(","):
        for count in (1, 2, 4):
            with socket.socket() as one:
                one.bind(("127.0.0.1", 0))
                port = one.getsockname()[1]
            out = Path(f"/tmp/scaling-{os.getpid()}.json")
            fork(count, port, method, args.batch, values, args.steps, out)
            ms, spread = json.loads(out.read_text())
            out.unlink()
            rows.append(row(f"{os.cpu_count()} cores", method, count, args.batch, ms, spread))
    return rows


def gpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One GPU: today's path (with and without CUDA graphs), and a world of one process by NCCL and DDP, in turns."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    name, rows = torch.cuda.get_device_name(), []
    kinds: dict[str, tuple[list[str], Peers]] = {
        "none": ([], ALONE),
        "none, no graph": (["train.graph=false"], ALONE),
        "NCCL and DDP": ([], World()),
    }
    for method in args.methods.split(","):
        for _ in range(args.turns):
            for kind, (values, peers) in kinds.items():
                one = trainer(method, args.batch, ["model.preset=base", *values], peers)
                ms, spread = measured(one, args.steps)
                rows.append(row(f"{name}: {kind}", method, 1, args.batch, ms, spread))
                del one
                torch.cuda.empty_cache()
    return rows


def row(place: str, method: str, count: int, batch: int, ms: float, spread: float) -> dict[str, Any]:
    figures = {"ms": round(ms, 2), "clips_per_second": round(1e3 * batch / ms, 2), "spread": round(spread, 2)}
    found = {"place": place, "method": method, "processes": count, "batch": batch, **figures}
    print(*found.values(), sep=",", flush=True)
    return found


# ---- the model


@dataclass(frozen=True)
class Links:
    """Bytes a second that each GPU sends: to others of its machine, and to other machines."""

    inside: float = 350e9  # NVLink 4, of 450e9
    between: float = 40e9  # one 400 Gb/s port for each GPU, of 50e9
    machine: int = 8
    latency: float = 20e-6  # of one hop of a collective


def bytes_of_a_step(method: str, batch: int, count: int) -> dict[str, float]:
    """What one process sends in a step, with `batch` clips of its own and as many drawn; ViT-B, bfloat16."""
    config = preset("base")
    with torch.device("meta"):
        weights = sum(p.numel() for p in CAV(config).parameters())
    away = (count - 1) / count
    columns = METHODS[method].columns(config, METHODS[method].Config())
    stored = sum(column.bytes for column in columns.values()) if columns else 0
    rows = 2 * batch if columns else batch
    matching = batch * config.patches_v * config.dim * 2 * away / 2 if "pairs" in METHODS[method].random else 0
    return {
        "gradients": 2 * away * weights * 4,  # a ring's reduce-scatter and all-gather
        "embeddings": 3 * (count - 1) * rows * 2 * config.dim * 4,  # gathered, their gradient summed
        "memory": 2 * batch * stored * away,  # drawn rows and, at most, kept ones
        "pairs": matching,
    }


def model(args: argparse.Namespace) -> None:
    links = Links()
    print(f"{'GPUs':>5} {'sent, MB':>36} {'ms':>8} {'efficiency':>10}")
    for count in (8, 64, 512):
        sent = bytes_of_a_step(args.methods.split(",")[0], args.batch, count)
        speed = links.inside if count <= links.machine else links.between
        seconds = {what: amount / speed + links.latency * count.bit_length() for what, amount in sent.items()}
        hidden = min(seconds["gradients"], args.ms / 1e3 / 2)  # behind the backward pass but for its first block
        total = args.ms + 1e3 * (sum(seconds.values()) - hidden)
        shown = " ".join(f"{what} {amount / 1e6:.0f}" for what, amount in sent.items())
        print(f"{count:>5} {shown:>36} {total:8.1f} {args.ms / total:10.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cpu", "gpu", "model"])
    parser.add_argument("ms", type=float, nargs="?", default=0.0)
    parser.add_argument("--methods", default="stella,derpp")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "model":
        return model(args)
    rows = cpu(args) if args.what == "cpu" else gpu(args)
    out = args.out.open("w", newline="") if args.out else sys.stdout
    writer = csv.DictWriter(out, FIELDS)
    writer.writeheader()
    writer.writerows(rows)
    return None


if __name__ == "__main__":
    main()

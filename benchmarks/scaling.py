"""How a step scales over processes: measured where it can be, and a model of where it cannot.

    python -m benchmarks.scaling cpu --out results/scaling/cpu.csv      1, 2 and 4 processes on this machine, by gloo
    python -m benchmarks.scaling draws --out results/scaling/draws.csv  how long a draw from memory waits for its rows
    python -m benchmarks.scaling gpu --out results/scaling/gpu.csv      one GPU: see benchmarks/scaling_gpu.py
    python -m benchmarks.scaling shard --preset large                   one GPU: a world of one by DDP and by FSDP
    python -m benchmarks.scaling model MS --batch 48                    efficiency at 8, 64, 512 GPUs if a step takes MS
    python -m benchmarks.scaling model MS --preset large --shard        the same with train.shard=true

The model's assumptions stand in results/scaling/README.md.
"""

import argparse
import csv
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stella.bench.steps import let_go, make_trainer, step_times, warm_up
from stella.columns import coded
from stella.config import resolve
from stella.fast.graphs import MOST_PROCESSES
from stella.memory import Memory
from stella.methods import METHODS
from stella.model.cav import CAV, preset
from stella.peers import ALONE, Peers, cut
from stella.rng import generator
from stella.routes import message
from stella.runs.config import RunConfig
from stella.train.distributed import BatchSpread, World
from stella.train.trainer import Trainer

FIELDS = ("place", "method", "processes", "batch", "ms", "clips_per_second", "spread")


def trainer(method: str, batch: int, values: list[str], peers: Peers) -> Trainer:
    config = resolve(RunConfig, None, [f"method={method}", f"stream.batch_size={batch}", *values])
    return make_trainer(config, None, peers)


def measured(one: Trainer, steps: int) -> tuple[float, float]:
    """Median milliseconds of a step, and the spread between its quartiles."""
    low, middle, high = statistics.quantiles(step_times(one, steps), n=4)
    return middle, high - low


def fork(count: int, work: Callable[[Peers], str]) -> str:
    """What the first of so many processes, each on one thread, says."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(count):
            if pid := os.fork():
                pids.append(pid)
                continue
            torch.set_num_threads(1)
            where = f"tcp://127.0.0.1:{port}"
            if count > 1:
                dist.init_process_group("gloo", where, timedelta(minutes=5), rank=rank, world_size=count)
            said = work(World() if count > 1 else ALONE)
            if rank == 0:
                Path(folder, "said").write_text(said)
            os._exit(0)
        if sum(os.waitpid(pid, 0)[1] for pid in pids):
            raise SystemExit("a process failed")
        return Path(folder, "said").read_text()


def cpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Strong scaling: the same batch, shared by more processes."""
    values, rows = ["model.preset=tiny", "train.device=cpu", "memory.clips=256"], []
    for method in args.methods.split(","):
        for count in (1, 2, 4):

            def work(peers: Peers, method: str = method) -> str:
                one = trainer(method, args.batch, values, peers)
                warm_up(one)
                return "{} {}".format(*measured(one, args.steps))

            ms, spread = map(float, fork(count, work).split())
            rows.append(row(f"{os.cpu_count()} cores", method, count, args.batch, ms, spread))
    return rows


def draws(args: argparse.Namespace) -> list[dict[str, Any]]:
    """ViT-B sizes, a quarter of the batch for each process; 0.3 s pass between the steps, as if clips were decoded."""
    config, rows = preset("base"), []
    for method in args.methods.split(","):
        columns = METHODS[method].columns(config, METHODS[method].Config())
        for count in (2, 4):
            for ahead in (False, True):

                def work(peers: Peers, columns: Any = columns, ahead: bool = ahead) -> str:
                    return repr(_waits(peers, columns, args, ahead))

                ms = float(fork(count, work))
                size = args.batch // 4
                sent = size * sum(column.bytes for column in columns.values()) * (count - 1) / count
                found = {"method": method, "processes": count, "drawn": size, "MB_sent": round(sent / 1e6, 1)}
                rows.append(found | {"ahead": ahead, "ms_waited": round(ms, 1)})
                print(rows[-1], flush=True)
    return rows


def _waits(peers: Peers, columns: Any, args: argparse.Namespace, ahead: bool) -> float:
    """Median milliseconds that a draw takes."""
    assert isinstance(peers, World)
    memory, own, waited = Memory(columns, 2 * args.batch, generator("memory")), args.batch // 4, []
    memory.split(peers)
    clips = {name: torch.zeros(own, *column.shape, dtype=column.dtype) for name, column in columns.items()}
    for _ in range(args.steps):
        peers.spread_now = BatchSpread(cut(own * peers.count, peers.count), replicated=False)
        start = time.perf_counter()
        memory.draw(own)
        waited.append(1e3 * (time.perf_counter() - start))
        memory.add(torch.arange(own), **clips)
        if ahead:
            memory.prefetch()
        time.sleep(0.3)
    return statistics.median(waited[5:])


def shard(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A step on its own, and in a world of one process by DDP and by FSDP, where nothing is sent; without graphs."""
    from benchmarks.scaling_gpu import world_of_one

    on_gpu, rows = torch.cuda.is_available(), []
    size = [f"model.preset={args.preset}"] if on_gpu else ["model.preset=tiny", "memory.clips=64"]
    world, name = world_of_one(on_gpu), torch.cuda.get_device_name() if on_gpu else "CPU"
    for method in args.methods.split(","):
        for kind, peers, divided in (("none", ALONE, "false"), ("DDP", world, "false"), ("FSDP", world, "true")):
            one = trainer(method, args.batch, [*size, "train.graph=false", f"train.shard={divided}"], peers)
            warm_up(one)
            found = row(f"{name}, {args.preset}: {kind}", method, 1, args.batch, *measured(one, args.steps))
            rows.append(found | {"peak_gib": round(one.runtime.peak_bytes() / 2**30, 2)})
            del one
            let_go()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
    return rows


def row(place: str, method: str, count: int, batch: int, ms: float, spread: float) -> dict[str, Any]:
    figures = {"ms": round(ms, 2), "clips_per_second": round(1e3 * batch / ms, 2), "spread": round(spread, 2)}
    found = {"place": place, "method": method, "processes": count, "batch": batch, **figures}
    print(*found.values(), sep=",", flush=True)
    return found


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


# ---- the model


@dataclass(frozen=True)
class Links:
    """Bytes a second that each GPU sends: to others of its machine, and to other machines."""

    inside: float = 350e9  # NVLink 4, of 450e9
    between: float = 40e9  # one 400 Gb/s port for each GPU, of 50e9
    machine: int = 8
    latency: float = 20e-6  # of one hop of a collective


def divided(model: CAV, scores: bool) -> tuple[float, float]:
    """Bytes of weights that a process gathers in a step, and of gradients that it reduces, with FSDP in bfloat16.

    A pass uses fusion blocks three times and decoder blocks twice, and the backward pass gathers them again; STELLA's
    scores take encoders and fusion once more, its mismatched pairs fusion.
    """

    def size(*modules: nn.Module) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    encoders, fusion, decoder = size(model.blocks_a, model.blocks_v), size(model.blocks_u), size(model.decoder_blocks)
    rest = size(model) - encoders - fusion - decoder
    gathered = 2 * (encoders + 3 * fusion + 2 * decoder) + (encoders + 2 * fusion if scores else 0)
    return 2 * gathered + 4 * rest, 4 * size(model)


def bytes_of_a_step(
    method: str, batch: int, count: int, name: str, shard: bool = False, codec: bool = False
) -> dict[str, float]:
    """What one process sends in a step, with `batch` clips of its own and as many drawn; bfloat16.

    Rows travel in messages of one size where steps are recorded.
    """
    config, scores = preset(name), "pairs" in METHODS[method].random
    with torch.device("meta"):
        model = CAV(config)
    away, weights = (count - 1) / count, sum(p.numel() for p in model.parameters())
    own = {"gradients": 2 * away * weights * 4}  # a ring's reduce-scatter and all-gather
    if shard:
        gathered, reduced = divided(model, scores)
        own = {"weights": away * gathered, "gradients": away * reduced}
    columns = METHODS[method].columns(config, METHODS[method].Config())
    stored = sum(each.bytes for each in (coded(columns) if codec else columns).values()) if columns else 0
    rows, recorded = 2 * batch if columns else batch, count <= MOST_PROCESSES and not shard
    travel = (count - 1) * message(batch, count) if recorded else batch * away
    videos = travel if recorded else travel / 2  # half of the pairs are mismatched
    matching = videos * config.patches_v * config.dim * 2 if scores else 0
    return own | {
        "embeddings": 2 * (count - 1) * rows * 2 * config.dim * 4,  # gathered, their gradient reduced and scattered
        "memory": 2 * travel * stored,  # drawn rows and, at most, kept ones
        "pairs": matching,
    }


def model(args: argparse.Namespace) -> None:
    links = Links()
    print(f"{'GPUs':>5} {'sent, MB':>36} {'ms':>8} {'efficiency':>10}")
    for count in (8, 64, 512):
        sent = bytes_of_a_step(args.methods.split(",")[0], args.batch, count, args.preset, args.shard, args.codec)
        speed = links.inside if count <= links.machine else links.between
        seconds = {what: amount / speed + links.latency * count.bit_length() for what, amount in sent.items()}
        hidden = min(seconds["gradients"], args.ms / 1e3 / 2)  # behind the backward pass but for its first block
        if args.shard:  # and weights behind whatever is computed meanwhile
            hidden = min(seconds["gradients"] + seconds["weights"], args.ms / 1e3)
        own = args.ms if count <= MOST_PROCESSES else max(args.ms, args.host)
        total = own + 1e3 * (sum(seconds.values()) - hidden)
        shown = " ".join(f"{what} {amount / 1e6:.0f}" for what, amount in sent.items())
        print(f"{count:>5} {shown:>36} {total:8.1f} {args.ms / total:10.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cpu", "draws", "gpu", "shard", "model"])
    parser.add_argument("ms", type=float, nargs="?", default=0.0)
    parser.add_argument("--methods", default="stella,derpp")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--codec", action="store_true")
    parser.add_argument("--host", type=float, default=0.0, help="ms that a host takes for a step that is not recorded")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "gpu":
        from benchmarks.scaling_gpu import gpu

        gpu(args)
    elif args.what == "model":
        model(args)
    else:
        write(args.out, {"cpu": cpu, "draws": draws, "shard": shard}[args.what](args))


if __name__ == "__main__":
    main()

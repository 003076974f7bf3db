"""What a process group costs on one GPU: steps of a run started in four ways, measured in turns.

    python -m benchmarks.scaling gpu --out results/scaling/gpu.csv

- none: the run without torchrun;
- torchrun: the same as the only process of torchrun (bar: 1% more than none);
- NCCL and DDP: a world of one process, as one of many would run (bar: 4%);
- none, no graph: without torchrun and without CUDA graphs.

For each method two processes, one of them started by torchrun, compile at the same time and then measure one after the
other. A row is written as soon as it is measured. In a world of one nothing leaves the process: what would is counted.
Without a GPU it all happens with gloo and the model tiny, to see that it runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.scaling import measured, row, trainer, write
from stella.bench.steps import step_times, warm_up
from stella.peers import ALONE, Peers
from stella.train.distributed import World
from stella.train.processes import processes
from stella.train.trainer import Trainer

KINDS = ("none", "torchrun", "NCCL and DDP", "none, no graph")
BARS = {"torchrun": 1.01, "NCCL and DDP": 1.04}
PATIENCE = 600.0  # seconds that one process waits for the other


def gpu(args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for method in args.methods.split(","):
        rows += _measured(method, args, rows)
        compare(method, [each for each in rows if each["method"] == method])


def _measured(method: str, args: argparse.Namespace, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a method, which are written with those before whenever there is a new one."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "1"]
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_COMPILE_THREADS": "4"} | os.environ
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        sizes = [str(number) for number in (args.batch, args.steps, args.turns)]
        command = ["-m", "benchmarks.scaling_gpu", folder, method, *sizes]
        started = [subprocess.Popen([sys.executable, *how, *command], env=env) for how in ([], torchrun)]
        while any(each.poll() is None for each in started) and not any(each.poll() for each in started):
            time.sleep(0.2)
            if len(found := _rows(Path(folder))) > len(rows):
                rows = found
                write(args.out, before + rows)
        failed = any(each.poll() for each in started)
        for each in started:
            each.terminate()
            each.wait()
    if failed:
        raise SystemExit("a process failed")
    return rows


def compare(method: str, rows: list[dict[str, Any]]) -> None:
    """Each kind's time as a multiple of that of a run without torchrun, turn by turn; the median of these."""
    times = {kind: [each["ms"] for each in rows if each["place"].endswith(f": {kind}")] for kind in KINDS}
    for kind in KINDS[1:]:
        if ratios := [one / none for one, none in zip(times[kind], times["none"], strict=False)]:
            bar = f", bar {BARS[kind]}" if kind in BARS else ""
            spread = f"{min(ratios):.4f} to {max(ratios):.4f}"
            print(f"{method}: {kind} takes {statistics.median(ratios):.4f} of none ({spread}){bar}")


def _rows(folder: Path) -> list[dict[str, Any]]:
    """What has been measured so far, in order."""
    file = folder / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def measure(folder: Path, method: str, batch: int, steps: int, turns: int) -> None:
    """One of the processes: it makes the trainers of its kinds and measures when it is their turn."""
    on_gpu, under = torch.cuda.is_available(), "TORCHELASTIC_RUN_ID" in os.environ
    with processes(10) as peers:
        assert peers is ALONE
        made = {("torchrun" if under else "none"): make(method, batch, ALONE)}  # recorded before NCCL is there
        if not under:
            made["NCCL and DDP"] = make(method, batch, world_of_one(on_gpu))
            made["none, no graph"] = make(method, batch, ALONE, "train.graph=false")
        if not under:
            print(f"{method}: bytes given to collectives in a step: {counted(made['NCCL and DDP'])}", flush=True)
        (folder / f"ready {under}").touch()
        wait_for(lambda: len(list(folder.glob("ready *"))) == 2)
        name = torch.cuda.get_device_name() if on_gpu else "CPU"
        for turn in range(turns * len(KINDS)):
            if one_of := made.get(kind := KINDS[turn % len(KINDS)]):
                wait_for(partial(_count_is, folder, turn))
                step_times(one_of, 2)
                found = row(f"{name}: {kind}", method, 1, batch, *measured(one_of, steps))
                with (folder / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(found) + "\n")


def make(method: str, batch: int, peers: Peers, *more: str) -> Trainer:
    """A trainer that has compiled and recorded."""
    size = ["model.preset=base"] if torch.cuda.is_available() else ["model.preset=tiny", "memory.clips=64"]
    began = time.monotonic()
    one = trainer(method, batch, [*size, *more], peers)
    warm_up(one)
    print(f"{method}: steady after {time.monotonic() - began:.0f} s", flush=True)
    return one


def _count_is(folder: Path, number: int) -> bool:
    return len(_rows(folder)) == number


def wait_for(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > end:
            raise SystemExit("the other process did not come")
        time.sleep(0.02)


def world_of_one(on_gpu: bool) -> World:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(minutes=5))
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    return World()


def counted(one: Trainer) -> dict[str, int]:
    """Bytes of a step by kind: gradients that DDP averages, rows gathered, their gradients, what hosts tell."""
    found = {"gradients": sum(p.nbytes for p in one.method.parameters() if p.requires_grad)}
    plain = {name: getattr(dist, name) for name in ("all_gather", "reduce_scatter", "all_to_all_single", "all_reduce")}

    def counting(name: str) -> Any:
        def call(out: Any, *given: Any, **more: Any) -> Any:
            data = out if name == "all_reduce" else given[0]
            each = data if isinstance(data, list) else [data]
            found[name] = found.get(name, 0) + sum(tensor.nbytes for tensor in each)
            return plain[name](out, *given, **more)

        return call

    try:
        for name in plain:
            setattr(dist, name, counting(name))
        one.advance()
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
    return found


if __name__ == "__main__":
    where, one, *numbers = sys.argv[1:]
    measure(Path(where), one, *map(int, numbers))

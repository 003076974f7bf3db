"""A run of two processes of torchrun, one of which is killed at a random moment; `--max-restarts` brings it back.

Every moment counts: while processes start, find one another, evaluate, train, write checkpoints. The result must be the
same, to the last byte, as that of an undisturbed run of two processes.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.kills import HUNG, PLAN, QUICK, contents, videos
from stella.data.folder import Folder
from stella.data.pack import pack


def torchrun(packed: Path, out: Path) -> "subprocess.Popen[bytes]":
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "-m", "--"]
    settings = [*QUICK, "train.patience_minutes=0.5", "data.source=packed", f"data.path={packed}", "stream.epochs=4"]
    command = [sys.executable, *how, "stella", "pretrain", *settings, "--run", str(out)]
    with (out.parent / f"{out.name}.log").open("wb") as log:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(process: "subprocess.Popen[bytes]") -> str:
    """Nothing, or what is wrong."""
    try:
        status = process.wait(timeout=HUNG)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "hung"
    return f"failed ({status})" if status else ""


def ranks_killed(root: Path, count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """(victim, what was killed when, outcome) for each kill."""
    rng, packed, whole = random.Random(seed), root / "packed", root / "whole"
    src = videos(root / "videos", 20)
    pack(Folder(src, PLAN), packed, pixels=32, spec_frames=64, size=37, workers=0, progress=False)
    began = time.monotonic()
    assert not ended(torchrun(packed, whole)), f"it does not work undisturbed: see {whole}.log"
    seconds, expected = time.monotonic() - began, contents(whole)
    assert len(expected) == 2
    done = 0
    for number in itertools.count():
        if done == count:
            return
        out = root / f"killed-{number}"
        process = torchrun(packed, out)
        time.sleep(rng.uniform(0.1, 0.95) * seconds)
        while process.poll() is None and len(children(process.pid)) < 2:
            time.sleep(0.01)
        if process.poll() is not None:  # too late
            continue
        when = "after" if (out / "checkpoints").exists() else "before"
        os.kill(children(process.pid)[rng.randrange(2)], signal.SIGKILL)
        outcome = ended(process) or ("same" if contents(out) == expected else "different")
        done += 1
        yield "run of 2 processes", f"SIGKILL of one, {when} the first checkpoint", outcome

"""The processes that torchrun starts: how they find each other, and how all end when one fails."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group
from torch.distributed.rendezvous import rendezvous

from stella.errors import ConfigError, StellaError
from stella.peers import ALONE, Peers
from stella.train.distributed import World

FAILED = "failed"  # a key of the store


class Elsewhere(SystemExit):
    """Another process failed and has told why."""


@contextmanager
def processes(minutes: float, device: str = "auto") -> Iterator[Peers]:
    """The processes that torchrun started, or this one alone. None waits for the others longer than `minutes`.

    With GPUs (and `device`, a train.device, other than cpu), each process has one of its own.

    An error of one ends all: it tells its sentence, the others end without a word.
    """
    if started() < 2:
        yield ALONE
        return
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"train.device={device} is one GPU for all processes; set train.device=auto")
    on_gpu, limit = torch.cuda.is_available() and device != "cpu", timedelta(minutes=minutes)
    if on_gpu and own_gpu() >= (count := torch.cuda.device_count()):
        raise ConfigError(f"there are more processes than GPUs here; set --nproc-per-node {count} or train.device=cpu")
    if on_gpu:
        torch.cuda.set_device(own_gpu())
    shared, number, size = next(rendezvous("env://", timeout=limit))
    store = PrefixStore(_attempt(shared, number, size, 60 * minutes), shared)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=number, world_size=size, timeout=limit)
    failed, deaf = True, ExitStack()
    try:
        yield World(minutes)
        failed = False
    except StellaError as error:
        _tell_once(store)
        error.told = True
        raise
    except RuntimeError as error:  # of a collective, if another process is gone
        deaf.enter_context(_unstopped())
        with suppress(Exception):
            store.wait([FAILED], timedelta(seconds=2))
            raise Elsewhere(2) from None
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        _tell_once(store)
        gone = StellaError(
            "another process of this run is gone, or did not answer in time; start it again with --resume, "
            "or let torchrun --max-restarts do so"
        )
        gone.told = True
        raise gone from error
    finally:
        with deaf:
            if failed and number == 0:
                deaf.enter_context(_unstopped())
                _linger(store, size)
            with suppress(Exception):  # a GPU may wait for another process forever: it has to be told not to
                _abort_process_group() if failed and on_gpu else dist.destroy_process_group()


def _attempt(store: Any, rank: int, count: int, seconds: float) -> str:
    """A name for this start of all processes, which all of them know.

    torchrun may keep its store over restarts, with the addresses of an earlier attempt, and need not count restarts
    alike on all machines. So the first process makes up a name and gives it to each of the others, who prove with a
    word of their own that they are of this start.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + seconds
    if rank:
        store.set(f"stella/hello/{rank}", own)
    while time.monotonic() < end:
        if rank:
            given = store.get(f"stella/welcome/{rank}").decode() if store.check([f"stella/welcome/{rank}"]) else ""
            if given.startswith(own):
                store.set(f"{given.removeprefix(own)}/here/{rank}", "")
                return given.removeprefix(own)
        else:
            missing = [each for each in range(1, count) if not store.check([f"{own}/here/{each}"])]
            if not missing:
                return own
            for each in missing:
                if store.check([f"stella/hello/{each}"]):
                    store.set(f"stella/welcome/{each}", store.get(f"stella/hello/{each}").decode() + own)
        time.sleep(0.02)
    raise StellaError(
        f"not all of {count} processes have started in {seconds / 60:g} minutes; see what the others say, "
        "or raise train.patience_minutes"
    )


def _tell_once(store: Any) -> None:
    """End without a word if another process has told its error, which may be the same or the cause."""
    with suppress(Exception):  # the store may be gone with the process that kept it
        if store.add(FAILED, 1) > 1:
            raise Elsewhere(2) from None


def _linger(store: Any, count: int) -> None:
    """Two seconds at most: this process may keep the store, in which those that fail with it look who has told."""
    end = time.monotonic() + 2
    with suppress(Exception):
        while store.add(FAILED, 0) < count and time.monotonic() < end:
            time.sleep(0.02)


@contextmanager
def _unstopped() -> Iterator[None]:
    """Without SIGTERM, which torchrun sends to the others as soon as one has ended: why is told first."""
    if threading.current_thread() is not threading.main_thread():  # only this thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def own_gpu() -> int:
    """The number of this process's GPU on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) if started() > 1 else 0


def started() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def first() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def restarts() -> int:
    """How often torchrun has started this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job() -> str | None:
    """torchrun's name (--rdzv-id) for its processes and all that it starts in their place; None without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name

"""Measure training steps: one configuration a row, each in a process of its own, through the `Trainer` of any run."""

import math
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from stella.bench.rows import Row
from stella.bench.steps import advance, let_go, make_trainer, settle_draws, step_times, warm_up
from stella.bench.turns import one_after_the_other
from stella.config import resolve
from stella.errors import StellaError
from stella.peers import Peers
from stella.runs.build import check
from stella.runs.config import RunConfig, settle
from stella.runs.progress import say
from stella.train.device import Clock
from stella.train.processes import processes
from stella.train.trainer import Trainer


def measure(
    config: RunConfig, steps: int = 20, packed: Path | None = None, alone: AbstractContextManager[Any] | None = None
) -> Row:
    """Time `steps` steady steps in this process, with a rehearsal memory that is filled first.

    Clips are noise, or read from the folder `packed` that `stella pack` wrote. `alone` is entered after the warm-up,
    when everything is compiled, and holds for all measurements: processes that start together take turns there.

    Processes of torchrun measure a step that they share. What is said of memory and FLOPs is that of one of them.
    """
    with processes(config.train.patience_minutes, config.train.device) as peers:
        return _measure(config, steps, packed, alone or nullcontext(), peers)


def _measure(
    config: RunConfig, steps: int, packed: Path | None, alone: AbstractContextManager[Any], peers: Peers
) -> Row:
    started = time.perf_counter()
    trainer = make_trainer(config, packed, peers)
    machine, size = trainer.runtime, config.stream.batch_size
    warm_up(trainer)
    start_seconds = time.perf_counter() - started
    with alone:
        advance(trainer, 2)
        times = step_times(trainer, steps)
        peak, reserved = machine.peak_bytes(), machine.reserved_bytes()
        rate = matrix_rate(machine.device, machine.autocast_to or torch.float32)  # now: a card's clock varies
        syncs = _host_syncs(trainer)
        del trainer  # counting FLOPs needs its memory
        let_go()
        flop = _flop(replace(config, stream=replace(config.stream, batch_size=math.ceil(size / peers.count))))
        let_go()
    ms, clips = statistics.median(times), size * config.train.accumulate
    tflops = flop / ms / 1e9
    return Row(
        name=config.method if peers.count == 1 else f"{config.method} in {peers.count} processes",
        method=config.method,
        batch=size,
        clips_per_second=1e3 * clips / ms,
        ms=ms,
        ms_p90=sorted(times)[math.ceil(0.9 * len(times)) - 1],
        peak_gib=peak / 2**30,
        reserved_gib=reserved / 2**30,
        gflop_per_clip=flop / math.ceil(size / peers.count) / config.train.accumulate / 1e9,
        tflops=tflops,
        share=tflops / rate,
        host_syncs=syncs,
        start_seconds=start_seconds,
        feed="synthetic" if packed is None else "packed",
    )


def clips_per_second(config: RunConfig, steps: int, alone: AbstractContextManager[Any] | None = None) -> float:
    """The speed of steady training steps, and nothing else of `measure`."""
    trainer = make_trainer(config)
    warm_up(trainer)
    with alone or nullcontext():
        return 1e3 * config.stream.batch_size * config.train.accumulate / statistics.median(step_times(trainer, steps))


def rates(configs: Mapping[str, RunConfig], steps: int) -> Iterator[tuple[str, float | Exception]]:
    """Clips a second of each configuration, or why not, in a fresh process each."""
    return one_after_the_other(clips_per_second, {name: (c, steps) for name, c in configs.items()}, 1)


def _host_syncs(trainer: Trainer) -> int:
    """How often the host waits for the GPU in one step; 0 on a CPU."""
    if trainer.runtime.device.type != "cuda":
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        trainer.advance()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def _flop(config: RunConfig) -> int:
    """FLOPs of a step: matrix products and attention, forward and backward, without activation recomputation."""
    eager = replace(config.train, compile="off", graph=False)
    trainer = make_trainer(replace(config, train=eager))
    settle_draws(trainer)
    with FlopCounterMode(display=False) as counter:
        advance(trainer, 1)
    return int(counter.get_total_flops())


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a large matrix product of noise."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    clock, times = Clock(device), []
    for _ in range(12):
        start = clock.mark()
        a @ b
        times.append(clock.ms(start, clock.mark()))
    return 2 * size**3 / statistics.median(times[2:]) / 1e9


def bench_configs(methods: Sequence[str], batches: Sequence[int], values: Sequence[str]) -> dict[str, RunConfig]:
    """Each method at each batch size, validated; `values` are overrides for all of them.

    Inputs have the sizes of the preset, or those of the data if `values` choose others.
    """
    made = {
        f"{method}, batch {size}": resolve(RunConfig, None, [*values, f"method={method}", f"stream.batch_size={size}"])
        for size in batches
        for method in methods
    }
    usual = RunConfig().data.inputs()
    made = {name: settle(config) if config.data.inputs() != usual else config for name, config in made.items()}
    if not made:
        raise StellaError("nothing to measure: give at least one method and one batch size")
    for config in made.values():
        check(config, unbounded=True)
    return made


def bench(
    configs: Mapping[str, RunConfig], steps: int, packed: Path | None, console: Console, together: int = 1
) -> dict[str, Row]:
    """Measure each configuration in a fresh process, one at a time; `together` of them start at once.

    A configuration that fails is reported and left out; if it is the only one, its error is raised.
    """
    rows = {}
    jobs = {name: (config, steps, packed) for name, config in configs.items()}
    for name, found in one_after_the_other(measure, jobs, together):
        if isinstance(found, BrokenProcessPool):
            found = StellaError(f"measuring {name} was killed; is there enough memory?")
        if isinstance(found, Exception):
            if len(jobs) == 1:
                raise found
            say(console, f"{name} failed: {found}")
            continue
        rows[name] = found
        speed = f"{found.clips_per_second:.1f} clips/s, {found.peak_gib:.2f} GiB"
        say(console, f"{name}: {speed}; steady after {found.start_seconds:.0f} s")
    return rows

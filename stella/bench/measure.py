"""A row is one method at one batch size in a process of its own: steps through the `Trainer` as in any run, with a
memory that is being filled. What is reported is the median of steady steps.
"""

import math
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from stella.bench.rows import Row
from stella.bench.stages import stages_ms
from stella.bench.steps import WARM_UPS, advance, let_go, make_trainer, settle_draws, step_times
from stella.bench.turns import one_after_the_other
from stella.runs.config import RunConfig
from stella.train.device import Clock
from stella.train.trainer import Trainer


def measure(
    config: RunConfig,
    steps: int = 20,
    packed: Path | None = None,
    alone: AbstractContextManager[Any] | None = None,
) -> Row:
    """Train `steps` steady steps as configured (sizes from `config.model`), in this process.

    Clips are synthetic, or read from the folder `packed` that `stella pack` wrote. `alone` is entered once all is
    compiled, and times are taken inside: processes that start together wait there for their turn.
    """
    began = time.perf_counter()
    trainer = make_trainer(config, packed)
    machine, size = trainer.runtime, config.stream.batch_size
    settle_draws(trainer)
    advance(trainer, WARM_UPS)
    started = time.perf_counter() - began
    with alone or nullcontext():
        advance(trainer, 2)
        times = step_times(trainer, steps)
        peak, reserved = machine.peak_bytes(), machine.reserved_bytes()
        rate = matrix_rate(machine.device, machine.autocast_to or torch.float32)  # now: a card's clock moves
        syncs = _host_syncs(trainer)
        del trainer  # what follows takes memory and time of its own
        let_go()
        stages = stages_ms(config)
        let_go()
        flop = _flop(config)
        let_go()
    ms, clips = statistics.median(times), size * config.train.accumulate
    tflops = flop / ms / 1e9
    return Row(
        name=config.method,
        method=config.method,
        batch=size,
        clips_per_second=1e3 * clips / ms,
        ms=ms,
        ms_p90=sorted(times)[math.ceil(0.9 * len(times)) - 1],
        peak_gib=peak / 2**30,
        reserved_gib=reserved / 2**30,
        gflop_per_clip=flop / clips / 1e9,
        tflops=tflops,
        share=tflops / rate,
        host_syncs=syncs,
        start_seconds=started,
        stages=stages,
        feed="synthetic" if packed is None else "packed",
    )


def _host_syncs(trainer: Trainer) -> int:
    """How often the host waits for the device in a step; 0 where there is no device to wait for."""
    if trainer.runtime.device.type != "cuda":
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        trainer.advance()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def _flop(config: RunConfig) -> int:
    """Of a step: matrix products and attention, forward and backward, without what the latter computes again."""
    plain = replace(config.train, compile="off", graph=False)
    trainer = make_trainer(replace(config, train=plain))
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


def bench(
    configs: Mapping[str, RunConfig], batches: Sequence[int], steps: int, packed: Path | None, console: Console
) -> list[Row]:
    """Each configuration at each batch size in a fresh process, one after the other."""
    sized = {
        f"{name}, batch {batch}": (name, replace(config, stream=replace(config.stream, batch_size=batch)))
        for batch in batches
        for name, config in configs.items()
    }
    rows = []
    jobs = {key: (config, steps, packed) for key, (_, config) in sized.items()}
    if len(jobs) > 1:
        console.print(f"{len(jobs)} rows, each in a process of its own", style="dim", highlight=False)
    for key, found in one_after_the_other(measure, jobs, processes=1):
        if isinstance(found, Exception):
            if len(jobs) == 1:
                raise found
            console.print(f"{key} failed: {found}", highlight=False, soft_wrap=True)
            continue  # the others are worth having
        rows.append(replace(found, name=sized[key][0]))
        stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in found.stages.items())
        console.print(
            f"{key}: {found.clips_per_second:.1f} clips/s, {found.peak_gib:.2f} GiB; "
            f"ready after {found.start_seconds:.0f} s; ms: {stages}",
            highlight=False,
        )
    return rows

"""What a step of each method costs: clips a second and peak memory, without what loading costs."""

from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console

from stella.bench.steps import advance, make_trainer, step_times
from stella.bench.turns import one_after_the_other
from stella.errors import StellaError
from stella.runs.config import RunConfig, machine, settle
from stella.runs.environment import environment, provenance


@dataclass(frozen=True)
class Speed:
    clips_per_second: float
    peak_bytes: int  # of the GPU where there is one, else of the process


def measure(config: RunConfig, steps: int, warmup: int, alone: AbstractContextManager[Any] | None = None) -> Speed:
    """The median of steps as a run takes them, after a warm-up. The peak is of this process, whatever it did before:
    `measure_all` gives each configuration a fresh one."""
    config = settle(config)
    trainer = make_trainer(config)
    advance(trainer, warmup)
    clips = config.stream.batch_size * config.train.accumulate
    with alone or nullcontext():
        advance(trainer, 1)
        ms = median(step_times(trainer, steps))
    return Speed(1e3 * clips / ms, trainer.runtime.peak_bytes())


def measure_all(
    configs: Mapping[str, RunConfig], steps: int, warmup: int, console: Console, processes: int = 1
) -> list[dict[str, Any]]:
    """One line for each configuration, each measured alone in a process of its own; so many are started together."""
    rows = []
    jobs = {name: (config, steps, warmup) for name, config in configs.items()}
    for name, speed in one_after_the_other(measure, jobs, processes):
        if isinstance(speed, BrokenProcessPool):
            raise StellaError(f"measuring {name} was killed; is there enough memory?") from speed
        if isinstance(speed, Exception):
            raise speed
        config = configs[name]
        facts = environment(machine(config.train))
        about = {"name": name, "method": config.method, "batch": config.stream.batch_size, "steps": steps}
        sizes = {"model": config.model.preset, "clips": config.data.label, "precision": facts["precision"]}
        rows.append(about | vars(speed) | sizes | provenance(facts))
        console.print(f"{name}: {speed.clips_per_second:.1f} clips/s, {speed.peak_bytes / 1e9:.2f} GB", highlight=False)
    return rows


def has_gpu(config: RunConfig) -> bool:
    return machine(config.train).device.type != "cpu"

"""Where the time of a step goes: operators on a CPU, kernels on a GPU (those of replayed CUDA graphs too)."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from stella.bench.steps import advance, make_trainer, warm_up
from stella.bench.turns import one_after_the_other
from stella.runs.config import RunConfig
from stella.runs.progress import say

STEPS = 3  # profiled, after the warm-up
ROWS = 15


@dataclass(frozen=True)
class Operator:
    name: str
    calls: float  # per step
    ms: float  # per step, without what it calls
    share: float  # of the time of all


def profile(
    config: RunConfig, trace: Path, packed: Path | None = None, alone: AbstractContextManager[Any] | None = None
) -> list[Operator]:
    """The operators of a steady step, the slowest first; writes a trace for chrome://tracing or Perfetto."""
    trainer = make_trainer(config, packed)
    warm_up(trainer)
    on_gpu = trainer.runtime.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with alone or nullcontext(), torch_profile(activities=activities) as profiler:
        advance(trainer, STEPS)
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    device = "CUDA" if on_gpu else "CPU"
    events = [event for event in profiler.key_averages() if event.device_type.name == device]
    us = {event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in events}
    total = sum(us.values())
    found = [
        Operator(event.key, event.count / STEPS, us[event.key] / STEPS / 1e3, us[event.key] / total) for event in events
    ]
    return sorted(found, key=lambda operator: -operator.ms)


def profile_all(configs: Mapping[str, RunConfig], folder: Path, packed: Path | None, console: Console) -> None:
    """Profile each configuration in a fresh process: print its slowest operators and write `folder/NAME.json.gz`."""
    traces = {name: folder / f"{re.sub('[^a-z0-9_]+', '-', name)}.json.gz" for name in configs}
    jobs = {name: (config, traces[name], packed) for name, config in configs.items()}
    for name, found in one_after_the_other(profile, jobs, processes=1):
        if isinstance(found, Exception):
            raise found
        console.print(operators_table(name, found[:ROWS]))
        say(console, f"trace: {traces[name]} (open it in chrome://tracing or ui.perfetto.dev)")


def operators_table(name: str, operators: Sequence[Operator]) -> Table:
    table = Table(title=Text(f"Where the time of a step goes: {name}"), title_justify="left")
    table.add_column("operator", overflow="ellipsis", no_wrap=True, max_width=70)
    for column in ("calls", "ms", "share"):
        table.add_column(column, justify="right")
    for each in operators:
        table.add_row(Text(each.name), f"{each.calls:g}", f"{each.ms:.2f}", f"{each.share:.1%}")
    return table

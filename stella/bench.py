"""How fast a training step is, where its time goes and what it holds: `stella bench`, `benchmarks/train_step.py`.

A row is one method at one batch size in a process of its own: steps through the `Trainer` as in any run, on synthetic
clips that lie on the device or on packed ones from a disk, with a memory that is being filled. What is reported is the
median of steady steps.
"""

import csv
import fcntl
import gc
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from stella.clip import Batch
from stella.data.packed import Packed
from stella.data.stream import Stream, StreamConfig
from stella.errors import ConfigError, StellaError
from stella.methods import stella as stepped
from stella.model.cav import CAV, CAVConfig
from stella.rng import generator
from stella.train.config import RunConfig, model_config
from stella.train.run import build_method
from stella.train.runtime import Clock, runtime
from stella.train.trainer import Trainer

T = TypeVar("T")

WARM_UPS = 12  # steps until every method's shapes have settled, and are compiled and recorded


@dataclass(frozen=True)
class Row:
    name: str
    method: str
    batch: int
    clips_per_second: float
    ms: float  # a step, median
    ms_p90: float
    peak_gib: float  # allocated, everything included
    reserved_gib: float
    gflop_per_clip: float  # counted: matrix products and attention
    tflops: float
    share: float  # of the rate of a large matrix product, measured in the same process
    host_syncs: int  # in one steady step; a stream's own wait for a batch is not among them
    start_seconds: float  # the steps before steady ones: compiling and recording
    stages: dict[str, float]  # ms, on synthetic clips
    feed: str = "synthetic"


FACTS = ("commit", "changed_files", "torch", "gpu", "cores", "precision")
COLUMNS = [*(field.name for field in fields(Row)), *FACTS, "command"]


class Synthetic:
    """Batches of noise on the device, a few in turn, without end: a stream as the trainer knows it."""

    finished_task: int | None = None

    def __init__(self, model: CAVConfig, batch: int, device: torch.device, distinct: int = 4) -> None:
        self.config, self.sources = StreamConfig(batch_size=batch), [range(10**9)]
        noise = generator("bench", device=device)
        shape = (batch, model.frames, 3, model.image_size, model.image_size)
        self._batches = [
            Batch(
                torch.randint(256, shape, generator=noise, device=device, dtype=torch.uint8),
                torch.randn(batch, model.spec_frames, model.mel_bins, generator=noise, device=device),
                torch.arange(i * batch, (i + 1) * batch, device=device),
            )
            for i in range(distinct)
        ]
        self._given = 0

    def __next__(self) -> Batch:
        self._given += 1
        return self._batches[self._given % len(self._batches)]


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
    advance(trainer, WARM_UPS)
    started = time.perf_counter() - began
    with alone or nullcontext():
        advance(trainer, 2)
        times = step_times(trainer, steps)
        peak, reserved = machine.peak_bytes(), machine.reserved_bytes()
        syncs = _host_syncs(trainer)
        del trainer  # what follows takes memory and time of its own
        _let_go()
        stages = _stages(config)
        _let_go()
        rate = matrix_rate(machine.device, machine.autocast_to or torch.float32)
        flop = _flop(config)
        _let_go()
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


class Turn:
    """For processes that start together: inside `with turn:` one is alone, once all are ready."""

    def __init__(self, folder: Path, name: str, processes: int) -> None:
        self.folder, self.name, self.processes = folder, name, processes

    def ready(self) -> None:
        (self.folder / f"ready {self.name}").touch()

    def __enter__(self) -> None:
        _let_go()
        self.ready()
        while len(list(self.folder.glob("ready *"))) < self.processes:
            time.sleep(0.1)
        self._lock = (self.folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._lock.close()


def one_after_the_other(
    function: Callable[..., T], jobs: Mapping[str, tuple[Any, ...]], processes: int
) -> Iterator[tuple[str, T | Exception]]:
    """`function(*job, alone=…)` of each job in a fresh process; what failed has its error.

    So many processes start together, since compiling is the processor's work; each measures inside `alone`.
    """
    names = list(jobs)
    for start in range(0, len(names), processes):
        group = names[start : start + processes]
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(len(group), get_context("spawn")) as pool:
            turns = {name: Turn(Path(folder), name.replace("/", "-"), len(group)) for name in group}
            going = {name: pool.submit(_job, function, jobs[name], turns[name]) for name in group}
            for name, each in going.items():
                try:
                    yield name, each.result()
                except Exception as error:  # the others are worth having
                    yield name, error


def _job(function: Callable[..., T], job: tuple[Any, ...], turn: Turn) -> T:
    try:
        return function(*job, alone=turn)
    finally:
        turn.ready()  # whoever fails keeps nobody waiting


def make_trainer(config: RunConfig, packed: Path | None = None) -> Trainer:
    """As a run has it, on synthetic batches unless there is a folder of packed clips."""
    machine, c = runtime(config.train.device, config.train.precision, config.train.compile), model_config(config)
    size = config.stream.batch_size
    if packed is None:
        stream = cast(Stream, Synthetic(c, size, machine.device))
    else:
        shape = replace(config.stream, epochs=10**6, drop_last=True, seed=config.seed)
        shape = replace(shape, size=c.image_size, spec_frames=c.spec_frames, mels=c.mel_bins)
        clips = Packed(packed)
        sizes = {"model.image_size": clips.header.pixels, "model.spec_frames": clips.header.spec_frames}
        if (c.image_size, c.spec_frames) != tuple(sizes.values()):
            fitting = " ".join(f"{name}={size}" for name, size in sizes.items())
            raise ConfigError(f"{packed} was packed for other sizes than the model's; set {fitting}")
        if len(clips) < size:
            raise ConfigError(f"{packed} has {len(clips)} clips, fewer than a batch of {size}; choose smaller batches")
        stream = Stream([("packed", clips)], shape, machine.device)
    return Trainer(build_method(config, machine.device), stream, config.train, machine)


def _let_go() -> None:
    """Give a trainer's memory back, for the next one and for other processes."""
    gc.collect()
    torch.cuda.empty_cache()


def step_times(trainer: Trainer, steps: int) -> list[float]:
    """Milliseconds of each of these steps, without the host waiting in between."""
    clock = Clock(trainer.runtime.device)
    marks = [clock.mark()]
    for _ in range(steps):
        trainer.advance()
        marks.append(clock.mark())
    return [clock.ms(*step) for step in pairwise(marks)]


def advance(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.advance()
    trainer.settle()


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


STAGES = {  # of what is called on the method in a step
    **dict.fromkeys(("draw", "after_step", "follow"), "memory"),
    **dict.fromkeys(("scores", "choose"), "select"),
    **dict.fromkeys(("virtual_weights", "gradients"), "look ahead"),
    "matching": "avm",
    "clip_parts": "forward",
}
PLACES: dict[tuple[Any, str], str] = {
    (stepped, "score"): "score",
    (CAV, "pretrain"): "forward",
    (CAV, "forward"): "look ahead",  # by `functional_call`
    (torch.autograd, "backward"): "backward",
}


@dataclass
class Span:
    stage: str
    start: Any
    inside: "Span | None"  # of another stage, which then counts without this one
    end: Any = None


def _stages(config: RunConfig) -> dict[str, float]:
    """Milliseconds of each stage of a step, in the graph where there is one: a second recording, which takes some
    percent longer for the marks in it."""
    trainer = make_trainer(config)
    method, clock = trainer.method, Clock(trainer.runtime.device)
    spans: list[Span] = []
    inside: list[Span] = []

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            span = Span(stage, clock.mark(inside=True), inside[-1] if inside else None)
            spans.append(span)
            inside.append(span)
            out = function(*args, **more)
            span.end = clock.mark(inside=True)
            inside.pop()
            return out

        return run

    whole = trainer.compute

    def step(batches: Any) -> Any:
        spans.clear()
        return timed("other", whole)(batches)

    for name, stage in STAGES.items():
        if name in dir(method):
            setattr(method, name, timed(stage, getattr(method, name)))
    trainer.optimizer.step = timed("optimiser", trainer.optimizer.step)  # type: ignore[method-assign]
    trainer.replace_compute(step)
    originals = {place: getattr(*place) for place in PLACES}
    try:
        for place, stage in PLACES.items():
            setattr(*place, timed(stage, originals[place]))
        advance(trainer, WARM_UPS + 2)
    finally:
        for place, original in originals.items():
            setattr(*place, original)
    found: dict[str, float] = {}
    for span in spans:
        ms = clock.ms(span.start, span.end)
        found[span.stage] = found.get(span.stage, 0.0) + ms
        if span.inside is not None:
            found[span.inside.stage] -= ms
    other = found.pop("other")
    return {stage: ms for stage, ms in found.items() if ms >= 0.01} | {"other": other}


def _flop(config: RunConfig) -> int:
    """Floating-point operations of a step: matrix products and attention, forward and backward, as they are run."""
    plain = replace(config.train, compile="off", graph=False)
    trainer = make_trainer(replace(config, train=plain))
    advance(trainer, WARM_UPS // 2)
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


def write_rows(path: Path, rows: Sequence[Row], command: str, facts: Mapping[str, Any]) -> None:
    """Append rows to a CSV, with what one needs to get them again."""
    check_columns(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            table.writeheader()
        for row in rows:
            flat: dict[str, Any] = {
                name: f"{value:.4g}" if isinstance(value, float) else value for name, value in asdict(row).items()
            }
            flat["stages"] = " ".join(f"{stage}={ms:.1f}" for stage, ms in row.stages.items())
            table.writerow(flat | {name: facts[name] for name in FACTS} | {"command": command})


def check_columns(path: Path) -> None:
    """Refuse a file of something else."""
    if path.exists() and path.read_text(encoding="utf-8").split("\n")[0] != ",".join(COLUMNS):
        raise StellaError(f"{path} has other columns than rows of a benchmark; choose another file")


def rows_table(rows: Sequence[Row]) -> Table:
    """Side by side, clips/s also as a ratio to the first row of the same batch size."""
    table = Table("method", "feed", title="One training step", title_justify="left")
    for column in ("batch", "clips/s", "ratio", "ms", "GiB", "GFLOP/clip", "TFLOP/s", "of peak", "syncs"):
        table.add_column(column, justify="right")
    first: dict[int, float] = {}
    for row in rows:
        ratio = row.clips_per_second / first.setdefault(row.batch, row.clips_per_second)
        figures = f"{row.clips_per_second:.1f}", f"{ratio:.2f}", f"{row.ms:.1f}", f"{row.peak_gib:.2f}"
        work = f"{row.gflop_per_clip:.3g}", f"{row.tflops:.3g}", f"{row.share:.0%}", str(row.host_syncs)
        table.add_row(row.name, row.feed, str(row.batch), *figures, *work)
    return table


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

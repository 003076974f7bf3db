"""What a run is about to do, in the lines that it prints before its first step."""

from collections.abc import Sequence

from stella.columns import bytes_per_clip
from stella.data.stream import StreamConfig
from stella.data.tasks import ONLY_TASK, Tasks
from stella.errors import number_of, some_of
from stella.memory import Memory

FEW_STEPS = 100  # fewer teach a model next to nothing
FEW_CLIPS = 20  # of a task to evaluate on: one clip more or less is 5 points


def told(memory: Memory) -> str:
    """`2,000 clips`, or `2,000 clips, 812 of them distinct` where epochs brought some several times."""
    held, distinct = len(memory), memory.distinct
    return number_of(held, "clip") + (f", {distinct:,} of them distinct" if distinct < held else "")


def plan(
    train: Tasks, evaluation: Tasks, stream: StreamConfig, steps: int, memory: Memory | None, accumulate: int = 1
) -> list[str]:
    """Clips, steps, epochs and memory; then what is too little to learn or to measure, with what to change."""
    sizes, judged = [len(source) for _, source in train], sum(len(source) for _, source in evaluation)
    each = f"{sizes[0]:,} each" if len(set(sizes)) == 1 else f"{min(sizes):,} to {max(sizes):,} each"
    clips = number_of(stream.batch_size * accumulate, "clip")
    lines = [
        f"{number_of(len(train), 'task')}, {number_of(sum(sizes), 'clip')}{f' ({each})' if len(sizes) > 1 else ''}: "
        f"{number_of(steps, 'step')} of {clips}, {number_of(stream.epochs, 'epoch')} of "
        f"each task; evaluated on {number_of(judged, 'other clip')}"
    ]
    if memory is not None:
        size = memory.room * bytes_per_clip(memory.columns)
        lines.append(f"rehearsal memory: {number_of(memory.room, 'clip')} in {size / 1e6:,.0f} MB")
        if memory.room < memory.capacity:
            lines[-1] += f": all that this run brings, {memory.capacity:,} were allowed"
    return lines + too_little([(name, len(source)) for name, source in evaluation], stream, steps)


def too_little(judged: Sequence[tuple[str, int]], stream: StreamConfig, steps: int) -> list[str]:
    """What is too little to learn from or to measure with, and what to change; `judged` are names and their clips."""
    needed = -(-stream.epochs * FEW_STEPS // max(1, steps))
    smaller = max(1, stream.batch_size // 4)
    batch = f", or stream.batch_size={smaller}" if smaller < stream.batch_size else ""
    return [*few_steps(steps, f"set stream.epochs={needed}{batch}, or add clips"), *few_clips(judged)]


def few_steps(steps: int, remedy: str, since: str = "") -> list[str]:
    """A line if a model learns next to nothing in so many steps."""
    said = f"only {number_of(steps, 'step')}{since}: a model learns next to nothing in so few; {remedy}"
    return [said] if steps < FEW_STEPS else []


def few_clips(judged: Sequence[tuple[str, int]]) -> list[str]:
    """A line if some of these have too few clips to measure with."""
    few = [f"{name} ({count})" if name != ONLY_TASK else str(count) for name, count in judged if count < FEW_CLIPS]
    return [f"few clips to evaluate on: {some_of(few, 3)}; figures of so few say little"] if few else []

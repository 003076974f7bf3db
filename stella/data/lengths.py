"""How many clips of a source are shorter than they are taken for, told before a run begins."""

from contextlib import closing
from dataclasses import dataclass
from statistics import median

from stella.clip import ArraySource, Source, Timed
from stella.data.chunk import Job, make
from stella.data.workers import Tick
from stella.errors import ClipError, number_of, skippable

LOOKED_AT = 200  # clips, spread evenly over a source
ENOUGH = 0.9  # share of a clip: clips of 10 s under a plan of 10.24 are nothing to tell
SHORT = "short"  # what `stella prepare` calls a clip of less


@dataclass(frozen=True)
class _Ruler:
    """Measures clips in a worker: a file may hang or kill who opens it."""

    source: Source

    def __call__(self, job: Job, tick: Tick) -> float | None:
        tick(0)
        [index] = job.indices
        try:
            if job.bad or not isinstance(self.source, Timed):
                return None
            with skippable(f"clip {index}"):
                return self.source.seconds(index)
        except ClipError:  # it is skipped and listed when it is decoded
            return None


def too_short(source: Source, seconds: float, workers: int = 0, time_limit: float = 10.0) -> str | None:
    """A sentence about the clips that end long before `seconds`; None if there are none, or lengths are unknown."""
    total = len(source)
    looked_at = total if isinstance(source, ArraySource) else min(total, LOOKED_AT)
    jobs = (Job(0, 0, number, [number * total // looked_at]) for number in range(looked_at))
    with closing(make(_Ruler(source), jobs, 0 if isinstance(source, ArraySource) else workers, 4, time_limit)) as made:
        found = [length for length in made if length is not None]
    short = [length for length in found if length < ENOUGH * seconds]
    if not short:
        return None
    among = number_of(looked_at, "clip") + ("" if looked_at == total else f" looked at (of {total:,})")
    half = median(short)
    remedy = "pack them again with" if isinstance(source, ArraySource) else "set"
    return (
        f"{len(short):,} of {among} end before the {seconds:g} s that a clip takes (median {half:.3g} s), and the rest "
        f"of their spectrograms is padding; {remedy} data.duration={half:.2g}, or leave them out"
    )

"""Steps as CUDA graphs: recorded once for each shape, then replayed without launching each kernel from the host.

A graph holds a whole step, from the losses to the memory. It must not depend on values, and the only host state that
changes from step to step is handled here: random generators, which a replay advances, and the number of clips the
memory was offered.

A step of several processes is recorded with what they send one another, by NCCL: all record and replay the same steps.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from stella.clip import Batch
from stella.memory import Memory

Compute = Callable[[Sequence[Batch]], Tensor]
Shape = tuple[int, ...]

WARM_UPS = 3  # eager steps of a shape before it is recorded, to compile kernels and allocate workspaces
SHARED_WARM_UPS = 11  # of several processes: DDP measures itself in the first ten
MOST_GRAPHS = 6
MOST_PROCESSES = 64  # with more, messages of one size would be mostly empty (results/scaling)


def records(device: str, memory: str, divided: bool = False, processes: int = 1) -> tuple[bool, str]:
    """Whether steps can be recorded with the model and the memory on these types of device, and a remark if not.

    `divided`: processes divide the weights.
    """
    if device != "cuda":
        return False, ""
    reasons = {
        "weights that processes divide are gathered by their hosts": divided,
        f"more than {MOST_PROCESSES} processes send messages whose size hosts have to know": processes > MOST_PROCESSES,
        "the rehearsal memory is not on the GPU": memory != device,
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    remark = f"steps are not recorded as CUDA graphs: {why}; their parts are compiled all the same"
    return not why, remark if why else ""


@cache
def side(device: torch.device) -> torch.cuda.Stream:
    """The stream that graphs are recorded on. Eager steps before run there too, and DDP has to be made on it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Recorded:
    graph: torch.cuda.CUDAGraph
    batches: list[Batch]  # static inputs
    out: Tensor
    offered: int  # clips that a replay offers to the memory


class Graphs:
    """`graphs(batches)` returns `compute(batches)`, from a replay if a step of this shape was recorded."""

    def __init__(
        self,
        compute: Compute,
        memory: Memory | None,
        generators: Iterable[torch.Generator],
        device: torch.device,
        warm_ups: int = WARM_UPS,
    ) -> None:
        self.compute, self.memory, self.warm_ups = compute, memory, warm_ups
        self.generators = [*generators, *([memory.generator] if memory is not None else [])]
        self._times: dict[Shape, int] = {}
        self._recorded: dict[Shape, Recorded] = {}
        self._side = side(device)

    def __call__(self, batches: Sequence[Batch], record: bool = True) -> Tensor:
        if not record:
            return self._eager(batches)
        drawn = 0 if self.memory is None else self.memory.drawable
        shape = (drawn, *(rows for batch in batches for rows in (batch.clips, len(batch))))
        self._times[shape] = self._times.get(shape, 0) + 1
        recorded = self._recorded.get(shape)
        if recorded is None and self._times[shape] > self.warm_ups and len(self._recorded) < MOST_GRAPHS:
            recorded = self._recorded[shape] = self._record(batches)
        return self._eager(batches) if recorded is None else self._replay(recorded, batches)

    def _eager(self, batches: Sequence[Batch]) -> Tensor:
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            out = self.compute(batches)
        main.wait_stream(self._side)
        return out

    def _record(self, batches: Sequence[Batch]) -> Recorded:
        static = [
            replace(batch, video=batch.video.clone(), audio=batch.audio.clone(), ids=batch.ids.clone())
            for batch in batches
        ]
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        before = 0 if self.memory is None else self.memory.offered
        pool = next(iter(self._recorded.values())).graph.pool() if self._recorded else None
        # Other threads, NCCL's and the reader's among them, may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=self._side, capture_error_mode="thread_local"):
            out = self.compute(static)
        offered = 0
        if self.memory is not None:
            offered, self.memory.offered = self.memory.offered - before, before
        return Recorded(graph, static, out, offered)

    def _replay(self, recorded: Recorded, batches: Sequence[Batch]) -> Tensor:
        for static, batch in zip(recorded.batches, batches, strict=True):
            static.video.copy_(batch.video, non_blocking=True)
            static.audio.copy_(batch.audio, non_blocking=True)
            static.ids.copy_(batch.ids, non_blocking=True)
        recorded.graph.replay()
        if self.memory is not None:
            self.memory.offered += recorded.offered
        return recorded.out

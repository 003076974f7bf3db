"""Steps as CUDA graphs: recorded once for each shape, then replayed without launching each kernel from the host.

A graph holds a whole step, from the losses to the memory. It must not depend on values, and the only host state that
changes from step to step is handled here: random generators, which a replay advances, and the number of clips the
memory was offered.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stella.clip import Batch
from stella.memory import Memory

Compute = Callable[[Sequence[Batch]], Tensor]
Shape = tuple[int, ...]

WARM_UPS = 3  # eager steps of a shape before it is recorded, to compile kernels and allocate workspaces
MOST_GRAPHS = 6


def records(device: str, memory: str, processes: int) -> tuple[bool, str]:
    """Whether steps can be recorded with the model and the memory on these types of device, and a remark if not."""
    if device != "cuda":
        return False, ""
    why = "several processes send one another what they draw, which their hosts decide" if processes > 1 else ""
    if not why and memory != device:
        why = "the rehearsal memory is not on the GPU"
    return (
        not why,
        f"steps are not recorded as CUDA graphs: {why}; their parts are compiled all the same" if why else "",
    )


@dataclass(frozen=True)
class Recorded:
    graph: torch.cuda.CUDAGraph
    batches: list[Batch]  # static inputs
    out: Tensor
    offered: int  # clips that a replay offers to the memory


class Graphs:
    """`graphs(batches)` returns `compute(batches)`, from a replay if a step of this shape was recorded."""

    def __init__(self, compute: Compute, memory: Memory | None, generators: Iterable[torch.Generator]) -> None:
        self.compute, self.memory = compute, memory
        self.generators = [*generators, *([memory.generator] if memory is not None else [])]
        self._times: dict[Shape, int] = {}
        self._recorded: dict[Shape, Recorded] = {}
        # Graphs are recorded on a side stream, so the eager steps before run there too.
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, batches: Sequence[Batch], record: bool = True) -> Tensor:
        if not record:
            return self._eager(batches)
        drawn = 0 if self.memory is None else self.memory.drawable
        shape = (drawn, *(len(batch) for batch in batches))
        self._times[shape] = self._times.get(shape, 0) + 1
        recorded = self._recorded.get(shape)
        if recorded is None and self._times[shape] > WARM_UPS and len(self._recorded) < MOST_GRAPHS:
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
        static = [Batch(batch.video.clone(), batch.audio.clone(), batch.ids.clone()) for batch in batches]
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        before = 0 if self.memory is None else self.memory.offered
        pool = next(iter(self._recorded.values())).graph.pool() if self._recorded else None
        with torch.cuda.graph(graph, pool=pool, stream=self._side):
            out = self.compute(static)
        offered = 0
        if self.memory is not None:
            offered, self.memory.offered = self.memory.offered - before, before
        return Recorded(graph, static, out, offered)

    def _replay(self, recorded: Recorded, batches: Sequence[Batch]) -> Tensor:
        for static, batch in zip(recorded.batches, batches, strict=True):
            for into, value in zip(vars(static).values(), vars(batch).values(), strict=True):
                into.copy_(value, non_blocking=True)
        recorded.graph.replay()
        if self.memory is not None:
            self.memory.offered += recorded.offered
        return recorded.out

"""The loop of all methods: batches in, steps out. Nothing else calls backward, steps or casts.

A step whose loss or gradients are not finite is left out: weights, optimiser and memory stay as they were. That one
flag is read from the device once a step, because the memory must not take what such a step computed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from stella.clip import Batch
from stella.data.stream import Stream
from stella.methods.base import Losses, Method
from stella.train.config import TrainConfig
from stella.train.runtime import Runtime


@dataclass
class Counters:
    step: int = 0  # taken or left out
    clips: int = 0
    left_out: int = 0
    left_out_in_a_row: int = 0


class Meter:
    """Means of the loss and its parts since they were last read. The sums stay on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, losses: Losses) -> None:
        for name, value in {"loss": losses.total, **losses.parts}.items():
            now = value.detach().double()
            self._sums[name] = self._sums[name] + now if name in self._sums else now
            self._counts[name] = self._counts.get(name, 0) + 1

    def read(self) -> dict[str, float]:
        means = {name: total.item() / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._sums = {name: total.to(device) for name, total in state["sums"].items()}
        self._counts = dict(state["counts"])


class Trainer:
    """A method, a stream, an optimiser. `advance` until it says that the stream is at its end."""

    def __init__(self, method: Method, stream: Stream, config: TrainConfig, runtime: Runtime) -> None:
        self.method, self.stream, self.config, self.runtime = method, stream, config, runtime
        self.counters = Counters()
        self.meter = Meter()
        self.not_finite: list[str] = []  # which parts of the loss made the last step be left out
        batches = [len(Stream([("", source)], stream.config)) for source in stream.sources]
        self.steps = sum(math.ceil(each / config.accumulate) for each in batches)  # all, if no clip is skipped
        self._parameters = [p for p in method.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(
            self._parameters,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=runtime.device.type == "cuda",
        )

    def advance(self) -> bool:
        """One step on the next `accumulate` batches; False if there are no more."""
        taken: list[tuple[Batch, Losses]] = []
        for batch in self._next_batches():
            with self.runtime.autocast():
                losses = self.method.loss(batch)
            torch.autograd.backward(losses.total)
            taken.append((batch, losses))
        if not taken:
            return False
        self.counters.step += 1
        self.counters.clips += sum(len(batch) for batch, _ in taken)
        if self._finite([losses for _, losses in taken]):
            self._step()
            for batch, losses in taken:
                with torch.no_grad():
                    self.method.after_step(batch, losses, torch.ones((), dtype=torch.bool))
                self.meter.add(losses)
            self.counters.left_out_in_a_row = 0
        else:
            self.counters.left_out += 1
            self.counters.left_out_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        return True

    def _next_batches(self) -> Iterator[Batch]:
        """The last step of a task takes the batches that are left, as its last batch takes the clips that are left."""
        for _ in range(self.config.accumulate):
            if (batch := next(self.stream, None)) is None:
                return
            yield batch
            if self.stream.finished_task is not None:
                return

    def _finite(self, losses: list[Losses]) -> bool:
        """Whether the step may be taken; the gradients become the mean over the batches."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if len(losses) > 1:
            for gradient in gradients:
                gradient /= len(losses)
        values = [get_total_norm(gradients), *(each.total.detach() for each in losses)]
        if torch.stack([value.isfinite() for value in values]).all():
            return True
        bad = {name for each in losses for name, part in each.parts.items() if not part.isfinite()}
        self.not_finite = sorted(bad) or ["the gradients"]
        return False

    def _step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * self._rate()
        self.optimizer.step()

    def _rate(self) -> float:
        """Of the learning rate at this step: up over the warm-up, down over the decay, 1 between."""
        step, warmup = self.counters.step, self.config.warmup_steps
        falling, left = self.config.decay * self.steps, self.steps + 1 - step
        return min(1.0, step / warmup if warmup else 1.0, left / falling if falling else 1.0)

    def state_dict(self) -> dict[str, Any]:
        memory = self.method.memory
        return {
            "counters": asdict(self.counters),
            "meter": self.meter.state_dict(),
            "method": self.method.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": None if memory is None else memory.state_dict(),
            "generators": {name: generator.get_state() for name, generator in self.method.generators.items()},
            "stream": self.stream.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counters = Counters(**state["counters"])
        self.meter.load_state_dict(state["meter"], self.runtime.device)
        self.method.load_state_dict(state["method"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.method.memory is not None:
            self.method.memory.load_state_dict(state["memory"])
        for name, generator in self.method.generators.items():
            generator.set_state(state["generators"][name])
        self.stream.load_state_dict(state["stream"])

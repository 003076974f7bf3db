"""The training loop of all methods: batches in, steps out. Only this file calls backward, steps or casts.

(Others take gradients without a step: `fast/early.py`, virtual steps in `methods/virtual.py` and `train/fsdp.py`;
`embed/matching.py` trains a module of its own.)

A step with a non-finite loss or gradient is skipped: weights, moving averages, optimiser, memory and the method's
buffers stay as they were. The device decides that. On a GPU the host runs ahead and learns of a skipped step later, at
`settle` at the latest.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from stella.clip import Batch
from stella.data.stream import Stream
from stella.errors import StellaError
from stella.fast.allocator import keep_freed_memory
from stella.fast.graphs import SHARED_WARM_UPS, WARM_UPS, Graphs, records, side
from stella.fast.parts import applied
from stella.methods.base import Losses, Method
from stella.model.slow import SlowWeights
from stella.peers import ALONE, Peers
from stella.train.config import TrainConfig
from stella.train.device import Later, Runtime
from stella.train.distributed import World
from stella.train.sharing import shared

if TYPE_CHECKING:
    from stella.train.fsdp import Sharded

Module = TypeVar("Module", bound=nn.Module)


@dataclass
class Counters:
    step: int = 0  # taken or skipped
    clips: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


OFTEN = 200  # steps with a short batch size before it is compiled; fewer do not repay compiling


class Meter:
    """Means of the loss and its parts over the steps taken since the last `read`. The sums stay on the device."""

    def __init__(self, device: torch.device) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, losses: Losses, taken: Tensor) -> None:
        for name, value in {"loss": losses.total, **losses.parts}.items():
            sums = self._sums.setdefault(name, torch.zeros_like(self._count))
            sums += torch.where(taken, value.detach().double(), 0)
        self._count += taken

    def read(self) -> dict[str, float]:
        count = self._count.item()
        means = {name: total.item() / count for name, total in self._sums.items()} if count else {}
        for total in (self._count, *self._sums.values()):
            total.zero_()
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": {name: total.clone() for name, total in self._sums.items()}, "count": self._count.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = {name: total.to(self._count.device) for name, total in state["sums"].items()}
        self._count.copy_(state["count"])


class Trainer:
    """A method, a stream and an optimiser. Call `advance` until it returns False at the end of the stream."""

    def __init__(
        self, method: Method, stream: Stream, config: TrainConfig, runtime: Runtime, peers: Peers = ALONE
    ) -> None:
        self.method, self.stream, self.config, self.runtime = method, stream, config, runtime
        self.world = peers if isinstance(peers, World) else None
        self.counters = Counters()
        self.meter = Meter(runtime.device)
        self.skipped: list[tuple[int, list[str]]] = []  # steps, and what was not finite
        self.slow = None if config.ema is None else SlowWeights(method.model, config.ema)
        self.steps = sum(self.steps_of(len(source)) for source in stream.sources)  # in all, if no clip is skipped
        recorded, self.remark = self._records(peers)
        self._sharded = self._divided()
        with torch.cuda.stream(side(runtime.device)) if recorded else nullcontext():
            self._averaging = self._sharded or (self.world.averaging(method) if self.world else None)
        if self.world:
            self.world.static = recorded
            if method.memory is not None:
                method.memory.split(self.world)
        self._parameters = [p for p in method.parameters() if p.requires_grad]
        saved = method.state_dict().keys()
        self._buffers = [buffer for name, buffer in method.named_buffers() if name in saved]
        on_gpu = runtime.device.type == "cuda"
        if not on_gpu:
            keep_freed_memory()
        self._rates = [(torch.tensor(config.lr * factor, device=runtime.device), factor) for factor in method.rates]
        kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
        self.optimizer = kind(
            [{"params": each, "lr": rate} for each, (rate, _) in zip(method.groups(), self._rates, strict=True)],
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
            capturable=on_gpu,
        )
        method.attach(self.optimizer)
        self._names: list[str] = []  # of the loss's parts
        self._unsettled: deque[tuple[int, Later]] = deque()
        self._graphs = None
        if recorded:
            warm_ups = SHARED_WARM_UPS if self.world else WARM_UPS
            self._graphs = Graphs(self.compute, method.memory, method.generators.values(), runtime.device, warm_ups)
        self._short: Counter[tuple[int, ...]] = Counter()  # how often short batches of these sizes have come

    def _records(self, peers: Peers) -> tuple[bool, str]:
        """Whether steps are recorded, and a remark if they cannot be."""
        memory = self.method.memory
        where = self.runtime.device if memory is None else memory.device
        divided = self.config.shard and not peers.alone
        recorded, remark = records(self.runtime.device.type, where.type, divided, peers.count)
        return (recorded, remark) if self.config.graph else (False, "")

    def _divided(self) -> "Sharded | None":
        """The method with its weights divided among the processes, if that is wanted."""
        if self.world is None or not self.config.shard:
            return None
        from stella.train.fsdp import Sharded  # takes a second to import

        return Sharded(self.method, self.slow, self.runtime)

    def steps_of(self, clips: int) -> int:
        """The steps of a task with so many clips, if none is skipped."""
        return math.ceil(self.stream.config.batches(clips) / self.config.accumulate)

    def advance(self) -> bool:
        """One step on the next `accumulate` batches; False if there are no more."""
        batches = list(self._next_batches())
        if not batches:
            return False
        clips, memory = sum(batch.clips for batch in batches), self.method.memory
        self.counters.step += 1
        self.counters.clips += clips
        for rate, factor in self._rates:
            rate.fill_(factor * self._rate_now())
        compiled = self.runtime.compile and self._compiles(batches)
        with applied(compiled, self.config.activations, self.runtime.compile, self._sharded is None):
            finite = self._graphs(batches, compiled == self.runtime.compile) if self._graphs else self.compute(batches)
        if memory is not None and 0 < memory.offered <= clips:
            memory.recount()  # if the very first step was skipped, there is nothing to draw
        if memory is not None and self.world and not self._graphs:
            memory.prefetch()
        self._unsettled.append((self.counters.step, Later(finite)))
        self.settle(wait=False)
        return True

    def _compiles(self, batches: Sequence[Batch]) -> bool:
        """Whether steps of these sizes are compiled, which takes up to a minute for each. Short batches, of which
        every round may bring a new size, are computed by plain code until they have come often."""
        sizes, full = tuple(batch.clips for batch in batches), self.stream.config.batch_size
        if all(batch.clips == full for batch in batches):
            return True
        self._short[sizes] += 1
        return self._short[sizes] > OFTEN

    def compute(self, batches: Sequence[Batch]) -> Tensor:
        """A step on the device, from the losses to the memory; returns which parts are finite, bool [parts + 1].

        It neither waits for the device nor depends on values, so that it can be recorded as a CUDA graph.
        """
        before, computed = [buffer.clone() for buffer in self._buffers], list[Losses]()
        for batch in batches:
            with self._sharing(batch, last=batch is batches[-1]), self.runtime.autocast():
                losses = (self._averaging or self.method.loss)(batch)
            torch.autograd.backward(losses.total)
            computed.append(self.world.with_mean_parts(losses) if self.world else losses)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if len(batches) > 1:
            torch._foreach_div_(gradients, float(len(batches)))
        with torch.no_grad():
            self.method.before_step()
        self._names = list(computed[0].parts)
        parts = [torch.stack([losses.parts[name].detach() for losses in computed]).sum() for name in self._names]
        norm = get_total_norm(gradients)
        finite = torch.stack([*parts, self._sharded.full_tensor(norm) if self._sharded else norm]).isfinite()
        taken = finite.all()
        self.optimizer.found_inf = (~taken).float()  # type: ignore[attr-defined]  # fused Adam skips the step
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._after(batches, computed, taken)
        with torch.no_grad():
            for buffer, old in zip(self._buffers, before, strict=True):
                buffer.copy_(torch.where(taken, buffer, old))
        return finite

    @torch.no_grad()
    def _after(self, batches: Sequence[Batch], computed: Sequence[Losses], taken: Tensor) -> None:
        """Memory and moving averages; where `taken` is false, they do not change."""
        method = self.method
        with nullcontext() if method.memory is None else method.memory.commit_if(taken):
            for batch, losses in zip(batches, computed, strict=True):
                with self._sharing(batch):
                    method.after_batch(batch, losses)
                self.meter.add(losses, taken)
            method.after_step()
        for slow in (*method.modules(), self.slow):
            if isinstance(slow, SlowWeights):
                slow.follow(method.model, taken)

    def settle(self, wait: bool = True) -> None:
        """Move finished steps into the counters and `skipped`; with `wait` all steps, whose end is waited for."""
        while self._unsettled and (wait or self._unsettled[0][1].known):
            step, later = self._unsettled.popleft()
            finite = later.read()
            if all(finite):
                self.counters.skipped_in_a_row = 0
                continue
            self.counters.skipped += 1
            self.counters.skipped_in_a_row += 1
            bad = [name for name, fine in zip(self._names, finite, strict=False) if not fine]
            self.skipped.append((step, sorted(bad) or ["the gradients"]))

    def _next_batches(self) -> Iterator[Batch]:
        """The batches of a step. The last step of a task takes what is left."""
        for _ in range(self.config.accumulate):
            if (batch := next(self.stream, None)) is None:
                return
            yield self.world.receive(batch, self.stream.total, self.method.memory) if self.world else batch
            if self.stream.finished_task is not None:
                return

    @contextmanager
    def _sharing(self, batch: Batch, last: bool = True) -> Iterator[None]:
        """What processes share of a batch."""
        if self.world is None or self._averaging is None:
            yield
        else:
            with shared(self.world, batch), self._averaging.gradient_sync(last):
                yield

    def _rate_now(self) -> float:
        """The learning rate: linear warm-up, then constant with a linear decay at the end, or a cosine that would be 0
        in the step after the last."""
        step, warmup, cosine = self.counters.step, self.config.warmup_steps, self.config.schedule == "cosine"
        if cosine and step > warmup:
            return self.config.lr * (1 + math.cos(math.pi * (step - 1 - warmup) / max(1, self.steps - warmup))) / 2
        falling, left = 0 if cosine else self.config.decay * self.steps, self.steps + 1 - step
        share = min(1.0, step / warmup if warmup else 1.0, left / falling if falling else 1.0)
        return self.config.lr * share

    def plain(self, module: Module) -> Module:
        """One of the method's or the slow models, with all its weights; a copy of it if processes divide them."""
        return self._sharded.plain(module) if self._sharded else module

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        memory = self.method.memory
        return {
            "counters": asdict(self.counters),
            "meter": self.meter.state_dict(),
            "method": self.method.state_dict(),
            "slow": None if self.slow is None else self.slow.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": None if memory is None else memory.state_dict(),
            "generators": {name: generator.get_state() for name, generator in self.method.generators.items()},
            "stream": self.stream.state_dict(),
            "device": self.runtime.device.type,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        here, there = self.runtime.device.type, state["device"]
        if here != there:
            raise StellaError(
                f"this run was started with train.device={there} and cannot resume on {here}, where random numbers "
                f"differ; resume it on a machine with {there}, or start a new run"
            )
        if self._sharded:
            state = self._sharded.cut(state, self.optimizer)
        self.counters = Counters(**state["counters"])
        self.meter.load_state_dict(deepcopy(state["meter"]))  # it keeps the tensors, as the optimiser does
        self.method.load_state_dict(state["method"])
        if self.slow is not None:
            self.slow.load_state_dict(state["slow"])
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))
        for group, (rate, _) in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        if self.method.memory is not None:
            self.method.memory.load_state_dict(state["memory"])
        for name, generator in self.method.generators.items():
            generator.set_state(state["generators"][name])
        self.stream.load_state_dict(state["stream"])

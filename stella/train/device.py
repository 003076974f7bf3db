"""The machine a run is on: device, precision, memory, and the facts that are written beside results."""

import re
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from stella.errors import ConfigError
from stella.fast.compile import Activations, lacking

Precision = Literal["auto", "float32", "bfloat16"]
Compile = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Runtime:
    device: torch.device
    autocast_to: torch.dtype | None  # None: everything in float32
    compile: bool = False  # the model's parts
    remark: str = ""  # what a user should know about this

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast_to, enabled=self.autocast_to is not None)

    def reserved_bytes(self) -> int:
        """What this process keeps of the GPU for itself, graphs included; on a CPU as `peak_bytes`."""
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else self.peak_bytes()

    def peak_bytes(self) -> int:
        """The most memory this process has held: of the GPU where it trains on one, else RAM."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes


class Clock:
    """Times on a device, without the host waiting for it until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self, inside: bool = False) -> Any:
        """Now. `inside` a step that may be replayed: the time of its last replay."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=inside)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Waits until `end` is over."""
        if not self._on_gpu:
            return float(1e3 * (end - start))
        end.synchronize()
        return float(start.elapsed_time(end))


class Later:
    """Values of a device on their way to the host, which does not wait for them."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def known(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[Any]:
        """Waits until they are known."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._values.tolist()
        return values


def runtime(
    device: str = "auto",
    precision: Precision = "auto",
    compile: Compile = "off",
    activations: Activations = "products",
) -> Runtime:
    """`auto`: a GPU if there is one, in bfloat16 and compiled there, in float32 and as it is on a CPU."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"train.device={device} is none of auto, cpu, cuda and cuda:0, cuda:1, …; set one of these")
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"train.device={device} but no GPU can be used here; set train.device=auto")
        if chosen.index and chosen.index >= (there := torch.cuda.device_count()):
            raise ConfigError(f"train.device={device} but the last GPU here is cuda:{there - 1}; set one that there is")
        chosen = torch.device("cuda", chosen.index or 0)  # as tensors there say
    if chosen.type == "cpu" and precision == "bfloat16":
        raise ConfigError("train.precision=bfloat16 needs a GPU; set train.precision=auto")
    half = precision == "bfloat16" or (precision == "auto" and chosen.type == "cuda")
    compiles, remark = _compiles(chosen, compile)
    if not compiles and activations != "products":
        idle = f"train.activations={activations} changes nothing here: only what is compiled keeps less, or all"
        remark = f"{remark}\n{idle}".strip()
    return Runtime(chosen, torch.bfloat16 if half else None, compiles, remark)


def _compiles(device: torch.device, wanted: Compile) -> tuple[bool, str]:
    """Whether the model is compiled, and what to say about it; `auto`: on a GPU where there is all it takes."""
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return False, ""
    if (what := lacking(device.type)) is not None:
        return False, f"not compiled, and slower for it: {what} is missing here; install it, or set train.compile=off"
    return True, "compiling in the first steps, a minute or two (kernels are kept for the next run; train.compile=off)"

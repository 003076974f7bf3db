"""The device a run trains on: its precision, its memory, and values that come back from it without waiting."""

import os
import re
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stella.errors import ConfigError
from stella.fast.activations import Activations
from stella.fast.parts import missing, seconds_compiling
from stella.train.processes import own_gpu

Precision = Literal["auto", "float32", "bfloat16"]
Compile = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Runtime:
    device: torch.device
    autocast_to: torch.dtype | None  # None: float32 throughout
    compile: bool = False  # compile parts of a step
    remark: str = ""  # what a user should know about these choices

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast_to, enabled=self.autocast_to is not None)

    def seconds_compiling(self) -> float:
        return seconds_compiling() if self.compile else 0.0

    def reserved_bytes(self) -> int:
        """Memory that this process has reserved on the GPU, CUDA graphs included; on a CPU the same as `peak_bytes`."""
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else self.peak_bytes()

    def peak_bytes(self) -> int:
        """Peak memory of this process: allocated on the GPU, or resident on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes


def runtime(
    device: str = "auto", precision: Precision = "auto", compile: Compile = "off", activations: Activations = "products"
) -> Runtime:
    """`auto` means: a GPU if there is one, with bfloat16 and compiled parts; float32 and plain code on a CPU."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
        raise ConfigError(f"train.device={device} is none of auto, cpu, cuda and cuda:0, cuda:1, …; set one of these")
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"train.device={device} but no GPU is available; set train.device=auto")
        if chosen.index and chosen.index >= (count := torch.cuda.device_count()):
            raise ConfigError(f"train.device={device} but the last GPU is cuda:{count - 1}; set one that exists")
        index = own_gpu() if chosen.index is None else chosen.index
        chosen = torch.device("cuda", index)  # with an index, as tensors have it
    if chosen.type == "cpu" and precision == "bfloat16":
        raise ConfigError("train.precision=bfloat16 needs a GPU; set train.precision=auto")
    half = precision == "bfloat16" or (precision == "auto" and chosen.type == "cuda")
    compiles, remark = _compiles(chosen, compile)
    if not compiles and activations != "products":
        unused = f"train.activations={activations} has no effect: only compiled parts recompute activations"
        remark = f"{remark}\n{unused}".strip()
    return Runtime(chosen, torch.bfloat16 if half else None, compiles, remark)


def _compiles(device: torch.device, wanted: Compile) -> tuple[bool, str]:
    """Whether parts are compiled, and a remark; `auto` compiles on a GPU if the compiler works there."""
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return False, ""
    if (what := missing(device.type)) is not None:
        return False, f"not compiled, and slower: {what} is missing; install it, or set train.compile=off"
    return True, "compiling during the first steps, one or two minutes (cached for the next run; train.compile=off)"


class Clock:
    """Timestamps on a device; the host waits only when they are read."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks. Waits for `end`."""
        if not self._on_gpu:
            return float(1e3 * (end - start))
        end.synchronize()
        return float(start.elapsed_time(end))


class Later:
    """Values of a device, copied to the host without waiting for them."""

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
        """The values. Waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._values.tolist()
        return values


def free_bytes(device: torch.device | str) -> int:
    """Memory that can still be allocated on a device."""
    device = torch.device(device)
    return _free_ram() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _free_ram(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Linux's estimate of available RAM (elsewhere: all RAM), and no more than a container's limit leaves."""
    estimate, all_ram = _numbers(meminfo), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = estimate["MemAvailable"] * 1024 if "MemAvailable" in estimate else all_ram
    limit, used = _numbers(group / "memory.max"), _numbers(group / "memory.current")
    if limit and used:
        free = min(free, limit[""] - used[""] + _numbers(group / "memory.stat").get("inactive_file", 0))
    return free


def _numbers(file: Path) -> dict[str, int]:
    """The integers of a kernel file by name ("" for a line that is a number alone)."""
    if not file.is_file():
        return {}
    lines = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
    pairs = [(words[0], words[1]) if len(words) > 1 else ("", words[0]) for words in lines if words]
    return {name: int(number) for name, number in pairs if number.isdigit()}

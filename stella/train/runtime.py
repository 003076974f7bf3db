"""The machine a run is on: device, precision, memory, and the facts that are written beside results."""

import ctypes
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stella.errors import ConfigError
from stella.model.compiling import Activations, lacking

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


def keep_freed_memory() -> None:
    """glibc returns large blocks to the system once they are free, and a step's next tensor finds fresh pages to be
    zeroed: 15% of a step of Finetune on a CPU, 5% of DER++'s. Have it keep blocks up to 32 MiB."""
    trim_threshold, mmap_threshold = -1, -3  # mallopt(3)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    mallopt(mmap_threshold, 2**25)
    mallopt(trim_threshold, 2**31 - 1)


def environment(run: Runtime) -> dict[str, Any]:
    """What a result depends on besides its configuration."""
    gpu = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else None
    return {
        **_checkout(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "precision": "float32" if run.autocast_to is None else str(run.autocast_to).removeprefix("torch."),
    }


def provenance(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What `environment` found, as results state it."""
    hardware = facts["gpu"] or f"{facts['cores']}-core {facts['processor']}"
    return {"commit": facts["commit"], "changed_files": facts["changed_files"], "hardware": hardware}


def _checkout() -> dict[str, Any]:
    """This package's commit, and how many files differ from it; None where it is not known."""
    if given := os.environ.get("STELLA_COMMIT"):  # where no .git travels
        return {"commit": given, "changed_files": None}
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:  # another project's, below which we lie
        return {"commit": None, "changed_files": None}
    changed = _git("status", "--porcelain", "--untracked-files=no") or ""
    return {"commit": _git("rev-parse", "HEAD"), "changed_files": len(changed.splitlines())}


def _git(*command: str) -> str | None:
    """What git says where this file lies; None where it fails."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

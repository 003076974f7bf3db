"""Which parts of a step are compiled: functions marked `compilable` are, inside `with compiled():`, and only there.

Parts, not the whole model: blocks of the same sizes share one compilation, so that it takes seconds for each shape
where the whole would take minutes. Shapes are static.
"""

import importlib.util
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch._dynamo
import torch._inductor.config as inductor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stella.model.linear import PARTS

P = ParamSpec("P")
T = TypeVar("T")

Activations = Literal["all", "products", "narrow"]

_on = False
_activations: Activations = "products"

# Compiling says things that nobody here can act upon.
warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32")
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
)


@cache
def lacking(device: str) -> str | None:
    """What is missing here to compile kernels for a device ("cuda", "cpu"), if anything is."""
    if device == "cpu":
        found = any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)
        return None if found else "a C++ compiler (g++ or clang++)"
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not any(shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name):
        return "a C compiler (cc, gcc or clang)"
    return None


def seconds_spent() -> float:
    """On compiling, so far, in this process."""
    return float(torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0))


@contextmanager
def compiled(on: bool = True, activations: Activations = "products") -> Iterator[None]:
    """Inside, what is `compilable` is compiled when it is first called with some shapes, and what is `lean` keeps these
    activations for the backward pass."""
    global _on, _activations
    before = _on, _activations
    _on, _activations = on, activations
    try:
        yield
    finally:
        _on, _activations = before


def is_compiled() -> bool:
    """Whether we are inside `with compiled():`."""
    return _on


def compilable(function: Callable[P, T]) -> Callable[P, T]:
    @cache
    def fast() -> Callable[P, T]:
        # Shapes: each modality and both, all patches and some, with gradient and without, short batches.
        torch._dynamo.config.recompile_limit = 64
        # Reductions over two axes in one kernel seem to be slower here (results/speed: different runs).
        options: dict[str, Any] = {}
        if hasattr(inductor.triton, "mix_order_reduction"):  # torch 2.11 has it; a private name
            options["triton.mix_order_reduction"] = False
        return torch.compile(function, dynamic=False, fullgraph=True, options=options)

    @wraps(function)
    def either(*args: P.args, **more: P.kwargs) -> T:
        return (fast() if _on else function)(*args, **more)

    return either


def lean(function: Callable[..., T]) -> Callable[..., T]:
    """Keep of this function for the backward pass what matrix products and attention gave, and compute the rest again.

    Inside compiled functions alone: there the rest is fused into the kernels that need it. With `narrow` an MLP's
    hidden layer is computed again too: two fifths less is kept of a block, for one product more.
    """

    @wraps(function)
    def either(*args: Any) -> T:
        if not torch.compiler.is_compiling() or _activations == "all":
            return function(*args)
        choose = partial(create_selective_checkpoint_contexts, _keep)
        out: T = checkpoint(function, *args, use_reentrant=False, context_fn=choose)
        return out

    return either


_aten = torch.ops.aten
_WEIGHT = {_aten.mm.default: 1, _aten.mm.dtype: 1, _aten.addmm.default: 2}  # of linear layers, among the arguments
_KEPT = {
    *_WEIGHT,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _keep(context: Any, op: Any, *args: Any, **more: Any) -> CheckpointPolicy:
    if op not in _KEPT:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if _activations == "narrow" and op in _WEIGHT:
        width_in, width_out = args[_WEIGHT[op]].shape
        parts = PARTS if op == _aten.mm.dtype else 1
        if width_out >= 4 * width_in // parts:
            return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE

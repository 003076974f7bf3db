"""Which parts of a step are compiled or replaced. The list is applied around a step, from outside:

    with applied(compile=True, activations="products"):
        loss = method.loss(batch)

Inside, each listed attribute is its fast version; outside, it is the plain code. Parts are compiled, not the whole
model: all blocks of the same shapes share one compilation, which takes seconds where the whole takes minutes. Shapes
are static.
"""

import importlib.util
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config as inductor
from torch import Tensor

from stella import losses, selection
from stella.fast import early
from stella.fast.activations import Activations, keeping
from stella.methods.base import Method
from stella.model import cav, vit
from stella.model.avm import AVM
from stella.model.cav import CAV, Patches
from stella.model.vit import Mlp

# Warnings of the compiler that a user cannot act on.
warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32")
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
)

Function = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """An attribute of a class or module, and how it is made fast."""

    owner: Any
    name: str
    lean: bool = False  # recompute activations in the backward pass
    half: bool = False  # return autocast's dtype: the residual stream that starts here is then in half precision


PARTS = (
    Part(Patches, "take"),
    Part(CAV, "embed_a", half=True),
    Part(CAV, "embed_v", half=True),
    Part(vit, "transform", lean=True),
    Part(CAV, "_both", half=True),
    Part(cav, "_placed", half=True),
    Part(CAV, "_tokens", half=True),
    Part(CAV, "_predictions"),
    Part(AVM, "project"),
    Part(AVM, "forward", lean=True),
    Part(losses, "norm_pix"),
    Part(losses, "reconstruction"),
    Part(selection, "weighted_query"),
    Part(selection, "correlation"),
)
_plain_loss, _plain_mlp, _plain_importance = AVM.loss, Mlp.forward, selection.importance
_plain_means = Method.recon_means
_PLAIN = {part: vars(part.owner)[part.name] for part in PARTS}


@contextmanager
def applied(
    compile: bool = True, activations: Activations = "products", lean: bool | None = None, at_once: bool = True
) -> Iterator[None]:
    """Inside, parts are fast. Without `compile` only half-precision residuals and early gradients are applied.

    With `lean` (none: as `compile`) it saves memory all the same: activations are recomputed, large maps never made.
    Without `at_once` gradients of the decoder are not computed early: processes that divide weights cannot.
    """
    swaps = _swaps(compile, activations, compile if lean is None else lean, at_once)
    plain = [vars(owner)[name] for owner, name, _ in swaps]
    try:
        for owner, name, fast in swaps:
            setattr(owner, name, fast)
        yield
    finally:
        for (owner, name, _), function in zip(swaps, plain, strict=True):
            setattr(owner, name, function)


@cache
def _swaps(compile: bool, activations: Activations, lean: bool, at_once: bool) -> list[tuple[Any, str, Function]]:
    """(owner, attribute, fast version)."""
    swaps: list[tuple[Any, str, Function]] = [
        (AVM, "loss", early.matching(_plain_loss)),
        (Method, "recon_means", early.reconstruction(_plain_means) if at_once else _plain_means),
        (Mlp, "forward", _fused_gelu(_plain_mlp) if lean else _plain_mlp),
        (selection, "importance", _importance if lean else _plain_importance),
    ]
    for part, plain in _PLAIN.items():
        function = _half(plain) if part.half else plain
        if part.lean and lean:
            function = keeping(function, activations, compile)
        if compile:
            function = _compiled(function)
        swaps.append((part.owner, part.name, function))
    return swaps


def _compiled(function: Function) -> Function:
    # Shapes: each modality and both, all patches and some, with and without gradient, short batches.
    torch._dynamo.config.recompile_limit = 64
    options: dict[str, Any] = {}
    if hasattr(inductor.triton, "mix_order_reduction"):  # torch 2.11 has this private option
        options["triton.mix_order_reduction"] = False  # reductions over two axes in one kernel are slower here
    # Dynamo keeps one cache for each code object; wrappers share theirs unless it is copied.
    function.__code__ = function.__code__.replace(co_name=function.__name__)
    return torch.compile(function, dynamic=False, fullgraph=True, options=options)


def _half(function: Function) -> Function:
    @wraps(function)
    def half(*args: Any) -> Tensor:
        out: Tensor = function(*args)
        dtype = _autocast_dtype(out)
        return out if dtype is None else out.to(dtype)

    return half


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


# ---- GELU inside the matrix product's kernel, in passes without gradient


def _fused_gelu(plain: Function) -> Function:
    @wraps(plain)
    def forward(self: Mlp, x: Tensor) -> Tensor:
        dtype, fc1 = _autocast_dtype(x), self.fc1
        if dtype is None or torch.is_grad_enabled():
            out: Tensor = plain(self, x)
        else:
            out = self.fc2(linear_gelu(x.to(dtype), fc1.weight.to(dtype), fc1.bias.to(dtype)))
        return out

    return forward


@torch.library.custom_op("stella::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer with GELU in its epilogue. GELU's tanh formula: off by less than 5e-4."""
    out: Tensor = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], len(weight))


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


# ---- importance without its attention map


def _importance(q: Tensor, k: Tensor, beta: float) -> Tensor:
    if q.is_cuda:
        from stella.fast import kernels

        if kernels.fits(q.shape[-1]):
            return kernels.importance(q, k, beta)
    return _plain_importance(q, k, beta)


# ---- what the compiler needs and takes


@cache
def missing(device: str) -> str | None:
    """What the compiler lacks on this machine for a device type ("cuda", "cpu"), or None."""
    if device == "cpu":
        found = any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)
        return None if found else "a C++ compiler (g++ or clang++)"
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not any(shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name):
        return "a C compiler (cc, gcc or clang)"
    return None


def seconds_compiling() -> float:
    """Seconds this process has spent compiling."""
    return float(torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0))

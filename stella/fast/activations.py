"""What parts keep for the backward pass; the rest is computed again there."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

T = TypeVar("T")

# all: everything that autograd asks for; products: outputs of matrix products and attention;
# narrow: products without those of an MLP's hidden layer, two fifths less per block for one more product
Activations = Literal["all", "products", "narrow"]

_aten = torch.ops.aten
_WEIGHT = {_aten.mm.default: 1, _aten.addmm.default: 2}  # the weight's position among the arguments
_PRODUCTS = {
    *_WEIGHT,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def keeping(function: Callable[..., T], activations: Activations, compiled: bool = True) -> Callable[..., T]:
    """The same function with selective activation recomputation. If it will be compiled, recomputed values are fused
    into the kernels that need them."""
    if activations == "all":
        return function
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, activations))
    more: dict[str, Any] = {} if compiled else {"preserve_rng_state": False}  # no part draws random numbers

    @wraps(function)
    def lean(*args: Any) -> T:
        out: T = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **more)
        return out

    return lean


def policy(activations: Activations, context: Any, op: Any, *args: Any, **more: Any) -> CheckpointPolicy:
    if op not in _PRODUCTS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if activations == "narrow" and op in _WEIGHT:
        width_in, width_out = args[_WEIGHT[op]].shape
        if width_out >= 4 * width_in:
            return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE

"""Losses whose gradients are computed at once, so that their activations are freed before the rest of the step.

The matching loss goes first in STELLA, the reconstruction in Chorus: memory peaks at the larger of two parts, not at
their sum. Values and gradients are the same.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from stella.model.avm import AVM
from stella.model.cav import Pretrained

Function = Callable[..., Any]


def matching(loss: Function) -> Function:
    """`AVM.loss`. Its gradients reach the module alone."""

    @wraps(loss)
    def early(self: AVM, *args: Any) -> Tensor:
        value: Tensor = loss(self, *args)
        return known([value], [p for p in self.parameters() if p.requires_grad])[0]

    return early


def reconstruction(parts: Function) -> Function:
    """`Method.recon_means`. Its gradients reach the decoder's weights, and its inputs."""

    @wraps(parts)
    def early(self: Any, out: Pretrained) -> dict[str, Tensor]:
        values: dict[str, Tensor] = parts(self, out)
        inputs = [out.o_a, out.o_v]
        found = known(list(values.values()), [*inputs, *_parameters(values.values(), inputs)])
        return dict(zip(values, found, strict=True))

    return early


def known(values: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same scalars, with the gradients of their sum: all must have the same weight in what is trained on.

    On a CPU another weight is an error; on a GPU it is not noticed.
    """
    if not inputs or not any(value.requires_grad for value in values):
        return values
    with torch.autocast(values[0].device.type, enabled=False):  # as in any backward pass
        gradients = torch.autograd.grad(sum(values), inputs)  # type: ignore[arg-type]
    found: tuple[Tensor, ...] = _Known.apply(gradients, len(values), *(v.detach() for v in values), *inputs)  # type: ignore[no-untyped-call]
    return found


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], count: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.count = gradients, count
        return tuple(value.clone() for value in given[:count])

    @staticmethod
    def backward(ctx: Any, *weights: Tensor) -> Any:
        if not weights[0].is_cuda:
            equal = (torch.stack(weights) == weights[0]).all()
            torch._assert_async(equal, "parts of recon_means have different weights: weigh them in recon_parts instead")
        scaled = (weights[0] * gradient for gradient in ctx.gradients)
        return None, None, *(None for _ in range(ctx.count)), *scaled


def _parameters(values: Any, stop: Sequence[Tensor]) -> Iterator[Tensor]:
    """The parameters that the values depend on, not through `stop`."""
    seen = {tensor.grad_fn for tensor in stop}
    waiting = [value.grad_fn for value in values]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # the node that adds to a parameter's gradient
            yield node.variable
        waiting += [following for following, _ in node.next_functions]

"""Linear layers whose float32 products can be made of half-precision ones.

A GPU multiplies float16 on tensor cores, ten times as fast as float32 without them. Inside `with exact_products():` a
float32 operand is split in two float16 parts, which together have its upper 22 bits, and the product is the sum of
three: high · high + high · low + low · high, added up in float32. Elsewhere a layer is torch's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_split = False


@contextmanager
def exact_products(on: bool = True) -> Iterator[None]:
    """Inside, float32 products of `Linear` on a GPU are sums of three half-precision ones."""
    global _split
    before, _split = _split, on
    try:
        yield
    finally:
        _split = before


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not (_split and x.is_cuda and x.dtype == torch.float32):
            return super().forward(x)
        out: Tensor = Product.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.out_features)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class Product(torch.autograd.Function):
    """x [M, K], w [N, K] -> x wᵀ [M, N], in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return product(x, w)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        wanted_x, wanted_w = ctx.needs_input_grad
        return (
            product(gradient, w.t()) if wanted_x else None,
            product(gradient.t(), x.t()) if wanted_w else None,
        )


def product(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K], w [N, K] -> x wᵀ [M, N] as three products of halves: one, with the parts side by side.

    Small ones first: tensor cores round their sums down, the more the larger they are."""
    (x_high, x_low, x_scale), (w_high, w_low, w_scale) = halves(x), halves(w)
    out = _mm(torch.cat([x_low, x_high, x_high], 1), torch.cat([w_high, w_low, w_high], 1).t())
    return out * x_scale * w_scale


def halves(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float16 parts and a power of two, x = (high + low) · scale: 22 bits of numbers down to 2^-18 of the largest."""
    exponent = (x.abs().amax().view(torch.int32) >> 23).clamp(15, 254)  # of the largest, as float32 has it: + 127
    x = x * _power(268 - exponent)  # so that the largest is 2^14 to 2^15: float16 ends at 2^16
    high = (x.view(torch.int32) & ~(2**13 - 1)).view(torch.float32)  # (compiled code takes no notice of casts)
    return high.half(), (x - high).half(), _power(exponent - 14)


def _power(exponent: Tensor) -> Tensor:
    """2^(exponent - 127), exactly."""
    return (exponent << 23).view(torch.float32)


def _mm(x: Tensor, w: Tensor) -> Tensor:
    """Halves multiplied, added up in float32."""
    return torch.mm(x, w, out_dtype=torch.float32) if x.is_cuda else x.float() @ w.float()

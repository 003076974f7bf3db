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

PARTS = 3  # a product's, side by side

_split = False


@contextmanager
def exact_products(on: bool = True) -> Iterator[None]:
    """Inside, float32 products of `Linear` are sums of three half-precision ones: faster on a GPU, where compiled."""
    global _split
    before, _split = _split, on
    try:
        yield
    finally:
        _split = before


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not (_split and x.dtype == torch.float32):
            return super().forward(x)
        rows: Tensor = Product.apply(x.reshape(-1, self.in_features), self.weight)  # type: ignore[no-untyped-call]
        out = rows.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class Product(torch.autograd.Function):
    """x [M, K], w [N, K] -> x wᵀ [M, N], in float32. Its gradient has none of its own."""

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

    Small ones first: tensor cores round sums down, and so the less, the later they grow."""
    (x_high, x_low, x_scale), (w_high, w_low, w_scale) = halves(x), halves(w)
    out = _mm(torch.cat([x_low, x_high, x_high], 1), torch.cat([w_high, w_low, w_high], 1).t())
    return out * x_scale * w_scale.t()


def halves(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float16 parts of x [M, K] and a power of two for each row [M, 1], x = (high + low) · scale.

    They have 22 bits of numbers down to 2^-17 of their row's largest."""
    exponent = (x.abs().amax(1, keepdim=True).view(torch.int32) >> 23).clamp(15, 254)  # float32's: that of 1 is 127
    x = x * _power(268 - exponent)  # so that the largest is 2^14 to 2^15: float16 ends at 2^16
    # Float16's 11 bits, to the nearest: a low part of x's own sign would bias every sum. (By bits, since compiled code
    # takes no notice of casts.)
    high = ((x.view(torch.int32) + 2**12) & ~(2**13 - 1)).view(torch.float32)
    return high.half(), (x - high).half(), _power(exponent - 14)


def _power(exponent: Tensor) -> Tensor:
    """2^(exponent - 127), exactly."""
    return (exponent << 23).view(torch.float32)


def _mm(x: Tensor, w: Tensor) -> Tensor:
    """Halves multiplied, added up in float32."""
    return torch.mm(x, w, out_dtype=torch.float32) if x.is_cuda else x.float() @ w.float()

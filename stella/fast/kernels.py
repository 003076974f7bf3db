"""Triton kernels: importance as the column means of an attention map that is never materialised.

Imported only where a GPU is used; Triton comes with torch there.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
ROWS, COLUMNS = 128, 64  # tile of the attention map


@triton.jit
def _row_sums(
    q, k, out, q_b, q_h, q_l, k_b, k_h, k_l, heads, q_len, k_len, scale,
    dim: tl.constexpr, some_rows: tl.constexpr, some_columns: tl.constexpr,
):  # fmt: skip
    """log2 of the sum of exponentials of each row: [B·H, Lq]."""
    at = tl.program_id(1)
    q_head, k_head = q + at // heads * q_b + at % heads * q_h, k + at // heads * k_b + at % heads * k_h
    rows, dims = tl.program_id(0) * some_rows + tl.arange(0, some_rows), tl.arange(0, dim)
    queries = tl.load(q_head + rows[:, None] * q_l + dims[None], mask=rows[:, None] < q_len, other=0.0)
    most, total = tl.full([some_rows], -1e30, tl.float32), tl.zeros([some_rows], tl.float32)
    for start in range(0, k_len, some_columns):
        columns = start + tl.arange(0, some_columns)
        keys = tl.load(k_head + columns[None] * k_l + dims[:, None], mask=columns[None] < k_len, other=0.0)
        logits = tl.dot(queries, keys, input_precision="ieee") * scale
        logits = tl.where(columns[None] < k_len, logits, -1e30)
        higher = tl.maximum(most, tl.max(logits, 1))
        total = total * tl.exp2(most - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
        most = higher
    tl.store(out + at * q_len + rows, most + tl.log2(total), mask=rows < q_len)


@triton.jit
def _column_means(
    q, k, sums, out, q_b, q_h, q_l, k_b, k_h, k_l, heads, q_len, k_len, scale,
    dim: tl.constexpr, some_rows: tl.constexpr, some_columns: tl.constexpr,
):  # fmt: skip
    """Mean of each column of the attention map over heads and rows: [B, Lk]."""
    clip = tl.program_id(1)
    columns, dims = tl.program_id(0) * some_columns + tl.arange(0, some_columns), tl.arange(0, dim)
    total = tl.zeros([some_columns], tl.float32)
    for head in range(heads):
        k_head, q_head = k + clip * k_b + head * k_h, q + clip * q_b + head * q_h
        keys = tl.load(k_head + columns[None] * k_l + dims[:, None], mask=columns[None] < k_len, other=0.0)
        for start in range(0, q_len, some_rows):
            rows = start + tl.arange(0, some_rows)
            queries = tl.load(q_head + rows[:, None] * q_l + dims[None], mask=rows[:, None] < q_len, other=0.0)
            row_sum = tl.load(sums + (clip * heads + head) * q_len + rows, mask=rows < q_len, other=float("inf"))
            logits = tl.dot(queries, keys, input_precision="ieee") * scale
            total += tl.sum(tl.exp2(logits - row_sum[:, None]), 0)
    tl.store(out + clip * k_len + columns, total / (q_len * heads), mask=columns < k_len)


def fits(dim: int) -> bool:
    """Whether the kernels support heads of this size."""
    return dim in (16, 32, 64, 128)


def importance(q: Tensor, k: Tensor, beta: float) -> Tensor:
    """`selection.importance` for q, k [B, H, L, d] on a GPU: float32 [B, Lk].

    The first kernel finds the softmax normaliser of each row as fused attention does, the second sums normalised
    columns. Products of half-precision inputs are exact in float32.
    """
    (batch, heads, q_len, dim), k_len = q.shape, k.shape[2]
    scale = LOG2_E / (math.sqrt(dim) * beta)
    sums = q.new_empty(batch * heads, q_len, dtype=torch.float32)
    out = q.new_empty(batch, k_len, dtype=torch.float32)
    shape = (*q.stride()[:3], *k.stride()[:3], heads, q_len, k_len, scale)
    how = {"dim": dim, "some_rows": ROWS, "some_columns": COLUMNS, "num_warps": 4}
    _row_sums[triton.cdiv(q_len, ROWS), batch * heads](q, k, sums, *shape, **how)
    _column_means[triton.cdiv(k_len, COLUMNS), batch](q, k, sums, out, *shape, **how)
    return out

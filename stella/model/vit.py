"""Parts of a vision transformer: pre-norm blocks (exact GELU, fused attention), patches, initial weights."""

from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)  # q, k, v stacked in that order, heads inside each
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, L, d]
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


def transform(x: Tensor, norm1: nn.Module, attn: nn.Module, norm2: nn.Module, mlp: nn.Module) -> Tensor:
    """A pre-norm transformer block: [B, L, D] -> [B, L, D]."""
    x = x + attn(norm1(x))
    out: Tensor = x + mlp(norm2(x))
    return out


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps)
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:  # [B, L, D] -> [B, L, D]
        return transform(x, self.norm1, self.attn, self.norm2, self.mlp)


class FusionBlock(Block):
    """One attention and one MLP with three sets of norms: `forward` for both modalities, `audio`, `video` for one."""

    def __init__(self, dim: int, heads: int, eps: float) -> None:
        super().__init__(dim, heads, eps)
        self.norm1_a, self.norm2_a = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.norm1_v, self.norm2_v = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)

    def audio(self, x: Tensor) -> Tensor:
        return transform(x, self.norm1_a, self.attn, self.norm2_a, self.mlp)

    def video(self, x: Tensor) -> Tensor:
        return transform(x, self.norm1_v, self.attn, self.norm2_v, self.mlp)


class Fusion(nn.ModuleList):
    """A stack of fusion blocks, run with one of their three sets of norms."""

    def __init__(self, dim: int, heads: int, eps: float, depth: int) -> None:
        super().__init__(FusionBlock(dim, heads, eps) for _ in range(depth))

    def joint(self, x: Tensor) -> Tensor:
        return chain(self, x)

    def audio(self, x: Tensor) -> Tensor:
        return chain((block.audio for block in cast("Iterable[FusionBlock]", self)), x)

    def video(self, x: Tensor) -> Tensor:
        return chain((block.video for block in cast("Iterable[FusionBlock]", self)), x)


def chain(blocks: Iterable[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def patchify_a(audio: Tensor, patch: int) -> Tensor:
    """[B, time, mel] -> [B, La, patch²], time-major; each patch is flattened as (time, mel)."""
    batch, time, mel = audio.shape
    x = audio.reshape(batch, time // patch, patch, mel // patch, patch)
    return x.transpose(2, 3).flatten(3).flatten(1, 2)


def patchify_v(video: Tensor, patch: int) -> Tensor:
    """[B, T, 3, H, W] -> [B, Lv, patch²·3], frame-major; each patch is flattened as (row, column, channel)."""
    batch, frames, channels, height, width = video.shape
    x = video.reshape(batch, frames, channels, height // patch, patch, width // patch, patch)
    return x.permute(0, 1, 3, 5, 4, 6, 2).flatten(4).flatten(1, 3)


def init_linear(module: nn.Module) -> None:
    """Xavier-uniform weights and zero biases, as in ViT and MAE; for `module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def sincos_2d(rows: int, columns: int, dim: int) -> Tensor:
    """Sine-cosine positions of a grid [rows·columns, dim], row-major; the first half encodes the column."""
    omega = 10_000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    row = torch.arange(rows, dtype=torch.float64)[:, None] * omega  # [rows, dim/4]
    column = torch.arange(columns, dtype=torch.float64)[:, None] * omega
    at_row = torch.cat([row.sin(), row.cos()], 1)[:, None].expand(-1, columns, -1)
    at_column = torch.cat([column.sin(), column.cos()], 1)[None].expand(rows, -1, -1)
    return torch.cat([at_column, at_row], 2).flatten(0, 1).to(torch.get_default_dtype())

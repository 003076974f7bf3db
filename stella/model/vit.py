"""Parts of a vision transformer: pre-norm blocks (exact GELU, fused attention), patches, initial values."""

from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stella.fast.compile import compilable, lean
from stella.model.linear import Linear


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(dim, 3 * dim)  # q, k, v stacked in that order, heads inside each
        self.proj = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, L, d]
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, 4 * dim)
        self.fc2 = Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        half = _half_without_gradient(x)
        if half is not None:  # one pass over the widest tensor less
            hidden = linear_gelu(x.to(half), self.fc1.weight.to(half), self.fc1.bias.to(half))
        else:
            hidden = F.gelu(self.fc1(x))
        out: Tensor = self.fc2(hidden)
        return out


@torch.library.custom_op("stella::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU at the end of the product's own kernel, by its tanh formula: off by less than 5e-4."""
    out: Tensor = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], len(weight))


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _half_without_gradient(x: Tensor) -> torch.dtype | None:
    """Half precision where a compiled pass without gradient has it: scoring, and methods' slow copies."""
    if torch.is_grad_enabled() or not torch.compiler.is_compiling() or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


@compilable
@lean
def transform(x: Tensor, norm1: nn.Module, attn: nn.Module, norm2: nn.Module, mlp: nn.Module) -> Tensor:
    """What a block does: [B, L, D] -> [B, L, D]."""
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
        return self._with_norms(x, self.norm1, self.norm2)

    def _with_norms(self, x: Tensor, norm1: nn.Module, norm2: nn.Module) -> Tensor:
        return transform(x, norm1, self.attn, norm2, self.mlp)


class FusionBlock(Block):
    """One attention and one MLP with three sets of norms: `forward` is joint, `audio` and `video` a modality alone."""

    def __init__(self, dim: int, heads: int, eps: float) -> None:
        super().__init__(dim, heads, eps)
        self.norm1_a, self.norm2_a = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.norm1_v, self.norm2_v = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)

    def audio(self, x: Tensor) -> Tensor:
        return self._with_norms(x, self.norm1_a, self.norm2_a)

    def video(self, x: Tensor) -> Tensor:
        return self._with_norms(x, self.norm1_v, self.norm2_v)


class Fusion(nn.ModuleList):
    """Fusion blocks one after the other, with one of their three sets of norms."""

    def __init__(self, dim: int, heads: int, eps: float, depth: int) -> None:
        super().__init__(FusionBlock(dim, heads, eps) for _ in range(depth))

    def joint(self, x: Tensor) -> Tensor:
        return chain(self, x)

    def audio(self, x: Tensor) -> Tensor:
        return chain((block.audio for block in cast("Iterable[FusionBlock]", self)), x)

    def video(self, x: Tensor) -> Tensor:
        return chain((block.video for block in cast("Iterable[FusionBlock]", self)), x)


def chain(blocks: Iterable[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """One block after the other."""
    x = between_blocks(x)
    for block in blocks:
        x = block(x)
    return x


def between_blocks(x: Tensor) -> Tensor:
    """Under autocast what flows between blocks is in half precision too."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


def patchify_a(audio: Tensor, patch: int) -> Tensor:
    """[B, time, mel] -> [B, La, patch²], time-major; each patch flattened (time, mel)."""
    batch, time, mel = audio.shape
    x = audio.reshape(batch, time // patch, patch, mel // patch, patch)
    return x.transpose(2, 3).reshape(batch, -1, patch**2)


def patchify_v(video: Tensor, patch: int) -> Tensor:
    """[B, T, 3, H, W] -> [B, Lv, patch²·3], frame-major; each patch flattened (row, column, channel)."""
    batch, frames, channels, height, width = video.shape
    x = video.reshape(batch, frames, channels, height // patch, patch, width // patch, patch)
    return x.permute(0, 1, 3, 5, 4, 6, 2).reshape(batch, -1, patch**2 * channels)


def init_linear(module: nn.Module) -> None:
    """Xavier-uniform weights and zero biases, as ViT and MAE start; for `module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def sincos_2d(rows: int, columns: int, dim: int) -> Tensor:
    """Sine-cosine positions of a grid [rows·columns, dim], row-major; first half the column, then the row."""
    omega = 10_000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    row = torch.arange(rows, dtype=torch.float64)[:, None] * omega  # [rows, dim/4]
    column = torch.arange(columns, dtype=torch.float64)[:, None] * omega
    at_row = torch.cat([row.sin(), row.cos()], 1)[:, None].expand(-1, columns, -1)
    at_column = torch.cat([column.sin(), column.cos()], 1)[None].expand(rows, -1, -1)
    return torch.cat([at_column, at_row], 2).flatten(0, 1).to(torch.get_default_dtype())

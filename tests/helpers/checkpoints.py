"""Weight files of others, in their layouts, with random tensors."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stella.model.cav import CAVConfig
from stella.rng import generator

TOY = CAVConfig(
    image_size=32, frames=1, spec_frames=48, mel_bins=32, dim=24, depth=4, fusion_from=3, heads=3,
    dec_dim=16, dec_depth=1, dec_heads=2,
)  # fmt: skip
TIMES, MELS, P = 3, 2, 16
State = dict[str, Tensor]


class Noise:
    def __init__(self) -> None:
        self.state: State = {}
        self.generator = generator("weights")

    def add(self, name: str, *shape: int) -> None:
        self.state[name] = 0.2 * torch.randn(*shape, generator=self.generator)

    def linear(self, name: str, inside: int, outside: int) -> None:
        self.add(f"{name}.weight", outside, inside)
        self.add(f"{name}.bias", outside)

    def norm(self, name: str, dim: int) -> None:
        self.add(f"{name}.weight", dim)
        self.state[f"{name}.weight"] += 1
        self.add(f"{name}.bias", dim)

    def block(self, name: str, dim: int, sets: tuple[str, ...]) -> None:
        for s in sets:
            self.norm(f"{name}.norm1{s}", dim)
            self.norm(f"{name}.norm2{s}", dim)
        self.linear(f"{name}.attn.qkv", dim, 3 * dim)
        self.linear(f"{name}.attn.proj", dim, dim)
        self.linear(f"{name}.mlp.fc1", dim, 4 * dim)
        self.linear(f"{name}.mlp.fc2", 4 * dim, dim)


THREE = ("", "_a", "_v")


def common(n: Noise, encoder: int, fusion: int, sets: tuple[str, ...]) -> None:
    """What CAV-MAE and the release have alike; `sets` are the norms in the blocks that are not fusion blocks."""
    for t, channels, patches in (("a", 1, TIMES * MELS), ("v", 3, 4)):
        n.add(f"patch_embed_{t}.proj.weight", 24, channels, P, P)
        n.add(f"patch_embed_{t}.proj.bias", 24)
        n.add(f"pos_embed_{t}", 1, patches, 24)
        n.add(f"modality_{t}", 1, 1, 24)
        n.add(f"decoder_pos_embed_{t}", 1, patches, 16)
        n.add(f"decoder_modality_{t}", 1, 1, 16)
        n.norm(f"norm_{t}", 24)
        for i in range(encoder):
            n.block(f"blocks_{t}.{i}", 24, sets)
    for i in range(fusion):
        n.block(f"blocks_u.{i}", 24, THREE)
    n.norm("norm", 24)
    n.linear("decoder_embed", 24, 16)
    n.block("decoder_blocks.0", 16, sets)
    n.norm("decoder_norm", 16)


def cav_mae(encoder: int = 3, fusion: int = 1) -> State:
    n = Noise()
    common(n, encoder, fusion, THREE)
    n.add("mask_token", 1, 1, 16)
    n.linear("decoder_pred_a", 16, P * P)
    n.linear("decoder_pred_v", 16, 3 * P * P)
    return n.state


def release() -> State:
    n = Noise()
    common(n, 3, 1, ("",))
    for t, name, channels, patches in (("a", "audio", 1, TIMES * MELS), ("v", "video", 3, 4)):
        n.add(f"inter_pos_embed_{t}", 1, patches, 24)
        n.add(f"mask_token_{t}", 1, 1, 16)
        n.linear(f"mae_score_{name}.decoder", 16, channels * P * P)
    backbone = {f"backbone.transformer.{k}": v for k, v in n.state.items()}
    n = Noise()
    for t in "av":
        n.norm(f"norm_{t}", 24)
        for kind in "qkv":
            n.add(f"to_{t}_{kind}.weight", 24, 24)
    n.linear("matching_score.pooler.dense", 48, 48)
    n.linear("matching_score.fc", 48, 1)
    return backbone | {f"avmatching_module.{k}": v for k, v in n.state.items()}


def mae(decoder: bool) -> State:
    n = Noise()
    n.add("cls_token", 1, 1, 24)
    n.add("pos_embed", 1, 1 + 4, 24)
    n.add("patch_embed.proj.weight", 24, 3, P, P)
    n.add("patch_embed.proj.bias", 24)
    for i in range(4):
        n.block(f"blocks.{i}", 24, ("",))
    n.norm("norm", 24)
    if decoder:
        n.add("mask_token", 1, 1, 16)
        n.add("decoder_pos_embed", 1, 1 + 4, 16)
        n.linear("decoder_embed", 24, 16)
        n.block("decoder_blocks.0", 16, ("",))
        n.norm("decoder_norm", 16)
        n.linear("decoder_pred", 16, 3 * P * P)
    return n.state


def written(folder: Path, state: State, prefix: str = "module.", **beside: Any) -> Path:
    path = folder / "theirs.pth"
    tensors = {f"{prefix}{k}": v for k, v in state.items()}
    torch.save({"model": tensors, **beside} if beside else tensors, path)
    return path


# ---- the plain computation on their names

"""A wider and deeper model that computes what a trained one computes (Net2Net, Chen et al., ICLR 2016).

Every feature appears k times: outputs of a layer are copied, and what a layer took from one input it takes in random
shares from the copies. Layer norms, attention heads of the same width and cosines of embeddings are unchanged by
copies. Shares differ, so copies get different gradients and part in training. New blocks add nothing at first: the last
layers of their attention and MLP are zero.

For larger inputs tables of positions are interpolated. That does change what the model computes.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stella.errors import ConfigError
from stella.model.avm import AVM
from stella.model.cav import CAV, CAVConfig, preset
from stella.model.weights import Loaded, load
from stella.rng import generator

# Axes made of several pieces (queries, keys and values; audio and video), each of which is copied in its place.
_PIECES = {"qkv.weight": (3, 1), "qkv.bias": (3,), "dense.weight": (2, 2), "dense.bias": (2,), "fc.weight": (1, 2)}
_STACKS = ("blocks_a", "blocks_v", "blocks_u", "decoder_blocks")


def grown_config(config: CAVConfig, name: str, **sizes: int | None) -> CAVConfig:
    """The sizes of a preset, for the inputs of a model that is to grow into it or for others; refused if it cannot."""
    inputs = ("image_size", "patch_size", "frames", "spec_frames", "mel_bins")
    big = preset(name, **{size: sizes.get(size) or getattr(config, size) for size in inputs})
    if big == replace(config, eps=big.eps):
        raise ConfigError(f"the model is {name} already; choose a larger one, or larger inputs")
    check_grows(config, big)
    return replace(big, eps=config.eps)


def check_grows(config: CAVConfig, big: CAVConfig) -> None:
    """Refuse sizes that a model cannot grow into; its own and those for other inputs are fine."""
    wider = {"dim": "heads", "dec_dim": "dec_heads"}
    fits = all(
        getattr(big, dim) % getattr(config, dim) == 0
        and getattr(big, dim) // getattr(big, heads) == getattr(config, dim) // getattr(config, heads)
        for dim, heads in wider.items()
    )
    deeper = big.dec_depth >= config.dec_depth and big.fusion_from >= config.fusion_from
    if not fits or not deeper or _fusion(big) < _fusion(config):
        if big.dim < config.dim:
            raise ConfigError(f"a model of width {config.dim} cannot grow into one of {big.dim}; choose a larger one")
        raise ConfigError(
            f"a model of width {config.dim} and {config.dec_dim} with {config.heads} and {config.dec_heads} heads "
            f"cannot grow into one of {big.dim} and {big.dec_dim} with {big.heads} and {big.dec_heads} heads: widths "
            "must be multiples with heads of the same width, and no stack of blocks may be shorter; choose another"
        )


def grow(model: CAV, avm: AVM | None, config: CAVConfig, draw: torch.Generator) -> tuple[CAV, AVM | None]:
    """The model and its matching module in the sizes of `grown_config`."""
    big = CAV(config)
    for stack in _STACKS:
        old, new = (getattr(each, stack) for each in (model, big))
        for index in range(len(new)):
            if _origin(index, len(old), len(new)) is None:
                for last in (new[index].attn.proj, new[index].mlp.fc2):
                    nn.init.zeros_(last.weight)
                    nn.init.zeros_(last.bias)
    _fill(model, big, draw)
    if avm is None:
        return big, None
    big_avm = AVM(config.dim, avm.heads * (config.dim // avm.dim), avm.beta, config.eps)
    _fill(avm, big_avm, draw)
    return big, big_avm


def grown(file: Path | str, config: CAVConfig, seed: int) -> Loaded:
    """The model of a weight file in other sizes, with its matching module."""
    found = load(file)
    torch.manual_seed(seed)  # of the initial values of new blocks
    model, avm = grow(found.model, found.avm, config, generator(seed, "grow"))
    was, now = (
        sum(p.numel() for part in each if part for p in part.parameters())
        for each in ((found.model, found.avm), (model, avm))
    )
    return Loaded(model, avm, found.extra, [*found.notes, f"{was:,} parameters became {now:,}"], found.inputs)


@torch.no_grad()
def _fill(small: nn.Module, big: nn.Module, draw: torch.Generator) -> None:
    """Widen each tensor of `small` into its place in `big`."""
    state = _placed(small, big) if isinstance(small, CAV) and isinstance(big, CAV) else small.state_dict()
    lengths = {stack: len(getattr(small, stack, ())) for stack in _STACKS}
    linear = {f"{name}.weight" for name, module in big.named_modules() if isinstance(module, nn.Linear)}
    for name, target in big.state_dict().items():
        found, origin = re.match(r"(\w+)\.(\d+)\.(.+)", name), name
        if found and found[1] in lengths:
            index = _origin(int(found[2]), lengths[found[1]], len(getattr(big, found[1])))
            if index is None:
                continue
            origin = f"{found[1]}.{index}.{found[3]}"
        pieces = next((each for end, each in _PIECES.items() if name.endswith(end)), (1,) * target.dim())
        target.copy_(_widened(state[origin], target.shape, pieces, name in linear, draw))


def _placed(small: CAV, big: CAV) -> dict[str, Tensor]:
    """The tensors of `small`, with its tables of positions interpolated to the grids of `big`."""
    state = small.state_dict()
    for name in [name for name in state if "pos_embed" in name]:
        old, new = ((c.grid_a if name.endswith("_a") else c.grid_v) for c in (small.config, big.config))
        if old != new:
            table = state[name].T.reshape(1, -1, *old)  # [1, D, times, mels] or [1, D, frames, rows, columns]
            mode = "bilinear" if len(old) == 2 else "trilinear"
            state[name] = F.interpolate(table, new, mode=mode).flatten(2)[0].T
    return state


def _widened(tensor: Tensor, shape: torch.Size, pieces: tuple[int, ...], linear: bool, draw: torch.Generator) -> Tensor:
    """Copies along every axis; of a linear layer's weight [out, in], random shares along the second."""
    for axis, (size, count) in enumerate(zip(shape, pieces, strict=True)):
        copies = size // tensor.shape[axis]
        before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
        apart = tensor.reshape(*before, count, -1, *after)
        wide = torch.stack([apart] * copies, axis + 1)  # […, pieces, copies, features, …]
        if linear and axis == 1:
            shares = torch.rand(wide.shape, generator=draw, dtype=wide.dtype) + 0.5
            wide = wide * shares / shares.sum(axis + 1, keepdim=True)
        tensor = wide.flatten(axis, axis + 2)
    return tensor


def _origin(index: int, old: int, new: int) -> int | None:
    """Which of `old` blocks becomes block `index` of `new`; None for a new one. Old blocks are spread evenly."""
    return next((block for block in range(old) if block * new // old == index), None)


def _fusion(config: CAVConfig) -> int:
    return config.depth - config.fusion_from

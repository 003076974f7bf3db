"""Others' weight layouts in our names and shapes: pure functions from a state dict and a config to ours."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stella.model.cav import CAVConfig

State = dict[str, Tensor]


@dataclass(frozen=True)
class Converted:
    """A file's tensors under our names; whether they fit is checked later."""

    backbone: State
    avm: State = field(default_factory=dict)
    initial: tuple[str, ...] = ()  # beginnings of names that the format does not have: they keep their values
    notes: tuple[str, ...] = ()


def from_release(state: State, config: CAVConfig) -> Converted:
    backbone = {_plain(name): _flat(name, t) for name, t in under("backbone.transformer.", state).items()}
    avm = under("avmatching_module.", state)
    others = {k: v for k, v in state.items() if not k.startswith(("backbone.transformer.", "avmatching_module."))}
    return Converted(backbone | others, {re.sub(r"^matching_score\.(pooler\.)?", "", k): v for k, v in avm.items()})


def from_cav_mae(state: State, config: CAVConfig) -> Converted:
    """CAV-MAE's audio is frequency-major: positions, kernels and predicted patches are transposed to time-major."""
    p, (times, mels) = config.patch_size, config.grid_a
    # Every block there has three sets of norms, and only the fusion blocks use all of them.
    unused = re.compile(r"(blocks_[av]|decoder_blocks)\.\d+\.norm[12]_[av]\.|mlp_head")
    backbone: State = {}
    for name, raw in state.items():
        if unused.match(name):
            continue
        t = raw.transpose(2, 3) if name == "patch_embed_a.proj.weight" and raw.dim() == 4 else raw
        t = _flat(name, t)
        if name.endswith("pos_embed_a") and len(t) == mels * times:
            t = t.view(mels, times, -1).transpose(0, 1).flatten(0, 1)
        elif name.endswith("pos_embed_v"):
            t = t.repeat(config.frames, 1)
        elif name.startswith("decoder_pred_a.") and len(t) == p * p:
            t = t.view(p, p, -1).transpose(0, 1).reshape(t.shape)
        names = ("mask_token_a", "mask_token_v") if name == "mask_token" else (_plain(name),)
        backbone |= dict.fromkeys(names, t)
    # It adds no positions before fusion.
    backbone["inter_pos_embed_a"] = torch.zeros(config.patches_a, config.dim)
    backbone["inter_pos_embed_v"] = torch.zeros(config.patches_v, config.dim)
    backbone, note = _refit_depth(backbone, config)
    notes = [note] + ["its classifier is left out"] * any(name.startswith("mlp_head") for name in state)
    if any(name.startswith("decoder") for name in backbone):
        return Converted(backbone, notes=(*notes, "its decoder read both modalities together, ours reads them apart"))
    return Converted(backbone, initial=_DECODER, notes=(*notes, "it has no decoder: ours keeps its initial values"))


def _refit_depth(backbone: State, config: CAVConfig) -> tuple[State, str]:
    """CAV-MAE's 11 + 1 blocks as the config's encoder and fusion blocks."""
    encoder, fusion = count_blocks("blocks_a", backbone), count_blocks("blocks_u", backbone)
    fusion_slots = config.depth - config.fusion_from
    if config.fusion_from >= encoder or fusion_slots < fusion or not fusion:
        return backbone, f"all its {encoder} + {fusion} blocks are kept"  # or it is refused, since some are missing
    fitted: State = {}
    for name, t in backbone.items():
        stack, index, rest = [*name.split(".", 2), "", ""][:3]
        if stack == "blocks_u":
            slots = [j for j in range(fusion_slots) if min(j, fusion - 1) == int(index)]
            fitted |= {f"blocks_u.{j}.{rest}": t for j in slots}
        elif stack not in ("blocks_a", "blocks_v") or int(index) < config.fusion_from:
            fitted[name] = t
    return fitted, (
        f"its {encoder} + {fusion} blocks became {config.fusion_from} + {fusion_slots}, which is not lossless: encoder "
        f"blocks {config.fusion_from} to {encoder - 1} are dropped and fusion block {fusion - 1} is copied into the "
        f"slots after it; fusion_from={encoder} with depth={encoder + fusion} keeps them all"
    )


def from_mae(state: State, config: CAVConfig) -> Converted:
    """An image model for both encoders: blocks doubled, RGB kernels summed for audio, positions tiled over frames."""
    backbone: State = {}
    for name, t in state.items():
        stack, _, rest = name.partition(".")
        if stack == "blocks":
            backbone |= dict.fromkeys(_mae_block_names(rest, config.fusion_from), t)
        elif stack == "norm":
            backbone |= dict.fromkeys((name, f"norm_a.{rest}", f"norm_v.{rest}"), t)
        elif stack == "mask_token":
            backbone |= dict.fromkeys(("mask_token_a", "mask_token_v"), _flat(name, t))
        elif stack in ("pos_embed", "decoder_pos_embed"):
            backbone[f"{stack}_v"] = _flat(name, t)[1:].repeat(config.frames, 1)  # without the class token
        elif stack == "decoder_pred":
            backbone[f"decoder_pred_v.{rest}"] = t
        elif stack == "patch_embed":
            kernel = rest == "proj.weight" and t.dim() == 4
            backbone[_plain(f"patch_embed_v.{rest}")] = _flat(name, t)
            backbone[_plain(f"patch_embed_a.{rest}")] = _flat(name, t.sum(1, keepdim=True) if kernel else t)
        elif stack not in ("cls_token", "head"):
            backbone[name] = t
    lacking = ("pos_embed_a", "modality_")  # in the decoder too
    initial = (*lacking, *(f"decoder_{name}" for name in lacking), "inter_pos_embed_", "decoder_pred_a")
    note = "positions of audio and before fusion and modality embeddings keep their initial values"
    if any(name.startswith("decoder_embed") for name in state):
        return Converted(backbone, initial=initial, notes=(note, "so do the decoder's for audio"))
    return Converted(backbone, initial=initial + _DECODER, notes=(note, "so does the whole decoder"))


def _mae_block_names(rest: str, fusion_from: int) -> list[str]:
    index, _, name = rest.partition(".")
    if int(index) < fusion_from:
        return [f"blocks_a.{rest}", f"blocks_v.{rest}"]
    block = f"blocks_u.{int(index) - fusion_from}."
    norm, _, parameter = name.partition(".")
    sets = [norm, f"{norm}_a", f"{norm}_v"] if norm in ("norm1", "norm2") else [norm]
    return [f"{block}{n}.{parameter}" for n in sets]


_DECODER = ("decoder", "mask_token")
FORMATS: dict[str, tuple[str, Callable[[State, CAVConfig], Converted]]] = {  # a name's beginning that tells it
    "stella-release": ("backbone.transformer.", from_release),
    "cav-mae": ("blocks_a.", from_cav_mae),
    "mae": ("blocks.0.attn.qkv.", from_mae),
}


def _plain(name: str) -> str:
    name = re.sub(r"^(patch_embed_[av])\.proj\.", r"\1.", name)
    return re.sub(r"^mae_score_([av])(udio|ideo)\.decoder\.", r"decoder_pred_\1.", name)


def _flat(name: str, t: Tensor) -> Tensor:
    """Patch convolutions as linear layers on (row, column, channel); tables [1, L, D] as [L, D]; tokens as [D]."""
    if name.endswith("proj.weight") and t.dim() == 4:
        return t.permute(0, 2, 3, 1).flatten(1)
    if "." not in name and t.dim() == 3:
        return t[0] if "pos_embed" in name else t.flatten()
    return t


def count_blocks(stack: str, names: Iterable[str]) -> int:
    return len({m.group(1) for n in names if (m := re.match(rf"{stack}\.(\d+)\.", n))})


def under(prefix: str, state: State) -> State:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}

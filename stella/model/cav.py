"""The backbone (Sec. 3.1, App. C): two encoders, shared fusion blocks, one decoder, with the sizes of CAV-MAE's ViT-B.

Inputs are cut into patches first: `model.patches_a(audio)`, `model.patches_v(video)`. Only the patches taken out of
these (`Patches.take`) are embedded, encoded and decoded, so a dropped patch costs nothing. `pretrain` is the masked
pre-training pass, the same for random masks, selected patches and patches stored in memory.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stella import selection
from stella.errors import ConfigError
from stella.model.vit import Block, Fusion, chain, init_linear, patchify_a, patchify_v, sincos_2d

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class CAVConfig:
    """Sizes of a backbone; the defaults are the paper's."""

    image_size: int = 224
    patch_size: int = 16
    frames: int = 4
    spec_frames: int = 1024  # time steps of the spectrogram
    mel_bins: int = 128
    dim: int = 768
    depth: int = 12
    fusion_from: int = 10  # encoder blocks per modality; the remaining depth - fusion_from are fusion blocks
    heads: int = 12
    dec_dim: int = 512
    dec_depth: int = 8
    dec_heads: int = 16
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("image_size", "spec_frames", "mel_bins"):
            self._divides(name, "patch_size")
        self._divides("dim", "heads")
        self._divides("dec_dim", "dec_heads")
        for name in ("dim", "dec_dim"):
            if getattr(self, name) % 4:
                raise ConfigError(f"{name}={getattr(self, name)} must be a multiple of 4 (2-d sine-cosine positions)")
        if self.frames < 1 or self.dec_depth < 0:
            raise ConfigError(f"frames={self.frames} must be at least 1 and dec_depth={self.dec_depth} at least 0")
        if not 0 < self.fusion_from < self.depth:
            raise ConfigError(f"fusion_from={self.fusion_from} must lie between 1 and depth-1={self.depth - 1}")

    def _divides(self, name: str, unit: str) -> None:
        size, by = getattr(self, name), getattr(self, unit)
        if by < 1 or size < 1 or size % by:
            data = ", or another data.pixels, from which it follows" if name == "image_size" else ""
            raise ConfigError(
                f"model.{name}={size} must be a positive multiple of {unit}={by}; choose another size{data}"
            )

    @property
    def grid_a(self) -> tuple[int, int]:
        """Patches of a spectrogram as (times, mels)."""
        return self.spec_frames // self.patch_size, self.mel_bins // self.patch_size

    @property
    def grid_v(self) -> tuple[int, int, int]:
        """Patches of a clip as (frames, rows, columns)."""
        side = self.image_size // self.patch_size
        return self.frames, side, side

    @property
    def patches_a(self) -> int:
        return self.grid_a[0] * self.grid_a[1]

    @property
    def patches_v(self) -> int:
        return self.grid_v[0] * self.grid_v[1] * self.grid_v[2]


_DEMO = CAVConfig(
    image_size=96, spec_frames=256, dim=96, depth=4, fusion_from=2, heads=3, dec_dim=64, dec_depth=2, dec_heads=2
)
PRESETS = {
    "tiny": _DEMO,  # 1 M parameters: the demo on a CPU
    "small": dataclasses.replace(
        _DEMO, dim=192, depth=6, fusion_from=4, heads=6, dec_dim=128, dec_depth=4, dec_heads=4
    ),
    "base": CAVConfig(),  # 185.5 M parameters: the paper
    "large": CAVConfig(dim=1024, depth=24, fusion_from=22, heads=16),  # 610.1 M parameters: ViT-L, the same decoder
}


def preset(name: str, **changes: Any) -> CAVConfig:
    """A preset with some sizes replaced: `preset("tiny", frames=2)`."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? Otherwise " if near else ""
        raise ConfigError(f"unknown model {name!r}: {hint}choose one of {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], **changes)


@dataclass(frozen=True)
class Patches:
    """Patches of one modality, each with its position in the clip."""

    values: Tensor  # [B, K, patch], uint8 pixels or normalised floats
    positions: Tensor  # int64 [B, K]

    def __getitem__(self, clips: slice) -> "Patches":
        return Patches(self.values[clips], self.positions[clips])

    def take(self, index: Tensor) -> "Patches":  # [B, k] into these K
        rows = index[..., None].expand(-1, -1, self.values.shape[2])
        return Patches(self.values.gather(1, rows), self.positions.gather(1, index))

    @staticmethod
    def cat(parts: Sequence["Patches"]) -> "Patches":
        """Concatenate along the batch; all parts have the same number of patches per clip."""
        return Patches(torch.cat([p.values for p in parts]), torch.cat([p.positions for p in parts]))


@dataclass(frozen=True)
class Split:
    """Indices of the visible and of the masked patches among given ones. Patches in neither are dropped."""

    visible: Tensor  # int64 [B, Kvis]
    masked: Tensor  # int64 [B, Kmask]

    def __post_init__(self) -> None:
        visible, masked = self.visible.shape[1], self.masked.shape[1]
        if not visible or not masked:
            raise ConfigError(
                f"{visible} patches of a clip are visible and {masked} are masked; both must be at least 1: "
                "use a longer or larger input, or another mask ratio"
            )

    def __getitem__(self, clips: slice) -> "Split":
        return Split(self.visible[clips], self.masked[clips])


def split_by_noise(noise: Tensor, visible: int) -> Split:
    """Make the patches with the `visible` smallest values of `noise` [B, K] visible and mask the others."""
    return Split(*selection.random_mask(noise, visible))


@dataclass(frozen=True)
class Pretrained:
    """Outputs of a masked pre-training pass; `stella.losses` are functions of them."""

    z_a: Tensor  # [B, D] pooled outputs of the visible patches, not L2-normalised; DER++ stores them as "logits"
    z_v: Tensor  # [B, D]
    recon_a: Tensor  # [B, Kmask_a, patch] predictions of the masked patches
    recon_v: Tensor  # [B, Kmask_v, patch]
    target_a: Tensor  # [B, Kmask_a, patch] the masked patches, pixels normalised
    target_v: Tensor  # [B, Kmask_v, patch]
    o_a: Tensor  # [B, Kvis_a, D] joint outputs of the visible patches, from which the decoder predicts
    o_v: Tensor  # [B, Kvis_v, D]

    def __getitem__(self, clips: slice) -> "Pretrained":
        return Pretrained(**{name: tensor[clips] for name, tensor in vars(self).items()})


class CAV(nn.Module):
    """Encoders E_a and E_v, fusion E_f (joint, audio alone, video alone) and decoder D."""

    pixel_scale: Tensor
    pixel_shift: Tensor

    def __init__(self, config: CAVConfig) -> None:
        super().__init__()
        c = self.config = config
        p, dim = c.patch_size**2, c.dim
        self.patch_embed_a, self.patch_embed_v = nn.Linear(p, dim), nn.Linear(3 * p, dim)
        self.modality_a, self.modality_v = _token(dim), _token(dim)
        self.pos_embed_a, self.pos_embed_v = _positions_a(c, dim), _positions_v(c, dim)
        self.blocks_a = nn.ModuleList(Block(dim, c.heads, c.eps) for _ in range(c.fusion_from))
        self.blocks_v = nn.ModuleList(Block(dim, c.heads, c.eps) for _ in range(c.fusion_from))

        self.inter_pos_embed_a, self.inter_pos_embed_v = _token(c.patches_a, dim), _token(c.patches_v, dim)
        self.blocks_u = Fusion(dim, c.heads, c.eps, c.depth - c.fusion_from)
        self.norm, self.norm_a, self.norm_v = (nn.LayerNorm(dim, c.eps) for _ in range(3))

        self.decoder_embed = nn.Linear(dim, c.dec_dim)
        self.mask_token_a, self.mask_token_v = _token(c.dec_dim), _token(c.dec_dim)
        self.decoder_modality_a, self.decoder_modality_v = _token(c.dec_dim), _token(c.dec_dim)
        self.decoder_pos_embed_a, self.decoder_pos_embed_v = _positions_a(c, c.dec_dim), _positions_v(c, c.dec_dim)
        self.decoder_blocks = nn.ModuleList(Block(c.dec_dim, c.dec_heads, c.eps) for _ in range(c.dec_depth))
        self.decoder_norm = nn.LayerNorm(c.dec_dim, c.eps)
        self.decoder_pred_a, self.decoder_pred_v = nn.Linear(c.dec_dim, p), nn.Linear(c.dec_dim, 3 * p)

        # (pixel / 255 - mean) / std as one multiplication and one addition.
        mean, std = torch.tensor(IMAGENET_MEAN, dtype=torch.float64), torch.tensor(IMAGENET_STD, dtype=torch.float64)
        self.register_buffer("pixel_scale", (1 / 255 / std).to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("pixel_shift", (-mean / std).to(torch.get_default_dtype()), persistent=False)
        self.apply(init_linear)

    # ---- input

    def patches_a(self, audio: Tensor) -> Patches:
        """All patches of spectrograms [B, time, mel]."""
        self._expect(audio, (self.config.spec_frames, self.config.mel_bins), "spectrograms")
        return _all_patches(patchify_a(audio, self.config.patch_size))

    def patches_v(self, video: Tensor) -> Patches:
        """All patches of clips [B, T, 3, H, W], uint8 or already normalised floats."""
        size = self.config.image_size
        self._expect(video, (self.config.frames, 3, size, size), "clips")
        return _all_patches(patchify_v(video, self.config.patch_size))

    def _expect(self, x: Tensor, shape: tuple[int, ...], what: str) -> None:
        if tuple(x.shape[1:]) != shape:
            got = list(x.shape[1:])
            raise ConfigError(
                f"the model expects {what} of shape {list(shape)}, not {got}; change the model's or the data's sizes"
            )

    def normalise(self, video: Tensor) -> Tensor:
        """Normalise uint8 pixels [..., 3, H, W] with ImageNet's mean and deviation; floats are returned as they are."""
        return self._normalise_channels_last(video.movedim(-3, -1)).movedim(-1, -3)

    def _normalise_channels_last(self, x: Tensor) -> Tensor:
        pixels = x.to(self.pixel_scale.dtype)
        return pixels if x.is_floating_point() else torch.addcmul(self.pixel_shift, pixels, self.pixel_scale)

    def input_a(self, patches: Patches) -> Tensor:
        """Audio patch values [B, K, patch] in the model's dtype (memory stores float16)."""
        return patches.values.to(self.pixel_scale.dtype)

    def input_v(self, patches: Patches) -> Tensor:
        """Normalised video patch values [B, K, patch]."""
        clips, count, size = patches.values.shape  # not -1 below: there may be no clips
        return self._normalise_channels_last(patches.values.view(clips, count, size // 3, 3)).flatten(2)

    # ---- encoders

    def embed_a(self, patches: Patches) -> Tensor:  # [B, K, D]
        x: Tensor = self.patch_embed_a(self.input_a(patches))
        return x + self.modality_a + _at(self.pos_embed_a, patches.positions)

    def embed_v(self, patches: Patches) -> Tensor:  # [B, K, D]
        x: Tensor = self.patch_embed_v(self.input_v(patches))
        return x + self.modality_v + _at(self.pos_embed_v, patches.positions)

    def encode_a(self, patches: Patches) -> Tensor:
        """E_a: [B, K, D] of all or some patches of each clip, before positions are added a second time."""
        return chain(self.blocks_a, self.embed_a(patches))

    def encode_v(self, patches: Patches) -> Tensor:
        """E_v: [B, K, D], as `encode_a`."""
        return chain(self.blocks_v, self.embed_v(patches))

    # ---- fusion; `positions` [B, K] are those of the encoded patches, None for all in order

    def fuse_joint(
        self, x_a: Tensor, x_v: Tensor, positions_a: Tensor | None = None, positions_v: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """E_f of both modalities together: o_a [B, Ka, D] and o_v [B, Kv, D], before the last (joint) norm."""
        x = self.blocks_u.joint(self._both(x_a, x_v, positions_a, positions_v))  # [B, Ka + Kv, D]
        return x[:, : x_a.shape[1]], x[:, x_a.shape[1] :]

    def fuse_a(self, x_a: Tensor, positions: Tensor | None = None) -> Tensor:
        """E_f of audio alone with the audio norms, the last one included: [B, K, D]."""
        x: Tensor = self.norm_a(self.blocks_u.audio(_placed(x_a, self.inter_pos_embed_a, positions)))
        return x

    def fuse_v(self, x_v: Tensor, positions: Tensor | None = None) -> Tensor:
        """E_f of video alone with the video norms, the last one included: [B, K, D]."""
        x: Tensor = self.norm_v(self.blocks_u.video(_placed(x_v, self.inter_pos_embed_v, positions)))
        return x

    def fuse_stages(self, x_a: Tensor, x_v: Tensor) -> list[Tensor]:
        """The output of each joint fusion block, [B, La + Lv, D] each, audio first, before the last norm."""
        x, stages = self._both(x_a, x_v, None, None), []
        for block in self.blocks_u:
            x = block(x)
            stages.append(x)
        return stages

    def _both(self, x_a: Tensor, x_v: Tensor, positions_a: Tensor | None, positions_v: Tensor | None) -> Tensor:
        """Both modalities side by side, positions added a second time."""
        x_a = x_a + _at(self.inter_pos_embed_a, positions_a)
        x_v = x_v + _at(self.inter_pos_embed_v, positions_v)
        return torch.cat([x_a, x_v], 1)  # [B, Ka + Kv, D]

    @staticmethod
    def pool(x: Tensor) -> Tensor:
        """Mean over patches: [B, K, D] -> [B, D]."""
        return x.mean(1)

    # ---- decoder

    def decode_a(self, o_a: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """D: predictions [B, Kmask, patch] at `masked` positions from joint outputs o_a at the `visible` ones."""
        x = self._tokens(o_a, self.decoder_pos_embed_a + self.decoder_modality_a, self.mask_token_a, visible, masked)
        return self._predictions(chain(self.decoder_blocks, x), self.decoder_pred_a, masked)

    def decode_v(self, o_v: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """D for video, as `decode_a`."""
        x = self._tokens(o_v, self.decoder_pos_embed_v + self.decoder_modality_v, self.mask_token_v, visible, masked)
        return self._predictions(chain(self.decoder_blocks, x), self.decoder_pred_v, masked)

    def _tokens(self, o: Tensor, positions: Tensor, mask_token: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """Decoder inputs, visible patches first: [B, Kvis + Kmask, Ddec]."""
        seen = self.decoder_embed(self.norm(o)) + _at(positions, visible)
        return torch.cat([seen, _at(positions, masked) + mask_token], 1)

    def _predictions(self, x: Tensor, head: nn.Module, masked: Tensor) -> Tensor:
        patches: Tensor = head(self.decoder_norm(x[:, x.shape[1] - masked.shape[1] :]))
        return patches

    # ---- the passes

    def pretrain(self, a: Patches, v: Patches, split_a: Split, split_v: Split) -> Pretrained:
        """Masked pre-training (Eq. 8 and 9). The splits index into `a` and `v`."""
        seen_a, seen_v = a.take(split_a.visible), v.take(split_v.visible)
        hidden_a, hidden_v = a.take(split_a.masked), v.take(split_v.masked)
        x_a, x_v = self.encode_a(seen_a), self.encode_v(seen_v)
        o_a, o_v = self.fuse_joint(x_a, x_v, seen_a.positions, seen_v.positions)
        return Pretrained(
            z_a=self.pool(self.fuse_a(x_a, seen_a.positions)),
            z_v=self.pool(self.fuse_v(x_v, seen_v.positions)),
            recon_a=self.decode_a(o_a, seen_a.positions, hidden_a.positions),
            recon_v=self.decode_v(o_v, seen_v.positions, hidden_v.positions),
            target_a=self.input_a(hidden_a),
            target_v=self.input_v(hidden_v),
            o_a=o_a,
            o_v=o_v,
        )

    forward = pretrain  # for `torch.func.functional_call`

    def pooled_a(self, patches: Patches) -> Tensor:
        """z_a [B, D] of some patches: audio alone through fusion, mean."""
        return self.pool(self.fuse_a(self.encode_a(patches), patches.positions))

    def pooled_v(self, patches: Patches) -> Tensor:
        """z_v [B, D], as `pooled_a`."""
        return self.pool(self.fuse_v(self.encode_v(patches), patches.positions))

    def represent_a(self, audio: Tensor) -> Tensor:
        """Embeddings [B, D] for retrieval: all patches, audio alone through fusion, mean; not L2-normalised."""
        return self.pool(self.fuse_a(self.encode_a(self.patches_a(audio))))

    def represent_v(self, video: Tensor) -> Tensor:
        """Embeddings [B, D] for retrieval, as `represent_a`."""
        return self.pool(self.fuse_v(self.encode_v(self.patches_v(video))))


def _all_patches(values: Tensor) -> Patches:
    batch, patches, _ = values.shape
    return Patches(values, torch.arange(patches, device=values.device).expand(batch, -1))


def _at(table: Tensor, positions: Tensor | None) -> Tensor:
    """Rows of a position table [L, D] at positions [B, K]; None returns the whole table."""
    return table if positions is None else F.embedding(positions, table)


def _placed(x: Tensor, table: Tensor, positions: Tensor | None) -> Tensor:
    """Encoder outputs [B, K, D] with their positions added."""
    return x + _at(table, positions)


def _token(*shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(*shape), std=0.02))


def _positions_a(config: CAVConfig, dim: int) -> nn.Parameter:
    return nn.Parameter(sincos_2d(*config.grid_a, dim))  # [La, dim]


def _positions_v(config: CAVConfig, dim: int) -> nn.Parameter:
    frames, rows, columns = config.grid_v
    return nn.Parameter(sincos_2d(rows, columns, dim).repeat(frames, 1))  # [Lv, dim], the same in all frames

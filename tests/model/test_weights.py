"""Weight files: our own, and those of others in their layouts, against a plain computation."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.checkpoints import MELS, TIMES, TOY, P, State, cav_mae, mae, release, written
from torch import Tensor

from stella.model.avm import AVM
from stella.model.cav import CAV, PRESETS, CAVConfig
from stella.model.weights import WeightsError, describe, load, load_into, save
from stella.rng import generator


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ---- checkpoints as others write them, filled with noise


def norm(s: State, name: str, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * s[f"{name}.weight"] + s[f"{name}.bias"]


def linear(s: State, name: str, x: Tensor) -> Tensor:
    return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]


def block(s: State, name: str, x: Tensor, heads: int, which: str = "") -> Tensor:
    qkv = linear(s, f"{name}.attn.qkv", norm(s, f"{name}.norm1{which}", x))
    q, k, v = (part.chunk(heads, -1) for part in qkv.chunk(3, -1))
    scale = math.sqrt(q[0].shape[-1])
    seen = [torch.softmax(q[h] @ k[h].transpose(1, 2) / scale, -1) @ v[h] for h in range(heads)]
    x = x + linear(s, f"{name}.attn.proj", torch.cat(seen, -1))
    hidden = linear(s, f"{name}.mlp.fc1", norm(s, f"{name}.norm2{which}", x))
    return x + linear(s, f"{name}.mlp.fc2", hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2)


def blocks(s: State, name: str, x: Tensor, heads: int = 3, which: str = "") -> Tensor:
    i = 0
    while f"{name}.{i}.norm1.weight" in s:
        x = block(s, f"{name}.{i}", x, heads, which)
        i += 1
    return x


def embed(s: State, name: str, image: Tensor) -> Tensor:
    kernel = F.conv2d(image, s[f"{name}.proj.weight"], s[f"{name}.proj.bias"], stride=P)
    return kernel.flatten(2).transpose(1, 2)


def inputs() -> tuple[Tensor, Tensor]:
    g = generator("inputs")
    return torch.randn(2, 48, 32, generator=g), torch.randn(2, 1, 3, 32, 32, generator=g)


FREQUENCY_MAJOR = torch.tensor([mel * TIMES + time for time in range(TIMES) for mel in range(MELS)])


def test_cav_mae_is_frequency_major_and_becomes_time_major(tmp_path: Path) -> None:
    s = cav_mae()
    model = CAV(TOY)
    notes = load_into(written(tmp_path, s), model)
    assert any("3 + 1 blocks are kept" in note for note in notes)
    audio, video = inputs()

    a = blocks(s, "blocks_a", embed(s, "patch_embed_a", audio[:, None].mT) + s["pos_embed_a"] + s["modality_a"])
    v = blocks(s, "blocks_v", embed(s, "patch_embed_v", video[:, 0]) + s["pos_embed_v"] + s["modality_v"])
    x_a, x_v = model.encode_a(model.patches_a(audio)), model.encode_v(model.patches_v(video))
    torch.testing.assert_close(x_a, a[:, FREQUENCY_MAJOR])
    torch.testing.assert_close(x_v, v)

    alone_a, alone_v = blocks(s, "blocks_u", a, which="_a"), blocks(s, "blocks_u", v, which="_v")
    torch.testing.assert_close(model.represent_a(audio), norm(s, "norm_a", alone_a).mean(1))
    torch.testing.assert_close(model.represent_v(video), norm(s, "norm_v", alone_v).mean(1))
    joint = blocks(s, "blocks_u", torch.cat([a, v], 1))
    o_a, o_v = model.fuse_joint(x_a, x_v)
    torch.testing.assert_close(o_a, joint[:, :6][:, FREQUENCY_MAJOR])
    torch.testing.assert_close(o_v, joint[:, 6:])

    seen, hidden = torch.tensor([4, 1]), torch.tensor([0, 5, 2])  # time-major
    there = torch.cat([FREQUENCY_MAJOR[seen], FREQUENCY_MAJOR[hidden]])
    tokens = linear(s, "decoder_embed", norm(s, "norm", joint[:, FREQUENCY_MAJOR[seen]]))
    tokens = torch.cat([tokens, s["mask_token"].expand(2, 3, -1)], 1)
    tokens = tokens + s["decoder_pos_embed_a"][:, there] + s["decoder_modality_a"]
    decoded = norm(s, "decoder_norm", blocks(s, "decoder_blocks", tokens, heads=2))
    expected = linear(s, "decoder_pred_a", decoded)[:, 2:].unflatten(-1, (P, P)).mT.flatten(-2)
    ours = model.decode_a(o_a[:, seen], seen.expand(2, -1), hidden.expand(2, -1))
    torch.testing.assert_close(ours, expected)


def test_cav_mae_with_fewer_encoder_blocks_says_what_is_dropped(tmp_path: Path) -> None:
    s = cav_mae()
    config = dataclasses.replace(TOY, fusion_from=2)
    model = CAV(config)
    notes = load_into(written(tmp_path, s), model)
    assert any(
        "became 2 + 2" in n and "blocks 2 to 2 are dropped" in n and "fusion_from=3 with depth=4" in n for n in notes
    )
    for i in range(2):
        assert torch.equal(model.blocks_u[i].attn.qkv.weight, s["blocks_u.0.attn.qkv.weight"])
        assert torch.equal(model.blocks_v[i].mlp.fc1.weight, s[f"blocks_v.{i}.mlp.fc1.weight"])


def test_cav_mae_positions_are_tiled_over_frames(tmp_path: Path) -> None:
    s = cav_mae()
    model = CAV(dataclasses.replace(TOY, frames=3))
    load_into(written(tmp_path, s), model)
    assert torch.equal(model.pos_embed_v.view(3, 4, 24), s["pos_embed_v"].expand(3, -1, -1))
    assert model.inter_pos_embed_v.abs().max() == 0


def test_cav_mae_classifier_without_a_decoder(tmp_path: Path) -> None:
    s = {k: v for k, v in cav_mae().items() if not k.startswith(("decoder", "mask_token"))}
    s |= {"mlp_head.0.weight": torch.zeros(24), "mlp_head.1.weight": torch.zeros(5, 24)}
    notes = load_into(written(tmp_path, s), CAV(TOY))
    assert "it has no decoder: ours keeps its initial values" in notes
    assert "its classifier is left out" in notes


@pytest.mark.parametrize("decoder", [False, True])
def test_mae_is_an_image_model_for_both_encoders(tmp_path: Path, decoder: bool) -> None:
    s = mae(decoder)
    torch.manual_seed(0)
    model = CAV(dataclasses.replace(TOY, fusion_from=2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    notes = load_into(written(tmp_path, s, prefix="", epoch=1), model)
    assert any("initial values" in note for note in notes)
    for name in ("inter_pos_embed_a", "inter_pos_embed_v", "modality_a", "modality_v"):
        assert torch.equal(model.get_parameter(name), before[name])
        torch.nn.init.zeros_(model.get_parameter(name))  # what an image model does not have
    audio, video = inputs()
    image = embed(s, "patch_embed", video[:, 0]) + s["pos_embed"][:, 1:]
    sound = embed(s, "patch_embed", audio[:, None].expand(-1, 3, -1, -1)) + before["pos_embed_a"]
    torch.testing.assert_close(model.represent_v(video), norm(s, "norm", blocks(s, "blocks", image)).mean(1))
    torch.testing.assert_close(model.represent_a(audio), norm(s, "norm", blocks(s, "blocks", sound)).mean(1))
    assert torch.equal(model.blocks_u[1].norm2.weight, s["blocks.3.norm2.weight"])
    assert torch.equal(model.norm.weight, s["norm.weight"])

    changed = [k for k, v in model.state_dict().items() if k.startswith("decoder_") and not torch.equal(v, before[k])]
    assert bool(changed) == decoder
    if decoder:
        assert torch.equal(model.decoder_pos_embed_v, s["decoder_pos_embed"][0, 1:])
        assert torch.equal(model.decoder_pred_v.weight, s["decoder_pred.weight"])
        assert torch.equal(model.mask_token_a, s["mask_token"].flatten())
        assert torch.equal(model.decoder_pred_a.weight, before["decoder_pred_a.weight"])


def test_release_is_time_major_and_brings_its_matching_module(tmp_path: Path) -> None:
    state = release()
    path = written(tmp_path, state, epoch=3)
    model, avm = CAV(TOY), AVM(24, 3)
    assert load_into(path, model, avm) == ["theirs.pth is stella-release"]
    s = {k.removeprefix("backbone.transformer."): v for k, v in state.items()}
    audio, video = inputs()
    a = blocks(s, "blocks_a", embed(s, "patch_embed_a", audio[:, None]) + s["pos_embed_a"] + s["modality_a"])
    v = blocks(s, "blocks_v", embed(s, "patch_embed_v", video[:, 0]) + s["pos_embed_v"] + s["modality_v"])
    joint = blocks(s, "blocks_u", torch.cat([a + s["inter_pos_embed_a"], v + s["inter_pos_embed_v"]], 1))
    o_a, o_v = model.fuse_joint(model.encode_a(model.patches_a(audio)), model.encode_v(model.patches_v(video)))
    torch.testing.assert_close(torch.cat([o_a, o_v], 1), joint)
    assert torch.equal(avm.dense.weight, state["avmatching_module.matching_score.pooler.dense.weight"])
    assert torch.equal(avm.to_v_q.weight, state["avmatching_module.to_v_q.weight"])
    assert load_into(path, model)[-1] == "its matching module is not used"
    loaded = load(path, TOY)
    assert loaded.avm is not None
    torch.testing.assert_close(loaded.avm(o_a, o_v), avm(o_a, o_v))


# ---- our own


def test_our_own_files_come_back_whole(tmp_path: Path) -> None:
    model, avm = CAV(TOY), AVM(24, 12)
    path = tmp_path / "ours.safetensors"
    save(path, model, avm, {"recipe": "demo", "scores": {"A": 12.5}})
    loaded = load(path)
    assert loaded.avm is not None
    assert (loaded.model.config, loaded.avm.heads) == (TOY, 12)
    assert loaded.extra == {"recipe": "demo", "scores": {"A": 12.5}}
    audio, video = inputs()
    assert torch.equal(loaded.model.represent_a(audio), model.represent_a(audio))
    o = model.fuse_joint(model.encode_a(model.patches_a(audio)), model.encode_v(model.patches_v(video)))
    assert torch.equal(loaded.avm(*o), avm(*o))
    assert [p.name for p in tmp_path.iterdir()] == ["ours.safetensors"]
    assert load_into(path, CAV(TOY)) == []  # nothing to tell: a method takes what it needs


def test_a_backbone_alone(tmp_path: Path) -> None:
    path = tmp_path / "ours.safetensors"
    save(path, CAV(TOY))
    assert load(path).avm is None
    assert load_into(path, CAV(TOY), AVM(24, 3))[-1] == "it has no matching module: ours keeps its initial values"


def test_a_header_whose_length_looks_like_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "ours.safetensors"
    for padding in range(0, 300, 8):
        save(path, CAV(TOY), extra={"note": "x" * padding})
        if path.read_bytes()[0] == 0x80:
            break
    assert path.read_bytes()[0] == 0x80
    assert describe(path).format == "stella"


def test_heads_are_not_in_shapes_but_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "ours.safetensors"
    save(path, CAV(TOY), AVM(24, 12))
    with pytest.raises(WeightsError, match="heads was 3 and is now 6"):
        load_into(path, CAV(dataclasses.replace(TOY, heads=6)))
    with pytest.raises(WeightsError, match="avm_heads was 12 and is now 3"):
        load_into(path, CAV(TOY), AVM(24, 3))


def test_describe(tmp_path: Path) -> None:
    model, avm = CAV(TOY), AVM(24, 3)
    path = tmp_path / "ours.safetensors"
    save(path, model, avm, {"commit": "abc"})
    ours = describe(path)
    assert (ours.format, ours.has_avm, ours.extra) == ("stella", True, {"commit": "abc"})
    assert sum(t.numel() for t in ours.state.values()) == sum(p.numel() for m in (model, avm) for p in m.parameters())
    assert CAVConfig(**ours.sizes) == TOY

    theirs = describe(written(tmp_path, cav_mae()))
    assert (theirs.format, theirs.has_avm, theirs.extra) == ("cav-mae", False, {})
    expected = {"encoder_blocks": 3, "fusion_blocks": 1, "dim": 24, "dec_dim": 16, "dec_depth": 1}
    assert theirs.sizes == expected | {"positions_a": 6, "positions_v": 4}
    assert describe(written(tmp_path, mae(False))).sizes == {"blocks": 4, "dim": 24, "positions": 5}
    assert describe(written(tmp_path, release())).has_avm


def test_others_files_have_the_papers_sizes_unless_told_otherwise(tmp_path: Path, monkeypatch: Any) -> None:
    path = written(tmp_path, cav_mae())
    monkeypatch.setitem(PRESETS, "base", TOY)
    assert load(path).model.config == TOY
    assert load(path, dataclasses.replace(TOY, fusion_from=2)).model.config.fusion_from == 2

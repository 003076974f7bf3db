"""Weight files: our own, others' in their original layouts against a plain computation, and bad ones."""

import argparse
import dataclasses
import json
import math
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stella.errors import StellaError
from stella.model.avm import AVM
from stella.model.cav import CAV, PRESETS, CAVConfig
from stella.model.weights import WeightsError, describe, load, load_into, save
from stella.rng import generator

TOY = CAVConfig(
    image_size=32, frames=1, spec_frames=48, mel_bins=32, dim=24, depth=4, fusion_from=3, heads=3,
    dec_dim=16, dec_depth=1, dec_heads=2,
)  # fmt: skip
TIMES, MELS, P = 3, 2, 16
State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ---- checkpoints as others write them, filled with noise


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


# ---- what is refused


def test_a_misfit_names_missing_left_over_and_shapes_and_changes_nothing(tmp_path: Path) -> None:
    s = release()
    del s["backbone.transformer.norm.bias"]
    s["backbone.transformer.surprise"] = torch.zeros(3)
    s["backbone.transformer.modality_a"] = torch.zeros(1, 1, 7)
    model = CAV(TOY)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        load_into(written(tmp_path, s), model)
    message = str(caught.value)
    assert "missing: norm.bias" in message
    assert "left over: surprise" in message
    assert "of another shape: modality_a (file [7], model [24])" in message
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_misfit_in_the_matching_module_leaves_the_backbone_alone(tmp_path: Path) -> None:
    s = release()
    del s["avmatching_module.norm_a.bias"]
    model, avm = CAV(TOY), AVM(24, 3)
    before = model.norm.weight.clone()
    with pytest.raises(WeightsError, match=r"does not fit the matching module: missing: norm_a\.bias"):
        load_into(written(tmp_path, s), model, avm)
    assert torch.equal(model.norm.weight, before)


@pytest.mark.parametrize("make", [cav_mae, release, lambda: mae(True)])
def test_every_tensor_counts(tmp_path: Path, make: Any) -> None:
    """Without any one of a format's tensors that we use, the file is refused."""
    s = make()
    unused = ("cls_token", "blocks_a.0.norm1_a", "blocks_v.0.norm1_a")
    for name in list(s)[:: max(1, len(s) // 25)]:
        if name.startswith(unused) or "avmatching" in name or ("norm1_" in name or "norm2_" in name):
            continue
        with pytest.raises(WeightsError, match="missing: "):
            load_into(written(tmp_path, {k: v for k, v in s.items() if k != name}), CAV(TOY))


def test_others_files_have_the_papers_sizes_unless_told_otherwise(tmp_path: Path, monkeypatch: Any) -> None:
    path = written(tmp_path, cav_mae())
    monkeypatch.setitem(PRESETS, "base", TOY)
    assert load(path).model.config == TOY
    assert load(path, dataclasses.replace(TOY, fusion_from=2)).model.config.fusion_from == 2


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("protocol", ["zip", "plain"])
def test_a_pickle_with_code_is_not_run(tmp_path: Path, protocol: str) -> None:
    path, target = tmp_path / "evil.pth", tmp_path / "ran"
    if protocol == "zip":
        torch.save({"model": Evil(target)}, path)
    else:
        path.write_bytes(pickle.dumps({"model": Evil(target)}, protocol=2))
    with pytest.raises(WeightsError, match=r"object \w+\.mkdir .*save its state_dict alone"):
        describe(path)
    assert not target.exists()


def test_a_checkpoint_with_other_objects_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"the Python object argparse\.Namespace.*save its state_dict alone"):
        load_into(written(tmp_path, mae(False), args=argparse.Namespace(lr=1)), CAV(TOY))


BAD = {
    "empty": (b"", "is empty"),
    "text": (b"version https://example.org/spec\noid 123\n", "neither a torch checkpoint nor a whole safetensors"),
    "zip": (b"PK\3\4 and then nothing", "is damaged"),
    "pickle": (b"\x80\x02not a pickle", "is damaged or a pickle of something besides tensors"),
    "a list": (pickle.dumps([1, 2]), "a pickle of something besides tensors"),
    "huge header": (b"\xff" * 64, "neither"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.pth"
    path.write_bytes(BAD[name][0])
    for read in (describe, load, lambda p: load_into(p, CAV(TOY))):
        with pytest.raises(WeightsError, match=BAD[name][1]) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "none.pth", "cannot be read"), (tmp_path, "is a folder without model.safetensors")):
        with pytest.raises(WeightsError, match=told):
            describe(path)
    with pytest.raises(WeightsError, match="cannot be written"):
        save(tmp_path / "no" / "folder.safetensors", CAV(TOY))


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_a_file_cut_anywhere(tmp_path: Path, kind: str) -> None:
    whole = tmp_path / "whole.safetensors"
    if kind == "safetensors":
        save(whole, CAV(TOY))
    else:
        whole = written(tmp_path, release())
    content, cut = whole.read_bytes(), tmp_path / f"cut.{kind}"
    for length in [1, 7, 8, 9, 100, *range(1000, len(content), len(content) // 20), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(WeightsError):
            load_into(cut, CAV(TOY))


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"none of the known formats .* holds layer\.weight"):
        describe(written(tmp_path, {"layer.weight": torch.zeros(2)}))
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    with pytest.raises(WeightsError, match="no named tensors"):
        describe(tmp_path / "list.pth")


@pytest.mark.parametrize("header", ["{", "[]", '{"config": {"dimension": 3}}', '{"config": {"dim": 10}}'])
def test_damaged_headers(tmp_path: Path, header: str) -> None:
    path = tmp_path / "ours.safetensors"
    save_file({"backbone.norm.weight": torch.zeros(2)}, path, {"stella": header})
    with pytest.raises(StellaError, match="damaged header"):
        describe(path)


def test_names_and_shapes_no_such_file_has(tmp_path: Path) -> None:
    for make, name, shape in (
        (mae, "pos_embed", ()),
        (mae, "blocks.x.norm1.weight", (2,)),
        (cav_mae, "pos_embed_v", (1, 2, 3, 4)),
    ):
        s = (make(True) if make is mae else make()) | {name: torch.zeros(shape)}
        with pytest.raises(WeightsError):
            load_into(written(tmp_path, s), CAV(TOY))


def test_a_parameter_of_another_precision_is_cast(tmp_path: Path) -> None:
    path = tmp_path / "ours.safetensors"
    save(path, CAV(TOY).bfloat16())
    model = CAV(TOY)
    load_into(path, model)
    assert model.norm.weight.dtype == torch.float64
    assert load_file(path)["backbone.norm.weight"].dtype == torch.bfloat16


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path, bomb = written(tmp_path, release()), tmp_path / "bomb.pth"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as out:
        for member in whole.infolist():
            out.writestr(member.filename, whole.read(member))
        out.writestr("archive/data/999", bytes(1 << 24))
    for read in (describe, load, lambda p: load_into(p, CAV(TOY))):
        with pytest.raises(WeightsError, match=r"would unpack to .* torch does not compress"):
            read(bomb)


@pytest.mark.parametrize(
    ("absurd", "says"),
    [
        ({"dim": 3 << 20}, "does not fit its own header"),
        ({"image_size": 16 << 30}, "a header of absurd sizes"),
        ({"spec_frames": 16 << 30}, "does not fit its own header"),
        ({"depth": 1 << 40}, "its header says depth="),
        ({"dec_depth": 10**9}, "its header says depth="),
        ({"avm_heads": 5}, "damaged header"),
        ({"avm_heads": "x"}, "damaged header"),
    ],
)
def test_absurd_sizes_are_refused_before_they_are_built(tmp_path: Path, absurd: dict[str, Any], says: str) -> None:
    path = tmp_path / "ours.safetensors"
    save(path, CAV(TOY), AVM(24, 3))
    header = {"version": 1, "config": dataclasses.asdict(TOY), "avm_heads": 3}
    for key, value in absurd.items():
        (header if key == "avm_heads" else header["config"])[key] = value
    save_file(load_file(path), path, {"stella": json.dumps(header)})
    with pytest.raises(StellaError, match=says):
        load(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: torch.full_like(t, math.nan), "not finite"),
        (lambda t: torch.full_like(t, 1e300), "not finite in float32"),
        (lambda t: t.to(torch.int8), r"not of floating-point type: norm\.weight \(torch\.int8\)"),
        (lambda t: t > 0, "not of floating-point type"),
        (lambda t: t.to(torch.complex64), "not of floating-point type"),
    ],
)
def test_weights_that_are_no_finite_numbers_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    path, model = tmp_path / "ours.safetensors", CAV(TOY)
    save(path, model)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["stella"])
        metadata = {"stella": json.dumps({key: header[key] for key in header if key != "crc32"})}  # not mere damage
    state = load_file(path)
    save_file(state | {"backbone.norm.weight": change(state["backbone.norm.weight"])}, path, metadata)
    before = model.norm.weight.clone()
    with pytest.raises(WeightsError, match=says):
        load_into(path, model)
    assert torch.equal(model.norm.weight, before)


def test_one_flipped_bit_in_a_file_of_ours_is_noticed(tmp_path: Path) -> None:
    """In any tensor, and in what the header says of the model."""
    path = tmp_path / "m.safetensors"
    save(path, CAV(TOY), AVM(24, 3), extra={"scores": {"A": 1.5, "F": None}, "name": "é", "odd": {10: 1, 9: (2,)}})
    content = path.read_bytes()
    assert load(path).extra["scores"]["A"] == 1.5
    last = len(content) - 1
    for at in (last, last - 5001, content.index(b'\\"A\\": 1.5') + 9):  # the digit 5 becomes a 4
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(WeightsError, match="checksum"):
            load(path)


def test_one_flipped_bit_in_a_torch_checkpoint_is_noticed(tmp_path: Path) -> None:
    """It is a zip archive, in which every tensor has a checksum that torch itself does not look at."""
    path = tmp_path / "m.pth"
    torch.save({f"backbone.transformer.{k}": v for k, v in CAV(TOY).state_dict().items()}, path)
    content = path.read_bytes()
    at = content.rindex(b"data/0") // 2  # in the middle of the tensors
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    torch.load(path, weights_only=True)
    with pytest.raises(WeightsError, match="checksum"):
        load(path, TOY)


def test_a_torch_checkpoint_without_checksums_is_read(tmp_path: Path) -> None:
    model, path = CAV(TOY), tmp_path / "m.pth"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({f"backbone.transformer.{k}": v for k, v in model.state_dict().items()}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None
    found = load(path, TOY).model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())

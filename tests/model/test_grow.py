"""A grown model computes what the model computes that it was grown from, and its copies part in training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stella.cli import app
from stella.errors import ConfigError, StellaError
from stella.evaluate.retrieval import unit_a, unit_v
from stella.experiments.recipe import run_config
from stella.model.avm import AVM, Pairs, match, score
from stella.model.cav import CAV, PRESETS, CAVConfig, split_by_noise
from stella.model.grow import grow, grown_config
from stella.model.weights import inputs_for, load, save
from stella.rng import generator
from stella.runs.build import build_method, check
from stella.runs.config import settle
from stella.selection import importance

SIZES = {"image_size": 32, "spec_frames": 32, "mel_bins": 32, "frames": 2}


@pytest.fixture
def small() -> tuple[CAV, AVM]:
    """Random weights, biases and norms too, in double precision."""
    torch.manual_seed(0)
    config = replace(PRESETS["tiny"], **SIZES)
    model, avm = CAV(config), AVM(config.dim, config.heads)
    for parameter in (*model.parameters(), *avm.parameters()):
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    return model.double(), avm.double()


@pytest.fixture
def big(small: tuple[CAV, AVM]) -> tuple[CAV, AVM]:
    model, avm = grow(*small, grown_config(small[0].config, "small"), generator(0, "grow"))
    assert avm is not None
    return model.double(), avm.double()


def clips() -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    return (
        torch.randn(4, 32, 32, generator=noise, dtype=torch.float64),
        torch.randn(4, 2, 3, 32, 32, generator=noise, dtype=torch.float64),
    )


def test_it_has_the_sizes_of_its_preset(big: tuple[CAV, AVM]) -> None:
    assert big[0].config == replace(PRESETS["small"], **SIZES)
    assert big[1].heads == PRESETS["small"].heads


def test_reconstructions_and_embeddings_are_the_same(small: tuple[CAV, AVM], big: tuple[CAV, AVM]) -> None:
    audio, video = clips()
    noise = torch.rand(4, 8, generator=torch.Generator().manual_seed(2))
    ours, theirs = (
        model.pretrain(
            model.patches_a(audio),
            model.patches_v(video),
            split_by_noise(noise[:, :4], 2),
            split_by_noise(noise, 3),
        )
        for model in (small[0], big[0])
    )
    for name in ("recon_a", "recon_v"):
        torch.testing.assert_close(getattr(theirs, name), getattr(ours, name))
    torch.testing.assert_close(theirs.z_a, torch.cat([ours.z_a, ours.z_a], 1))
    cosines, same = (unit_a(model, audio) @ unit_v(model, video).T for model in (small[0], big[0]))
    torch.testing.assert_close(same, cosines, rtol=0, atol=1e-6)  # normalised in single precision


def test_the_matching_module_is_the_same(small: tuple[CAV, AVM], big: tuple[CAV, AVM]) -> None:
    audio, video = clips()
    found = []
    for model, avm in (small, big):
        scored = score(model, avm, model.patches_a(audio), model.patches_v(video))
        pairs = Pairs(torch.arange(4), torch.arange(4), torch.arange(4).roll(1))
        logits = match(model, avm, scored, pairs).logits
        found.append((logits, importance(scored.qk.q_a, scored.qk.k_v, avm.beta)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)


def test_positions_are_interpolated_for_larger_inputs(small: tuple[CAV, AVM]) -> None:
    """Tables that are linear in the position stay so, between the outermost patches."""
    model = small[0]
    for name, table in model.named_parameters():
        if "pos_embed" in name:
            grid = model.config.grid_a if name.endswith("_a") else model.config.grid_v
            places = torch.cartesian_prod(*((torch.arange(n) + 0.5) / n for n in grid))  # of the patches, 0 to 1
            table.data = places.to(table) @ torch.ones(len(grid), table.shape[1], dtype=table.dtype)
    config = grown_config(model.config, "tiny", image_size=64, spec_frames=64)
    big, _ = grow(model, None, config, generator(0, "grow"))
    assert big.config == replace(model.config, image_size=64, spec_frames=64)
    for name, grid in (("pos_embed_a", (4, 2)), ("inter_pos_embed_v", (2, 4, 4)), ("decoder_pos_embed_v", (2, 4, 4))):
        old = model.config.grid_a if name.endswith("_a") else model.config.grid_v
        axes = [((torch.arange(n) + 0.5) / n).clamp(0.5 / o, 1 - 0.5 / o) for n, o in zip(grid, old, strict=True)]
        want = torch.cartesian_prod(*axes).sum(1)
        torch.testing.assert_close(big.get_parameter(name)[:, 0].float(), want)
    name = "blocks_a.0.attn.proj.weight"
    assert torch.equal(big.get_parameter(name), model.get_parameter(name).float())


def test_copies_part_in_training(big: tuple[CAV, AVM]) -> None:
    model, dim = big[0], big[0].config.dim // 2
    audio, video = clips()
    a, v = model.patches_a(audio), model.patches_v(video)
    split_a, split_v = (split_by_noise(torch.rand(4, n, generator=generator(n, "mask")), 2) for n in (4, 8))
    out = model.pretrain(a, v, split_a, split_v)
    torch.autograd.backward(out.recon_a.square().mean() + out.recon_v.square().mean())
    for name in ("blocks_a.0.attn.proj", "blocks_u.0.mlp.fc2", "patch_embed_v"):
        gradient = model.get_parameter(f"{name}.weight").grad
        assert gradient is not None and not torch.allclose(gradient[:dim], gradient[dim:], rtol=0.1)
    new = model.get_parameter("blocks_a.1.mlp.fc2.weight")  # of a block that adds nothing yet
    assert new.grad is not None and not new.any() and new.grad.any()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (PRESETS["small"], "is small already"),
        (PRESETS["base"], "a model of width 768 cannot grow into one of 192; choose a larger one"),
        (replace(PRESETS["tiny"], heads=6), "cannot grow into one of 192"),
        (replace(PRESETS["tiny"], dec_depth=5), "cannot grow into one of 192"),
    ],
    ids=["the same", "larger", "other heads", "deeper"],
)
def test_a_model_that_cannot_grow_into_a_preset_is_refused(sizes: CAVConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grown_config(sizes, "small")


def test_the_command_writes_a_file_to_train_on_from(tmp_path: Path) -> None:
    file, out, larger = (tmp_path / f"{name}.safetensors" for name in ("tiny", "small", "larger"))
    torch.manual_seed(0)
    config = replace(PRESETS["tiny"], **SIZES)
    inputs = replace(inputs_for(config), mean=-4.0, std=2.0, span=None)
    save(file, CAV(config), AVM(config.dim, config.heads), inputs=inputs)
    for given in ([out], [larger, "--image-size", "64"]):
        done = CliRunner().invoke(app, ["grow", str(file), *map(str, given)], catch_exceptions=False)
        assert done.exit_code == 0 and f"model.weights={given[0]}" in done.output.replace("\n", "")
        counted = [
            sum(p.numel() for m in (w.model, w.avm) if m for p in m.parameters()) for w in map(load, (file, given[0]))
        ]
        assert f"{counted[0]:,} parameters became {counted[1]:,}." in done.output.replace("\n", " ")
    again = CliRunner().invoke(app, ["grow", str(file), str(out)])
    assert str(again.exception) == f"{out} exists already; choose another name, or remove it"
    one, other, wide = (load(path) for path in (file, out, larger))
    assert other.inputs == inputs and other.avm is not None and other.extra["grown_from"] == str(file)
    audio = torch.randn(2, 32, 32)
    torch.testing.assert_close(
        *(unit_a(m, audio) @ unit_a(m, audio).T for m in (one.model, other.model)), rtol=0, atol=1e-5
    )
    assert wide.model.config.image_size == 64 and wide.inputs is not None
    assert wide.inputs == replace(inputs, pixels=64, size=round(64 * inputs.size / inputs.pixels))  # else as before


LARGER = [
    "model.preset=small",
    "model.weights=base-tiny",
    "data.size=scenes-full",
    "train.device=cpu",
    "memory.clips=4",
]


def test_a_run_begins_with_weights_that_it_grows(tmp_path: Path) -> None:
    """As with the file of the command, new blocks and all."""
    out, sizes = tmp_path / "grown.safetensors", ["--image-size", "224", "--spec-frames", "1024", "--seed", "3"]
    CliRunner().invoke(app, ["grow", "base-tiny", str(out), *sizes], catch_exceptions=False)
    config, notes = settle(run_config(None, [*LARGER, "method=stella", "model.grow=true", "seed=3"])), list[str]()
    check(config)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    method = build_method(config, torch.device("cpu"), tell=notes.extend)
    assert torch.equal(torch.random.get_rng_state(), before)
    file = load(out)
    assert file.avm is not None and method.avm is not None
    for one, other in ((method.model, file.model), (method.avm, file.avm)):
        assert all(torch.equal(mine, other.state_dict()[name]) for name, mine in one.state_dict().items())
    assert "parameters became" in notes[-1]


@pytest.mark.parametrize(
    ("value", "message"),
    [("model.grow=false", "model.grow=true"), ("model.preset=base", "cannot grow into one of 768")],
)
def test_a_run_that_cannot_take_its_weights_is_refused(value: str, message: str) -> None:
    with pytest.raises(StellaError, match=message):
        check(settle(run_config(None, [*LARGER, "method=er", "model.grow=true", value])))

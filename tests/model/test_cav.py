"""The backbone: sizes, order of patches, what is computed on which patches, precision and compilation."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stella import losses, selection
from stella.errors import ConfigError
from stella.model.cav import CAV, PRESETS, Patches, Pretrained, Split, preset, split_by_noise
from stella.model.vit import patchify_a, patchify_v, sincos_2d
from stella.rng import generator

TOY = preset("tiny", image_size=32, spec_frames=48, frames=3, dim=24, dec_dim=16)  # 24 audio and 12 video patches


def toy(dtype: torch.dtype = torch.float64) -> CAV:
    torch.manual_seed(0)
    return CAV(TOY).to(dtype)


@pytest.fixture(scope="module")
def model() -> CAV:
    return toy()


def clips(batch: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = generator("model", batch)
    audio = torch.randn(batch, TOY.spec_frames, TOY.mel_bins, generator=g).to(dtype)
    return audio, torch.randn(batch, TOY.frames, 3, TOY.image_size, TOY.image_size, generator=g).to(dtype)


def halves(batch: int = 3) -> tuple[Split, Split]:
    """A fifth of the patches seen, three tenths reconstructed, half dropped."""
    splits = []
    for patches in (TOY.patches_a, TOY.patches_v):
        order = torch.rand(batch, patches, generator=generator(patches)).argsort(1)
        noise = torch.rand(batch, selection.kappa(patches, 0.5), generator=generator("noise", patches))
        inside = split_by_noise(noise, selection.visible(patches, 0.8))
        splits.append(Split(order.gather(1, inside.visible), order.gather(1, inside.masked)))
    return splits[0], splits[1]


def objective(out: Pretrained) -> Tensor:
    recon = losses.reconstruction(out.recon_a, losses.norm_pix(out.target_a))
    recon = recon + losses.reconstruction(out.recon_v, losses.norm_pix(out.target_v))
    return (recon + 0.1 * losses.contrastive(out.z_a, out.z_v)).mean()


def assert_same(one: Pretrained, other: Pretrained, **tolerance: float) -> None:
    for field in dataclasses.fields(Pretrained):
        torch.testing.assert_close(getattr(one, field.name), getattr(other, field.name), **tolerance)


# ---- sizes


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", (0.8, 1.2)), ("small", (5, 8)), ("base", (185.45, 185.55)), ("large", (610, 610.2))]
)
def test_preset_sizes(name: str, millions: tuple[float, float]) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in CAV(PRESETS[name]).parameters()) / 1e6
    assert millions[0] < count < millions[1]


def test_preset_inputs() -> None:
    assert (PRESETS["base"].patches_a, PRESETS["base"].patches_v) == (512, 784)
    for name in ("tiny", "small"):
        assert (PRESETS[name].patches_a, PRESETS[name].patches_v) == (128, 4 * 36)
    assert dataclasses.replace(PRESETS["tiny"], frames=2, image_size=32).patches_v == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 100}, "image_size=100 must be a positive multiple of patch_size=16"),
        ({"spec_frames": 1000}, "spec_frames=1000"),
        ({"mel_bins": 0}, "mel_bins=0"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"heads": 7}, "dim=96 must be a positive multiple of heads=7"),
        ({"dec_dim": 66, "dec_heads": 1}, "dec_dim=66 must be a multiple of 4"),
        ({"fusion_from": 4}, "fusion_from=4 must lie between 1 and depth-1=3"),
        ({"frames": 0}, "frames=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preset("tiny", **changes)


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'small'"):
        preset("smal")


def test_inputs_of_another_size_are_refused(model: CAV) -> None:
    with pytest.raises(ConfigError, match=r"spectrograms of shape \[48, 128\], not \[32, 128\]"):
        model.patches_a(torch.zeros(2, 32, 128))
    with pytest.raises(ConfigError, match=r"clips of shape \[3, 3, 32, 32\], not \[2, 3, 32, 32\]"):
        model.patches_v(torch.zeros(1, 2, 3, 32, 32))


@pytest.mark.parametrize("visible", [0, 5])
def test_a_split_without_visible_or_masked_patches_is_refused(visible: int) -> None:
    with pytest.raises(ConfigError, match=f"{visible} patches of a clip are visible and {5 - visible} are masked"):
        split_by_noise(torch.rand(2, 5, generator=generator(0)), visible)


# ---- patches and inputs


def test_audio_patches_are_time_major() -> None:
    audio = torch.arange(32 * 64.0).view(1, 32, 64)
    patches = patchify_a(audio, 16)
    assert patches.shape == (1, 8, 256)
    for time in range(2):
        for mel in range(4):
            block = audio[0, time * 16 : time * 16 + 16, mel * 16 : mel * 16 + 16]
            assert torch.equal(patches[0, time * 4 + mel], block.reshape(-1))


def test_video_patches_are_frame_major_with_channels_last() -> None:
    video = torch.arange(2 * 3 * 32 * 48, dtype=torch.int32).view(1, 2, 3, 32, 48)
    patches = patchify_v(video, 16)
    assert patches.shape == (1, 2 * 2 * 3, 768)
    for frame in range(2):
        for row in range(2):
            for column in range(3):
                block = video[0, frame, :, row * 16 : row * 16 + 16, column * 16 : column * 16 + 16]
                assert torch.equal(patches[0, frame * 6 + row * 3 + column], block.permute(1, 2, 0).reshape(-1))


def test_embedding_is_a_convolution_plus_modality_and_position(model: CAV) -> None:
    audio, video = clips(2)
    kernel_a = model.patch_embed_a.weight.view(-1, 1, 16, 16)
    kernel_v = model.patch_embed_v.weight.view(-1, 16, 16, 3).permute(0, 3, 1, 2)
    a = F.conv2d(audio[:, None], kernel_a, model.patch_embed_a.bias, stride=16).flatten(2).transpose(1, 2)
    frames = [F.conv2d(f, kernel_v, model.patch_embed_v.bias, stride=16).flatten(2) for f in video.unbind(1)]
    v = torch.cat(frames, 2).transpose(1, 2)
    expected_a, expected_v = a + model.modality_a + model.pos_embed_a, v + model.modality_v + model.pos_embed_v
    torch.testing.assert_close(model.embed_a(model.patches_a(audio)), expected_a)
    torch.testing.assert_close(model.embed_v(model.patches_v(video)), expected_v)


def test_pixels_are_normalised_by_imagenet_and_floats_are_not(model: CAV) -> None:
    video = torch.randint(0, 256, (2, 3, 3, 32, 32), generator=generator("u8"), dtype=torch.uint8)
    mean, std = torch.tensor([0.485, 0.456, 0.406]).double(), torch.tensor([0.229, 0.224, 0.225]).double()
    expected = (video.double() / 255 - mean[:, None, None]) / std[:, None, None]
    normalised = model.normalise(video)
    torch.testing.assert_close(normalised, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(model.normalise(normalised), normalised)
    torch.testing.assert_close(model.input_v(model.patches_v(video)), model.input_v(model.patches_v(normalised)))
    torch.testing.assert_close(model.represent_v(video), model.represent_v(normalised))


def test_half_precision_spectrograms_are_taken(model: CAV) -> None:
    audio, _ = clips()
    stored = audio.half()
    assert torch.equal(model.represent_a(stored), model.represent_a(stored.double()))


def test_initial_values() -> None:
    torch.manual_seed(0)
    m = CAV(PRESETS["tiny"])
    bound = math.sqrt(6 / (96 + 4 * 96))
    assert 0.98 * bound < m.blocks_a[0].mlp.fc1.weight.abs().max() <= bound
    assert m.blocks_a[0].mlp.fc1.bias.abs().max() == 0
    assert m.mask_token_a.std().item() == pytest.approx(0.02, rel=0.3)
    frame = m.pos_embed_v.view(4, 36, 96)
    assert all(torch.equal(frame[0], f) for f in frame)
    assert torch.equal(m.pos_embed_a, sincos_2d(16, 8, 96))


def test_sincos_positions() -> None:
    table = sincos_2d(3, 5, 8)
    for row in range(3):
        for column in range(5):
            expected = []
            for at in (column, row):
                angles = [at / 10_000 ** (k / 2) for k in range(2)]
                expected += [math.sin(x) for x in angles] + [math.cos(x) for x in angles]
            assert table[row * 5 + column].tolist() == pytest.approx(expected, abs=1e-6)


# ---- some patches


def test_patches_carry_their_own_positions(model: CAV) -> None:
    """A shuffled clip is the same clip: embeddings and outputs move with their patches."""
    audio, video = clips()
    a, v = model.patches_a(audio), model.patches_v(video)
    index_a, index_v = (torch.rand(p.values.shape[:2], generator=generator(9)).argsort(1) for p in (a, v))
    x_a, x_v = model.encode_a(a.take(index_a)), model.encode_v(v.take(index_v))
    torch.testing.assert_close(x_a, model.encode_a(a).gather(1, index_a[..., None].expand_as(x_a)))
    torch.testing.assert_close(x_v, model.encode_v(v).gather(1, index_v[..., None].expand_as(x_v)))
    torch.testing.assert_close(model.pool(model.fuse_a(x_a, index_a)), model.represent_a(audio))
    torch.testing.assert_close(model.pool(model.fuse_v(x_v, index_v)), model.represent_v(video))
    o_a, o_v = model.fuse_joint(x_a, x_v, index_a, index_v)
    all_a, all_v = model.fuse_joint(model.encode_a(a), model.encode_v(v))
    torch.testing.assert_close(o_a, all_a.gather(1, index_a[..., None].expand_as(o_a)))
    torch.testing.assert_close(o_v, all_v.gather(1, index_v[..., None].expand_as(o_v)))


def test_modalities_alone_do_not_see_each_other(model: CAV) -> None:
    audio, video = clips()
    split_a, split_v = halves()
    a, v = model.patches_a(audio), model.patches_v(video)
    out = model.pretrain(a, v, split_a, split_v)
    other = model.pretrain(a, Patches(v.values + 1, v.positions), split_a, split_v)
    assert torch.equal(out.z_a, other.z_a)
    assert not torch.allclose(out.recon_a, other.recon_a)  # joint fusion does see both


def test_dropped_patches_change_nothing_not_even_nan(model: CAV) -> None:
    audio, video = clips()
    split_a, split_v = halves()
    a, v = model.patches_a(audio), model.patches_v(video)

    def spoil(patches: Patches, split: Split) -> Patches:
        kept = torch.cat([split.visible, split.masked], 1)
        spoiled = torch.full_like(patches.values, torch.nan)
        index = kept[..., None].expand(-1, -1, patches.values.shape[2])
        return Patches(spoiled.scatter(1, index, patches.values.gather(1, index)), patches.positions)

    model.zero_grad()
    whole = model.pretrain(a, v, split_a, split_v)
    objective(whole).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    spoiled = model.pretrain(spoil(a, split_a), spoil(v, split_v), split_a, split_v)
    objective(spoiled).backward()
    assert_same(whole, spoiled, rtol=0, atol=0)
    for expected, parameter in zip(gradients, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(expected, parameter.grad)


def test_masked_patches_are_not_seen(model: CAV) -> None:
    audio, video = clips()
    split_a, split_v = halves()
    a, v = model.patches_a(audio), model.patches_v(video)
    hidden = Patches(a.values.scatter(1, split_a.masked[..., None].expand(-1, -1, a.values.shape[2]), 7.0), a.positions)
    out, other = model.pretrain(a, v, split_a, split_v), model.pretrain(hidden, v, split_a, split_v)
    assert torch.equal(out.recon_a, other.recon_a)
    assert torch.equal(out.recon_v, other.recon_v)
    assert (other.target_a == 7).all()


def test_stored_patches_train_as_their_clips_do(model: CAV) -> None:
    """STELLA+ keeps the selected patches and their positions: the same pass, without the clip."""
    audio, video = clips()
    split_a, split_v = halves()
    a, v = model.patches_a(audio), model.patches_v(video)

    def stored(patches: Patches, split: Split) -> tuple[Patches, Split]:
        seen = split.visible.shape[1]
        kept = patches.take(torch.cat([split.visible, split.masked], 1))
        index = torch.arange(kept.values.shape[1]).expand(3, -1)
        return kept, Split(index[:, :seen], index[:, seen:])

    (kept_a, of_a), (kept_v, of_v) = stored(a, split_a), stored(v, split_v)
    assert kept_a.values.shape[1] == TOY.patches_a // 2
    assert_same(model.pretrain(kept_a, kept_v, of_a, of_v), model.pretrain(a, v, split_a, split_v))
    both = Patches.cat([kept_a, kept_a])
    assert torch.equal(both.values[3:], kept_a.values)
    assert torch.equal(both.positions[3:], kept_a.positions)


def test_dropped_patches_cost_nothing(model: CAV) -> None:
    """Matrix products counted, against the sum over the visible and masked patches alone."""
    c, batch, p = TOY, 3, TOY.patch_size**2
    split_a, split_v = halves(batch)
    (seen_a, hidden_a), (seen_v, hidden_v) = ((s.visible.shape[1], s.masked.shape[1]) for s in (split_a, split_v))
    assert (seen_a, hidden_a, seen_v, hidden_v) == (4, 8, 2, 4)

    def block(tokens: int, dim: int) -> int:
        return 2 * tokens * 12 * dim**2 + 4 * tokens**2 * dim

    encoders = c.fusion_from * (block(seen_a, c.dim) + block(seen_v, c.dim))
    runs = block(seen_a, c.dim) + block(seen_v, c.dim) + block(seen_a + seen_v, c.dim)
    decoder = c.dec_depth * (block(seen_a + hidden_a, c.dec_dim) + block(seen_v + hidden_v, c.dec_dim))
    embed = 2 * c.dim * (seen_a * p + seen_v * 3 * p)
    between = 2 * c.dim * c.dec_dim * (seen_a + seen_v)
    predict = 2 * c.dec_dim * (hidden_a * p + hidden_v * 3 * p)
    expected = batch * (embed + encoders + (c.depth - c.fusion_from) * runs + between + decoder + predict)

    audio, video = clips(batch)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.pretrain(model.patches_a(audio), model.patches_v(video), split_a, split_v)
    assert counter.get_total_flops() == expected


# ---- the same numbers, however it is run


def step(model: CAV, audio: Tensor, video: Tensor, split_a: Split, split_v: Split) -> Tensor:
    return objective(model.pretrain(model.patches_a(audio), model.patches_v(video), split_a, split_v))


def gradient(model: CAV, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_bfloat16_is_close() -> None:
    """Within 2% in the loss and 0.05 in the direction of the gradient, for bfloat16's 8 bits through 14 blocks."""
    model = toy(torch.float32)
    audio, video = clips(dtype=torch.float32)
    full = step(model, audio, video, *halves())
    full_gradient = gradient(model, full)
    # Without oneDNN, whose bfloat16 kernels use instructions that some virtual machines announce and do not have.
    with torch.backends.mkldnn.flags(enabled=False):
        with torch.autocast("cpu", torch.bfloat16):
            half = step(model, audio, video, *halves())
            z = model.represent_a(audio)
        half_gradient = gradient(model, half)
    assert half.item() == pytest.approx(full.item(), rel=0.02)
    assert F.cosine_similarity(half_gradient, full_gradient, dim=0) > 0.95
    assert F.cosine_similarity(z.float(), model.represent_a(audio)).min() > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_is_eager(backend: str) -> None:
    """One graph without a break; float64 so that 1e-9 tells a wrong formula from another order of sums."""
    torch._dynamo.reset()
    config = dataclasses.replace(TOY, depth=2, fusion_from=1, dec_depth=1)
    torch.manual_seed(0)
    model = CAV(config).double()
    audio, video = clips()
    eager = step(model, audio, video, *halves())
    expected = gradient(model, eager)
    compiled = torch.compile(step, fullgraph=True, backend=backend)(model, audio, video, *halves())
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=0)
    torch.testing.assert_close(gradient(model, compiled), expected, rtol=1e-7, atol=1e-9)

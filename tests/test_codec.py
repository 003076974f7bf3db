"""The rehearsal memory's codec: exact bytes, bounded errors, and every method but GMED works with it."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.method_toys import ALL_ENTER, TOY, assert_same_weights, batch, batches, step, trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stella import codec
from stella.codec import decode, encode
from stella.columns import Column, bytes_per_clip, capacity_for, coded
from stella.data.folder import FolderConfig
from stella.data.stream import Stream, StreamConfig
from stella.errors import ConfigError, StellaError
from stella.memory import Memory
from stella.methods import METHODS, MemoryConfig, Method, ObjectiveConfig, build
from stella.methods.base import clip_columns
from stella.model.cav import CAV, PRESETS
from stella.rng import generator

DATA = Path(__file__).parent / "data"
GOLDEN = np.load(DATA / "codec.npz")  # 48 × 48 pixels and 32 × 128 filterbanks of tests/data/clips/bbaf2n.mpg
REPLAY = [name for name, cls in METHODS.items() if cls.columns(TOY, cls.Config()) is not None and name != "gmed"]
FRAMES, SOUND = codec.KEPT[3], codec.KEPT[1]


# ---- against a naive version


def wave(n: int, k: int, i: int) -> float:
    return math.sqrt((1 if k == 0 else 2) / n) * math.cos(math.pi * k * (2 * i + 1) / (2 * n))


def coefficient(patch: Tensor, u: int, v: int, d: int) -> float:
    """One coefficient of a patch [side, side, channels], as a sum of cosines."""
    side, _, channels = patch.shape
    return sum(
        float(patch[i, j, c]) * wave(side, u, i) * wave(side, v, j) * wave(channels, d, c) / side
        for i in range(side)
        for j in range(side)
        for c in range(channels)
    )


def falls(u: int, v: int, channels: int) -> float:
    return 1.0 + u + v if channels == 3 else math.sqrt((1 + u) * (1 + v))


def lowest(side: int, channels: int, n: int) -> list[tuple[int, int]]:
    """The n AC frequencies with the largest expected deviations; rows first among equals."""
    every = [(u, v) for u in range(side) for v in range(side)]
    return sorted(every, key=lambda uv: falls(*uv, channels))[1 : n + 1]


def naive(patch: Tensor, kept: tuple[int, ...]) -> tuple[list[float], list[float], list[int]]:
    """Means, scales and signed levels of a patch."""
    means, scales, levels = [], [], []
    for d, n in enumerate(kept):
        means.append(coefficient(patch, 0, 0, d))
        uvs = lowest(len(patch), len(kept), n)
        shares = [coefficient(patch, u, v, d) * falls(u, v, len(kept)) for u, v in uvs]
        scales.append(float(torch.tensor(max(map(abs, shares))).half()))
        for share in shares:
            size = min(1.0, abs(share) / scales[-1])
            levels.append(round(7 * math.sqrt(size)) * (1 if share > 0 else -1))
    return means, scales, levels


def naive_values(means: list[float], scales: list[float], levels: list[int], side: int, kept: Any) -> Tensor:
    values, at = torch.zeros(side, side, len(kept)), iter(levels)
    for d, n in enumerate(kept):
        terms = [(0, 0, means[d])]
        for u, v in lowest(side, len(kept), n):
            level = next(at)
            terms.append((u, v, level * abs(level) / 49 * scales[d] / falls(u, v, len(kept))))
        for u, v, size in terms:
            for i in range(side):
                for j in range(side):
                    for c in range(len(kept)):
                        values[i, j, c] += side * size * wave(side, u, i) * wave(side, v, j) * wave(len(kept), d, c)
    return values


@pytest.mark.parametrize(("side", "kept"), [(4, (10, 4, 2)), (4, (8,)), (6, (12, 2, 2))])
def test_is_the_naive_version(side: int, kept: tuple[int, ...]) -> None:
    patch = 200 * torch.rand(side, side, len(kept), generator=generator("codec", side))
    code = encode(patch.flatten()[None], side, kept)[0]
    means, scales, levels = naive(patch, kept)
    head = code[: 4 * len(kept)].contiguous().view(torch.float16).tolist()
    assert head == pytest.approx([*means, *scales], rel=1e-3)
    pairs = [nibble - 8 for byte in code[4 * len(kept) :].tolist() for nibble in (byte // 16, byte % 16)]
    assert pairs == levels
    rounded = [float(torch.tensor(mean).half()) for mean in means]
    torch.testing.assert_close(
        decode(code, side, kept).view_as(patch), naive_values(rounded, scales, levels, side, kept), atol=0.02, rtol=0
    )


def test_the_transform_is_orthonormal() -> None:
    for n in (1, 3, 16):
        torch.testing.assert_close(codec.dct(n) @ codec.dct(n).T, torch.eye(n, dtype=torch.float64))


# ---- recorded


@pytest.mark.parametrize(("name", "side", "kept"), [("frames", 16, FRAMES), ("sound", 16, SOUND)])
def test_the_bytes_of_a_real_clip_are_the_recorded_ones(name: str, side: int, kept: tuple[int, ...]) -> None:
    """Up to coefficients on the border of two levels, which the rounding of another processor's products decides."""
    values, code = (torch.from_numpy(GOLDEN[key]) for key in (name, f"{name}_code"))
    now = encode(values, side, kept)
    assert now.dtype == torch.uint8 and (now == code).float().mean() > 0.998
    decoded = torch.from_numpy(GOLDEN[f"{name}_decoded"])
    torch.testing.assert_close(decode(code, side, kept), decoded.float(), atol=0.05, rtol=2e-3)


@pytest.fixture(scope="module")
def clips() -> tuple[Tensor, Tensor]:
    """Three real clips: frames at the paper's size, 2.56 s of sound without padding."""
    source = FolderConfig(path=str(DATA / "clips"), pixels=224, duration=2.56).open()
    shape = StreamConfig(batch_size=3, augment=False, shuffle=False, size=224, spec_frames=256)
    seen = next(Stream([("", source)], shape))
    return seen.video, seen.audio


def test_real_clips_look_and_sound_the_same(clips: tuple[Tensor, Tensor]) -> None:
    video, audio = clips
    frames = coded({"x": Column(torch.uint8, (4, 3, 224, 224), codec.frames(4, 224, 16))})["x"]
    sound = coded({"x": Column(torch.float16, (256, 128), codec.spectrogram(256, 128, 16))})["x"]
    seen, heard = (column.decode(column.encode(x)) for column, x in ((frames, video), (sound, audio)))
    assert (seen.dtype, heard.dtype) == (torch.uint8, torch.float16)
    error = (seen.float() - video.float()).square().flatten(1).mean(1)
    assert (10 * torch.log10(255**2 / error)).min() > 38
    assert ((heard - audio).square().flatten(1).mean(1).sqrt() / audio.flatten(1).std(1)).max() < 0.13
    assert (video[0].nbytes + 2 * audio[0].numel()) > 9 * (frames.bytes + sound.bytes)


# ---- any input


def full(values: Tensor, channels: int) -> Tensor:
    """All coefficients of patches [n, 256·channels], float64 [n, channels, 16, 16]."""
    patch = values.double().view(-1, 16, 16, channels)
    waves, colours = codec.dct(16), codec.dct(channels)
    return torch.einsum("ui,vj,dc,nijc->nduv", waves, waves, colours, patch) / 16


KINDS = ("constant", "noise", "saturated", "point", "edge", "stripes")


def pictures(kind: str, seed: int, low: float, high: float, channels: int) -> Tensor:
    g = generator("pictures", seed)
    noise = torch.rand(2, 16, 16, channels, generator=g)
    if kind == "constant":
        noise = noise[:, :1, :1].expand(-1, 16, 16, -1)
    elif kind == "saturated":
        noise = noise.round()
    elif kind == "point":
        noise = torch.zeros_like(noise)
        noise[:, seed % 16, seed // 16 % 16] = 1
    elif kind == "edge":
        noise = (torch.arange(16)[:, None, None] + torch.arange(16)[:, None] > seed % 31).float().expand_as(noise)
    elif kind == "stripes":
        noise = (torch.arange(16) % 2).float()[:, None].expand_as(noise)
    return (low + (high - low) * noise).flatten(1)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS), st.integers(0, 999), st.sampled_from([(0.0, 255.0), (-3.0, 4.0), (-4e3, 4e3), (0.0, 1e-3)])
)
@pytest.mark.parametrize("kept", [FRAMES, SOUND])
def test_each_kept_coefficient_is_near_and_the_others_are_zero(
    kept: tuple[int, ...], kind: str, seed: int, limits: tuple[float, float]
) -> None:
    """A level is at most half a step of √ from its value: |Δc| ≤ (1/14)(2 + 1/14)·σ·s."""
    values = pictures(kind, seed, *limits, len(kept))
    decoded = decode(encode(values, 16, kept), 16, kept)
    before, after = full(values, len(kept)), full(decoded, len(kept))
    size = values.abs().max().double()
    for d, n in enumerate(kept):
        uvs = lowest(16, len(kept), n)
        weight = torch.tensor([falls(u, v, len(kept)) for u, v in uvs], dtype=torch.float64)
        at = tuple(torch.tensor(uvs).T)
        was, now = before[:, d][:, at[0], at[1]] * weight, after[:, d][:, at[0], at[1]] * weight
        scale = was.abs().amax(1, keepdim=True)
        assert ((now - was).abs() <= 0.15 * scale + 2e-5 * size + 1e-7).all()
        assert ((after - before)[:, d, 0, 0].abs() <= 1e-3 * size).all()
        after[:, d, 0, 0], after[:, d][:, at[0], at[1]] = 0, 0
    assert after.abs().max() <= 1e-5 * size + 1e-9


@settings(max_examples=50, deadline=None)
@given(colour=st.tuples(*[st.integers(0, 255)] * 3))
def test_a_frame_of_one_colour_is_exact(colour: tuple[int, int, int]) -> None:
    column = coded({"x": Column(torch.uint8, (2, 3, 32, 32), codec.frames(2, 32, 16))})["x"]
    video = torch.tensor(colour, dtype=torch.uint8).view(1, 1, 3, 1, 1).expand(1, 2, 3, 32, 32)
    assert torch.equal(column.decode(column.encode(video)), video)


def test_values_beyond_half_precision_stay_finite_and_nan_stays_nan() -> None:
    values = torch.zeros(3, 256)
    values[0, ::7], values[1] = 6e4, -6e4
    values[2, 5] = torch.nan
    decoded = decode(encode(values, 16, SOUND), 16, SOUND)
    assert decoded[:2].isfinite().all() and decoded[2].isnan().all()
    torch.testing.assert_close(decoded[1], values[1], rtol=1e-3, atol=0)


def test_a_whole_clip_is_coded_as_its_patches_are() -> None:
    seen, model = batch(2), CAV(TOY)
    columns = clip_columns(TOY)
    for whole, parts, channels in (
        (columns["video"].patching.encode(seen.video), model.patches_v(seen.video), 3),
        (columns["audio"].patching.encode(seen.audio), model.patches_a(seen.audio), 1),
    ):
        own = codec.patches(parts.values.shape[1], 16, channels)
        assert torch.equal(whole, own.encode(parts.values)) and own.coded_shape == whole.shape[1:]
        assert torch.equal(own.decode(whole).flatten(2), decode(whole, 16, codec.KEPT[channels]).flatten(2))
    assert columns["video"].patching.decode(columns["video"].patching.encode(seen.video)).numel() == seen.video.numel()


# ---- in the memory


def small(codec_on: bool = True, capacity: int = 8) -> Memory:
    columns = clip_columns(TOY)
    return Memory(coded(columns) if codec_on else columns, capacity, generator("codec memory"))


def add(memory: Memory, n: int, first: int = 0) -> None:
    seen = batch(n, first)
    memory.add(seen.ids, video=seen.video, audio=seen.audio)


def test_the_memory_keeps_codes_and_gives_clips() -> None:
    memory, plain = small(), small(False)
    for m in (memory, plain):
        add(m, 6)
        add(m, 6, 6)
    rows = memory.state_dict()["rows"]
    assert rows["video"].shape == (8, 16, 72) and rows["audio"].shape == (8, 64, 72)
    assert sum(r.nbytes for r in rows.values()) == 8 * bytes_per_clip(memory.columns) == 8 * (8 + 80 * 72)
    ours, theirs = memory.draw(5), plain.draw(5)
    assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.slots, theirs.slots)
    for name in ("video", "audio"):
        column = memory.columns[name]
        code = torch.cat([column.encode(getattr(batch(6, first), name)) for first in (0, 6)])
        assert torch.equal(rows[name], code[rows["id"]])
        assert ours[name].dtype == theirs[name].dtype and ours[name].shape == theirs[name].shape
        torch.testing.assert_close(ours[name], column.decode(code[ours.ids]), atol=1, rtol=1e-3)


def saved(state: dict[str, Any]) -> Any:
    """The state as read from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_saved_state_is_exact_and_another_form_is_refused() -> None:
    memory, other = small(), small()
    add(memory, 7)
    other.load_state_dict(saved(memory.state_dict()))
    assert torch.equal(memory.draw(4)["video"], other.draw(4)["video"])
    with pytest.raises(StellaError, match=r"columns\.video was 'torch.uint8 \[16, 72\]' and is now"):
        small(False).load_state_dict(memory.state_dict())


@pytest.mark.parametrize("name", REPLAY)
def test_six_times_as_many_clips_fit_into_the_same_bytes(name: str) -> None:
    cls, model = METHODS[name], PRESETS["base"]
    plain = cls.columns(model, cls.Config())
    small = cls.stored_columns(model, cls.Config(), MemoryConfig(codec="dct"))
    room = 100 * bytes_per_clip(plain)
    assert capacity_for(small, clips=None, bytes=room) >= 6 * capacity_for(plain, clips=None, bytes=room) == 600
    assert cls.stored_columns(model, cls.Config(), MemoryConfig()) == plain


def make(name: str) -> Method:
    torch.manual_seed(3)
    memory = MemoryConfig(clips=7, codec="dct")
    one = build(name, CAV(TOY), ALL_ENTER.get(name, {}), ObjectiveConfig(), memory, 0)
    trainer(one)
    return one


def test_gmed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory\.codec=dct does not fit GMED.*set memory\.codec=none"):
        make("gmed")


class NoWaiting(TorchDispatchMode):
    """Fails on what makes the host wait for values of a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


QUICK = ("er", "derpp", "stella_plus")  # whole clips, stored outputs, patches; the others store the same columns


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in REPLAY])
def test_a_method_trains_and_resumes_to_the_bit(name: str) -> None:
    one, other = make(name), make(name)
    loop, resumed = trainer(one), trainer(other)
    first, second, *rest = batches([6, 6, 6, 3])
    step(loop, first), step(loop, second)
    resumed.load_state_dict(saved(loop.state_dict()))
    for each in rest:
        step(loop, each), step(resumed, each)
    assert_same_weights(one, other)
    assert one.memory is not None and other.memory is not None and len(one.memory) == 7
    ours, theirs = one.memory.state_dict()["rows"], other.memory.state_dict()["rows"]
    assert all(torch.equal(ours[column], theirs[column]) for column in ours)
    with NoWaiting():
        one.loss(batch(4, 30))


def test_autocast_changes_no_byte() -> None:
    patching, audio = clip_columns(TOY)["audio"].patching, batch(3).audio
    code = patching.encode(audio)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(patching.encode(audio), code)
        inside = patching.decode(code)
    assert torch.equal(patching.decode(code), inside)

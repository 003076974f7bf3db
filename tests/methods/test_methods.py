"""Which methods are the same under which conditions; objective, bytes, refusals. (test_contract: what all promise.)"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from helpers.method_toys import TOY, assert_same_weights, batch, batches, method, next_draw, plain_parts, spy, train

from stella.clip import Batch
from stella.columns import bytes_per_clip
from stella.config import to_tree
from stella.errors import ConfigError, StellaError
from stella.methods import METHODS, MemoryConfig, Method, ObjectiveConfig, build
from stella.methods.ablations import MATS, AblationConfig
from stella.methods.er import ER
from stella.model.cav import CAV, PRESETS, preset, split_by_noise

# ---- which methods are the same


@cache
def trained(name: str, **args: Any) -> tuple[Method, list[dict[str, float]]]:
    one = method(name, **args)
    return one, train(one)


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("derpp", {"alpha": 0.0}, {}),
        ("cls_er", {"weight": 0.0}, {}),
        ("esmer", {"gamma": 0.0, "beta": 1e9}, {}),
        ("mir", {"candidates": 1}, {}),
        ("gmed", {"alpha": 0.0}, {"alpha": 1e4}),
    ],
)
def test_without_what_they_add_they_are_er(name: str, off: dict[str, float], on: dict[str, float]) -> None:
    (er, _), (same, _), (other, _) = trained("er"), trained(name, **off), trained(name, **on)
    assert_same_weights(er, same)
    held = same.memory.state_dict()["rows"]
    assert all(torch.equal(held[column], rows) for column, rows in er.memory.state_dict()["rows"].items())
    with pytest.raises(AssertionError):
        assert_same_weights(er, other)


@pytest.mark.parametrize("name", ["er", "derpp", "cls_er", "stella", "stella_plus"])
def test_as_many_past_clips_are_drawn_as_are_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = method(name, clips=40, draws=3)
    train(one, [6, 6, 6])
    calls = spy(monkeypatch, one.model)
    one.loss(batch(6, 18))
    assert len(calls[0][0].positions) == 6 + 18
    assert train(method(name, clips=4, draws=0.01), [3, 3])  # at least one clip is drawn
    with pytest.raises(ConfigError, match=r"draws=0\.0 must be above 0: past clips for each current one"):
        method(name, draws=0)


def test_a_method_of_ones_own_says_how_many_past_clips_are_drawn() -> None:
    @dataclass(frozen=True)
    class Mine:
        draws: float = 3.0

    own = ER(CAV(TOY), Mine(), ObjectiveConfig(), MemoryConfig(clips=40), 0)
    train(own, [6, 6, 6])
    assert len(own.draw(batch(6, 18)) or ()) == 18


def test_mats_needs_adjacent_frames_and_time_steps() -> None:
    for sizes, found in (({"frames": 1}, "1 and 4"), ({"spec_frames": 16}, "4 and 1")):
        model = preset("tiny", **{"image_size": 32, "spec_frames": 64} | sizes)
        with pytest.raises(ConfigError, match=rf"clips have {found}: give them two or more of both"):
            MATS.check(model, AblationConfig(), ObjectiveConfig())
    MATS.check(preset("tiny"), AblationConfig(), ObjectiveConfig())


@pytest.mark.parametrize(
    ("name", "key"),
    [("derpp", "alpha"), ("stella", "alpha"), ("random", "alpha"), ("gmed", "gamma"), ("cls_er", "weight")],
)
def test_negative_weights_are_refused(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=-1\.0 must not be negative"):
        method(name, **{key: -1.0})


@pytest.mark.parametrize("name", ["multitask", "er", "lump", "mir", "gmed"])
def test_without_a_memory_it_is_finetune(name: str) -> None:
    (finetune, theirs), (one, ours) = trained("finetune"), trained(name, clips=0)
    assert theirs == ours
    assert_same_weights(finetune, one)
    assert one.joint == (name == "multitask")
    if "virtual" in one.generators:  # nothing was looked at
        untouched = method(name, clips=0).generators["virtual"]
        assert torch.equal(one.generators["virtual"].get_state(), untouched.get_state())


@pytest.mark.parametrize("name", ["stella", "stella_plus", "random", "mats"])
def test_selection_changes_what_is_learnt_and_without_it_stella_is_derpp(name: str) -> None:
    derpp, theirs = trained("derpp")
    with pytest.raises(AssertionError):
        assert_same_weights(derpp, trained(name)[0])
    if name.startswith("stella"):
        stella, ours = trained(name, keep_ratio=1.0, correlation=False)
        assert [{k: v for k, v in parts.items() if k != "avm"} for parts in ours] == theirs
        assert_same_weights(derpp, stella)
        for column in ("id", "z_a", "z_v"):
            assert torch.equal(derpp.memory.state_dict()["rows"][column], stella.memory.state_dict()["rows"][column])


# ---- the objective


@pytest.mark.parametrize("norm_pix", [True, False])
def test_er_is_the_mean_over_current_and_drawn_clips(norm_pix: bool) -> None:
    """Clip by clip; only the contrastive term sees them all."""
    torch.manual_seed(0)
    objective = ObjectiveConfig(contrast_weight=0.3, tau=0.2, mask_ratio=0.7, norm_pix=norm_pix)
    er = build("er", CAV(TOY).double(), {}, objective, MemoryConfig(clips=4), 5)
    first, second = batches([4, 6])
    er.after_batch(first, er.loss(first))
    slots = next_draw(er, 6)
    mask = er.generators["mask"].clone_state()
    noise_a, noise_v = (torch.rand(10, n, generator=mask) for n in (TOY.patches_a, TOY.patches_v))
    parts = er.loss(second).parts
    audio = torch.cat([second.audio, first.audio[slots].half().float()])
    a, v = er.model.patches_a(audio), er.model.patches_v(torch.cat([second.video, first.video[slots]]))
    splits = (split_by_noise(noise, int(noise.shape[1] * (1 - 0.7))) for noise in (noise_a, noise_v))
    expected, *_ = plain_parts(er.model, a, v, *splits, 0.2, norm_pix)
    assert list(parts) == list(expected)
    for name, part in expected.items():
        torch.testing.assert_close(parts[name], (0.3 if name == "contrastive" else 1) * part.mean())


@pytest.mark.parametrize("name", ["derpp", "stella", "stella_plus", "random", "mats"])
def test_penalty_is_the_distance_to_what_the_outputs_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = method(name, alpha=0.25, clips=6)
    train(one, [6])
    calls = spy(monkeypatch, one)
    slots = next_draw(one, 6)
    part = one.loss(batch(8, 6)).parts["penalty"]
    rows = one.memory.state_dict()["rows"]
    out = vars(calls[0][-1])
    distances = [(out[z][8 + i] - rows[z][slots[i]]).square().mean() for i in range(6) for z in ("z_a", "z_v")]
    torch.testing.assert_close(part, 0.25 * sum(distances) / 6)


def test_the_papers_objective_is_the_default() -> None:
    """test_recipes has what the paper prints of each method."""
    assert METHODS["stella"].Config().chunk == 4
    assert to_tree(ObjectiveConfig()) == {"contrast_weight": 0.1, "tau": 0.05, "mask_ratio": 0.8, "norm_pix": True}


def test_mats_ranks_patches_by_the_change_of_their_embeddings() -> None:
    """A loop over clips, steps and places; positions are no change, and pixels are not compared."""
    one, b = method("mats", dtype=torch.float64), batch(3)
    for positions in (one.model.pos_embed_a, one.model.pos_embed_v):
        torch.nn.init.normal_(positions)
    a, v = one.model.patches_a(b.audio.double()), one.model.patches_v(b.video)
    video = one.model.patches_v(one.model.normalise(b.video))
    for order, patches, embed, grid in (
        (one.order_a(a), a, one.model.patch_embed_a, TOY.grid_a),
        (one.order_v(v), video, one.model.patch_embed_v, TOY.grid_v),
    ):
        places = grid[1] * (grid[2] if len(grid) > 2 else 1)
        for clip, values in enumerate(patches.values):
            tokens = [embed(value) for value in values]
            later = [i + places if i < places else i for i in range(len(tokens))]  # nothing comes before the first step
            change = [(tokens[i] - tokens[i - places]).norm().item() for i in later]
            assert order[clip].tolist() == sorted(range(len(tokens)), key=lambda i, change=change: -change[i])


# ---- bytes


def _bytes(name: str, preset: str, **args: Any) -> int:
    cls = METHODS[name]
    columns = cls.columns(PRESETS[preset], cls.Config(**args))
    assert columns is not None
    return bytes_per_clip(columns)


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if cls.columns(TOY, cls.Config())])
def test_2000_clips_of_the_paper_take_at_most_1_8_gb(name: str) -> None:
    """Except GMED, which also keeps its edits."""
    video, audio = 4 * 3 * 224 * 224, 1024 * 128
    clip = 8 + video + 2 * audio  # id, uint8 frames, half-precision spectrogram
    outputs, queries, scores = 4 * 2 * 768, 4 * 2 * 768, 4 * 2 * (512 + 784)
    patches = 392 * 768 + 2 * 256 * 256 + 2 * (392 + 256)  # chosen pixels and half-precision audio, their positions
    expected = dict.fromkeys(("derpp", "random", "mats"), clip + outputs) | {
        "gmed": clip + 2 * (video + audio) + 4,
        "stella": clip + outputs + queries + scores,
        "stella_plus": 8 + patches + outputs + queries,
        "chorus": 8 + patches,
    }
    assert _bytes(name, "base") == expected.get(name, clip)
    assert name == "gmed" or 2000 * _bytes(name, "base") <= 1.8e9


@pytest.mark.parametrize("preset", PRESETS)
def test_stella_plus_keeps_twice_the_clips_in_the_same_bytes(preset: str) -> None:
    stella, plus = _bytes("stella", preset), _bytes("stella_plus", preset)
    assert 2 * plus == pytest.approx(stella, rel=0.02)


def test_capacity_in_bytes_becomes_clips() -> None:
    each = bytes_per_clip(METHODS["stella"].columns(TOY, METHODS["stella"].Config()))
    torch.manual_seed(0)
    for name, least, most in (("stella", 100, 100), ("stella_plus", 196, 204)):
        memory = MemoryConfig(clips=None, bytes=100 * each)
        one = build(name, CAV(TOY), {}, ObjectiveConfig(), memory, 0)
        assert least <= one.memory.capacity <= most
        assert one.memory.capacity * bytes_per_clip(one.memory.columns) <= 100 * each


# ---- bad input

NAN = float("nan")


def test_an_unknown_method_fails_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"unknown method 'stela': did you mean stella\? \(known: .*er, .*derpp"):
        method("stela")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("cls_er", {key: value}) for key in ("weight", "alpha_stable", "rate_plastic") for value in (-0.1, NAN)),
        *(("cls_er", {"alpha_plastic": 1.1}), ("cls_er", {"rate_stable": 1.1}), ("esmer", {"beta": 0.0})),
        *(("esmer", {key: -0.1}) for key in ("gamma", "alpha", "alpha_loss", "rate")),
        *(("esmer", {key: 1.1}) for key in ("alpha", "alpha_loss", "rate")),
        *(("lump", {"concentration": value}) for value in (0.0, -1.0, NAN, float("inf"))),
        *(("stella", {key: 0}) for key in ("beta", "chunk", "avm_heads")),
        *(("mir", {"candidates": 0}), ("stella", {"avm_heads": 5})),
        *(("chorus", {"draws": value}) for value in (0.0, -1.0, NAN)),
    ],
)
def test_nonsense_is_refused_by_name(name: str, wrong: dict[str, float]) -> None:
    [(key, value)] = wrong.items()
    with pytest.raises(ConfigError, match=rf"{key.removeprefix('avm_')}(=| .*not ){value}"):
        method(name, **wrong)


def test_wrong_hyper_parameters_fail_with_their_key() -> None:
    with pytest.raises(ConfigError, match=r"unknown key args\.alfa: did you mean args\.alpha"):
        method("derpp", alfa=1)
    with pytest.raises(ConfigError, match=r"unknown key args\.alpha \(there are none here"):
        method("finetune", alpha=1)
    with pytest.raises(ConfigError, match=r"args\.audio must be one of time, frequency, free"):
        method("stella", audio="tempo")
    for name in ("stella", "stella_plus", "random", "mats", "chorus"):
        with pytest.raises(ConfigError, match=r"args\.keep_ratio=1\.1 must lie between 0 and 1"):
            method(name, keep_ratio=1.1)


@pytest.mark.parametrize(
    ("name", "given", "key", "least"),
    [
        *((name, {"keep_ratio": 0.2}, "keep_ratio", 0.25) for name in ("stella", "stella_plus", "random", "chorus")),
        ("mats", {"keep_ratio": 0.21}, "keep_ratio", 0.25),  # enough for the 64 patches of audio, not the 16 of video
        ("stella", {"keep_ratio_a": 0.1}, "keep_ratio_a", 0.2032),
        ("stella", {"keep_ratio_v": 0.2}, "keep_ratio_v", 0.25),
        ("stella", {"keep_ratio": 0.1, "keep_ratio_v": 0.5}, "keep_ratio", 0.2032),
    ],
)
def test_too_few_kept_patches_are_refused_with_the_key_and_what_is_enough(
    name: str, given: dict[str, float], key: str, least: float
) -> None:
    with pytest.raises(ConfigError, match=rf"args\.{key}={given[key]:g} keeps .* set it to at least {least:g}$"):
        method(name, **given)
    method(name, **given | {key: least})
    with pytest.raises(ConfigError, match="at least"):
        method(name, **given | {key: least - 1e-4})


def test_a_memory_given_twice_is_refused() -> None:
    with pytest.raises(StellaError, match="set exactly one"):
        build("er", CAV(TOY), {}, ObjectiveConfig(), MemoryConfig(bytes=10**6), 0)
    build("finetune", CAV(TOY), {}, ObjectiveConfig(), MemoryConfig(clips=10**12), 0)


def test_float_pixels_are_not_squeezed_into_a_memory_of_bytes() -> None:
    er, one = method("er"), batch(2)
    floats = Batch(er.model.normalise(one.video), one.audio, one.ids)
    with pytest.raises(StellaError, match=r"stores video as torch\.uint8"):
        er.after_batch(floats, er.loss(floats))

"""Augmentation: independent draws for each clip, one crop for all its frames, the same for the same seed."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stella.errors import StellaError
from stella.media.augment import add_noise, center_crop, multi_scale_crop, time_shift
from stella.rng import generator


def each(count: int, *names: object) -> list[torch.Generator]:
    """A generator for each of so many clips."""
    return [generator(*names, clip) for clip in range(count)]


def noise_video(batch: int, frames: int = 2, height: int = 40, width: int = 52) -> Tensor:
    shape = (batch, frames, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(0, "video", *shape))


def classic_crops(height: int, width: int, size: int) -> list[tuple[int, int, int, int]]:
    """Every crop (x, y, w, h) that MultiScaleCrop with max_distort=1 and the 13 fixed offsets can choose."""
    base = min(height, width)
    lengths = [int(base * s) for s in (1, 0.875, 0.75, 0.66)]
    lengths = [size if abs(n - size) < 3 else n for n in lengths]
    crops = []
    for i, h in enumerate(lengths):
        for j, w in enumerate(lengths):
            if abs(i - j) > 1:
                continue
            step_x, step_y = (width - w) // 4, (height - h) // 4
            corners, sides, inner = product((0, 4), (0, 4)), ((0, 2), (4, 2), (2, 4), (2, 0)), product((1, 3), (1, 3))
            places = [*corners, (2, 2), *sides, *inner]
            crops += [(px * step_x, py * step_y, w, h) for px, py in places]
    return crops


def naive(video: Tensor, crop: tuple[int, int, int, int], size: int) -> Tensor:
    x, y, w, h = crop
    box = video[..., y : y + h, x : x + w].flatten(0, 1).float()
    scaled = F.interpolate(box, (size, size), mode="bilinear", align_corners=False)
    return scaled.round().to(torch.uint8).view(*video.shape[:2], 3, size, size)


def differ(a: Tensor, b: Tensor) -> float:
    return (a.int() - b.int()).abs().float().mean().item()


def test_each_crop_is_one_of_the_classic_ones_scaled_as_interpolate_does() -> None:
    video = noise_video(40)
    out = multi_scale_crop(video, 28, each(40, 0, "crop"))
    assert out.dtype == torch.uint8 and out.shape == (40, 2, 3, 28, 28)
    crops = classic_crops(40, 52, 28)
    chosen = set()
    for clip, result in zip(video, out, strict=True):
        errors = [differ(result, naive(clip[None], crop, 28)[0]) for crop in crops]
        best = min(range(len(crops)), key=errors.__getitem__)
        assert errors[best] < 0.03  # rounding of a few ties
        chosen.add(crops[best])
    assert len(chosen) > 20


def test_every_shape_and_place_is_drawn() -> None:
    """A ramp tells the crop's box: x from red, y from green."""
    x = torch.arange(200).expand(200, 200)
    ramp = torch.stack([x, x.T, torch.zeros_like(x)]).to(torch.uint8).expand(400, 1, 3, 200, 200)
    out = multi_scale_crop(ramp, 100, each(400, 1, "crop"))[:, 0].float()
    left, right = out[:, 0, 50, 0], out[:, 0, 50, -1]
    top, bottom = out[:, 1, 0, 50], out[:, 1, -1, 50]
    widths = ((right - left) / 99 * 100).round()
    heights = ((bottom - top) / 99 * 100).round()
    sides = {200, 175, 150, 132}
    for found in (widths, heights):
        assert {min(sides, key=lambda s: abs(s - v)) for v in found.unique().tolist()} == sides
    pairs = {(round(w / 25), round(h / 25)) for w, h in zip(widths.tolist(), heights.tolist(), strict=True)}
    assert len(pairs) == 10  # of 16, those at most one scale apart
    assert top.max() > 60 and left.max() > 60 and top.min() <= 1 and left.min() <= 1


def test_frames_of_a_clip_share_their_crop_and_clips_do_not() -> None:
    still = noise_video(1, 1).expand(16, 5, -1, -1, -1)
    out = multi_scale_crop(still, 28, each(16, 2, "crop"))
    assert all(torch.equal(out[:, 0], out[:, t]) for t in range(5))
    assert len({clip.numpy().tobytes() for clip in out}) > 8


def test_a_crop_of_the_wanted_size_keeps_its_pixels() -> None:
    video = noise_video(64, 1, 32, 32)
    out = multi_scale_crop(video, 32, each(64, 3, "crop"))
    assert any(torch.equal(a, b) for a, b in zip(out, video, strict=True))


@pytest.mark.parametrize("value", [0, 255])
@pytest.mark.parametrize(("height", "width"), [(33, 47), (10, 14), (27, 60)])  # small videos are scaled up
def test_extremes_stay_in_range(value: int, height: int, width: int) -> None:
    video = torch.full((2, 1, 3, height, width), value, dtype=torch.uint8)
    out = multi_scale_crop(video, 28, each(2, 0, "crop"))
    assert out.shape == (2, 1, 3, 28, 28) and (out == value).all()


@pytest.mark.parametrize(("height", "width"), [(40, 52), (52, 40), (28, 28), (28, 41), (20, 30)])
def test_center_crop(height: int, width: int) -> None:
    video = noise_video(2, 2, height, width)
    side = min(height, width)
    box = ((width - side) // 2, (height - side) // 2, side, side)
    out = center_crop(video, 28)
    assert out.shape == (2, 2, 3, 28, 28) and differ(out, naive(video, box, 28)) < 0.02


def test_video_must_be_bytes() -> None:
    with pytest.raises(StellaError, match="uint8"):
        multi_scale_crop(torch.zeros(1, 1, 3, 8, 8), 4, each(1, 0))


def test_time_shift_rolls_each_clip_by_its_own_amount() -> None:
    spec = torch.randn(300, 50, 4, generator=generator(0, "spec"))
    out = time_shift(spec, each(300, 0, "shift"), most=10)
    shifts = []
    for before, after in zip(spec, out, strict=True):
        found = [s for s in range(-10, 11) if torch.equal(after, before.roll(s, 0))]
        assert len(found) == 1
        shifts += found
    assert set(shifts) == set(range(-10, 11))
    assert torch.equal(time_shift(spec, each(300, 0, "shift"), most=0), spec)


def test_noise_is_uniform_with_a_level_of_its_own_for_each_clip() -> None:
    spec = torch.randn(400, 64, 16, generator=generator(0, "spec"))
    noise = add_noise(spec, each(400, 0, "noise")) - spec
    assert noise.min() > -1e-5 and noise.max() < 0.1 + 1e-5
    level = noise.amax((1, 2))  # of a clip: uniform in [0, 0.1)
    assert level.mean().item() == pytest.approx(0.05, abs=0.006)
    assert level.std().item() == pytest.approx(0.0289, abs=0.004)
    torch.testing.assert_close(noise.mean((1, 2)), level / 2, atol=4e-3, rtol=0)


def test_same_seed_same_result_and_inputs_untouched() -> None:
    video, spec = noise_video(4), torch.randn(4, 30, 8, generator=generator(0, "spec"))
    copies = video.clone(), spec.clone()
    for function, data in ((lambda v, g: multi_scale_crop(v, 28, g), video), (time_shift, spec), (add_noise, spec)):
        one, two = (function(data, each(4, 7)) for _ in range(2))
        assert torch.equal(one, two) and not torch.equal(one, function(data, each(4, 8)))
    assert torch.equal(video, copies[0]) and torch.equal(spec, copies[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_crops_on_a_gpu_are_those_on_the_cpu() -> None:
    video = noise_video(3, 2, 40, 52)
    assert differ(center_crop(video.cuda(), 28).cpu(), center_crop(video, 28)) < 0.02
    crops = [multi_scale_crop(given, 28, each(3, "crop")).cpu() for given in (video.cuda(), video)]
    assert differ(*crops) < 0.02


def test_a_clip_is_augmented_alike_in_any_company() -> None:
    """So a process draws for its own clips alone, and a skipped clip changes no other."""
    video, spec = noise_video(6), torch.randn(6, 30, 8, generator=generator(0, "spec"))
    some = [4, 1]

    def augmented(clips: list[int]) -> list[Tensor]:
        gens = [generator("clip", clip) for clip in clips]
        return [multi_scale_crop(video[clips], 28, gens), add_noise(time_shift(spec[clips], gens), gens)]

    for whole, part in zip(augmented(list(range(6))), augmented(some), strict=True):
        assert torch.equal(whole[some], part)

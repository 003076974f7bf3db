"""Scenes: every clip a pure function of its name, the ground truth true, and the benchmark's promises kept."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stella.clip import SAMPLE_RATE, BatchSource, Clip
from stella.data.scenes import SIZES, TASKS, Scenes, classes
from stella.data.scenes.audit import _mean_recall, audit
from stella.data.scenes.classes import ACTIONS, AUDIBLE, MOVED_BY, SHAPES, TEXTURES, TIMBRES, VISIBLE
from stella.data.scenes.draw import EASY, HARD, PATTERNS, SLOTS, draw
from stella.data.scenes.export import FPS, export, is_scene
from stella.data.scenes.picture import pictures
from stella.data.scenes.sound import waveforms
from stella.errors import ConfigError
from stella.media.decode import Plan, decode
from stella.media.fbank import fbank

CPU = torch.device("cpu")


def test_the_class_of_a_clip_is_that_of_its_labels() -> None:
    scenes = Scenes("task2", "eval", 9)
    assert [scenes.class_of(i) for i in range(9)] == [scenes[i].labels.name for i in range(9)]


def test_the_table_of_classes_is_whole() -> None:
    assert len(classes("base")) >= 12
    assert [len(classes(task)) for task in TASKS] == [4] * 6
    for kind in itertools.chain(classes("base"), *map(classes, TASKS)):
        assert kind.shape in SHAPES and kind.texture in TEXTURES and kind.action in ACTIONS
        assert kind.timbre in TIMBRES and kind.visible in VISIBLE and kind.audible in AUDIBLE
        assert MOVED_BY.get(kind.action) != kind.visible, f"{kind.name}: its own action hides what the link reads"


def test_later_tasks_overwrite_earlier_ones() -> None:
    """Every look returns, always with another action, another timbre and another link."""
    by_look: dict[str, list[tuple[str, str, tuple[str, str]]]] = {}
    for task in TASKS:
        for kind in classes(task):
            by_look.setdefault(kind.look, []).append((kind.action, kind.timbre, (kind.visible, kind.audible)))
    assert all(len(kinds) >= 2 for kinds in by_look.values())
    for kinds in by_look.values():
        for column in zip(*kinds, strict=True):
            assert len(set(column)) == len(column)
    for task in TASKS:  # within a task a look, a timbre and a link each name the class
        kinds = classes(task)
        for attribute in ("look", "timbre"):
            assert len({getattr(kind, attribute) for kind in kinds}) == len(kinds)
        assert len({(kind.visible, kind.audible) for kind in kinds}) == len(kinds)
    for attribute in ("look", "timbre"):  # base classes give nothing of the tasks away
        names = [{getattr(kind, attribute) for kind in classes(task)} for task in ("base", *TASKS)]
        assert names[0].isdisjoint(set().union(*names[1:]))


def test_a_clip_is_a_function_of_its_name_alone() -> None:
    long, short = Scenes("task2", "train", 500, seed=3), Scenes("task2", "train", 12, seed=3)
    video, audio = long.tensors([11, 4, 7])
    for row, index in enumerate([11, 4, 7]):
        clip = short[index]
        assert torch.equal(clip.video, video[row])
        torch.testing.assert_close(clip.audio, audio[row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("other", [{"task": "task3"}, {"split": "eval"}, {"seed": 1}])
def test_another_name_is_another_clip(other: dict[str, object]) -> None:
    name: dict[str, object] = {"task": "task2", "split": "train", "seed": 0}
    one, two = (Scenes(n["task"], n["split"], 8, seed=n["seed"]) for n in (name, name | other))  # type: ignore[arg-type]
    assert not torch.equal(one[5].video, two[5].video)
    assert not np.array_equal(one.draw([5]).objects.visible, two.draw([5]).objects.visible)


def test_draws_are_uniform_and_independent() -> None:
    d = draw(0, "base", "train", range(12000), EASY)
    assert len(np.unique(d.key)) == len(np.unique(d.objects.visible[:, 0].round(6), axis=0)) == 12000  # none alike
    u = d.objects.visible.reshape(12000, -1)
    assert np.abs(u.mean(0) - 0.5).max() < 0.02
    assert np.abs(u.var(0) - 1 / 12).max() < 0.004
    correlation = np.corrcoef(u.T) - np.eye(u.shape[1])
    assert np.abs(correlation).max() < 0.05
    assert np.abs(np.bincount(d.pattern, minlength=len(PATTERNS)) / 12000 - 1 / len(PATTERNS)).max() < 0.015


def test_scenes_are_a_batch_source_of_the_stated_shapes() -> None:
    scenes = Scenes("task1", "train", 6)
    assert isinstance(scenes, BatchSource) and len(scenes) == 6
    clip = scenes[0]
    assert clip.video.shape == (4, 3, 96, 96) and clip.video.dtype == torch.uint8
    assert clip.audio.shape == (round(2.56 * SAMPLE_RATE),) and clip.audio.dtype == torch.float32
    assert clip.audio.abs().max() <= 1
    assert clip.labels.mask is not None and clip.labels.mask.shape == (4, 96, 96)
    assert SIZES["scenes"].spec_frames == 256  # 128 audio patches
    full = Scenes("task1", "train", 1, size="scenes-full")[0]
    assert full.video.shape == (4, 3, 224, 224) and len(full.audio) == round(10.24 * SAMPLE_RATE)
    assert SIZES["scenes-full"].spec_frames == 1024


@pytest.mark.parametrize("size", ["scenes", "scenes-hard"])
def test_labels_without_the_clip_are_the_clip_s(size: str) -> None:
    scenes = Scenes("task3", "eval", 6, size=size)
    for i in range(6):
        alone, whole = scenes.labels(i), scenes[i].labels
        assert (alone.name, alone.task) == (whole.name, whole.task)
        assert torch.equal(alone.mask, whole.mask) and torch.equal(alone.events, whole.events)


@pytest.mark.parametrize(
    ("task", "size", "length"), [("task7", "scenes", 1), ("task1", "huge", 1), ("task1", "scenes", 0)]
)
def test_what_does_not_exist_is_refused(task: str, size: str, length: int) -> None:
    with pytest.raises(ConfigError):
        Scenes(task, "train", length, size=size)
    with pytest.raises(IndexError):
        Scenes("task1", "train", 3)[3]


def test_events_tell_where_the_object_sounds() -> None:
    scenes = Scenes("task1", "eval", 60)
    agree = []
    for index in range(60):
        if scenes.draw([index]).offscreen[0, 0] > 0:
            continue  # something else sounds too
        clip = scenes[index]
        assert clip.labels.events is not None
        level = clip.audio.unflatten(0, (10, -1)).square().mean(1)  # of each tenth
        louder = level[clip.labels.events][:, None] > level[~clip.labels.events]  # every event against every pause
        agree.append(louder.float().mean().item())
    assert len(agree) > 30 and np.mean(agree) > 0.98


def test_the_object_acts_in_the_sampled_frames_of_its_bursts_and_only_then() -> None:
    """Each action changes the picture in exactly the frames whose slot sounds."""
    for task in TASKS:
        scenes = Scenes(task, "eval", 8)
        d = scenes.draw(range(8))
        still = pictures(d, torch.full((1,), 1.0), 96, CPU)  # after every burst
        moving = pictures(d, scenes.size.frame_times, 96, CPU)
        for row in range(8):
            covered = moving.mask[row].any(0) | still.mask[row].any(0)
            around = F.max_pool2d(covered[None].float(), 13, 1, 6)[0] > 0  # marks lie around the object too
            frames = moving.frames[row].float()
            change = (frames - still.frames[row].float()).abs().mean(1)[:, around].mean(1)  # [T]; background drifts
            acting = torch.zeros(SLOTS, dtype=torch.bool)
            acting[torch.from_numpy(PATTERNS[d.pattern[row]])] = True
            assert change[acting].min() > max(8, 2 * change[~acting].max()), f"{task} {row}: {change}"


def test_the_mask_is_the_sounding_object() -> None:
    """Painting it in another hue changes pixels inside the mask and none far outside."""
    scenes = Scenes("task3", "eval", 8)
    d = scenes.draw(range(8))
    before = pictures(d, torch.tensor([1.0]), 96, CPU)
    d.objects.visible[:, 0, VISIBLE.index("hue")] = (d.objects.visible[:, 0, VISIBLE.index("hue")] + 0.4) % 1
    after = pictures(d, torch.tensor([1.0]), 96, CPU)
    changed = (before.frames != after.frames).any(2)  # [B, T, N, N]
    assert torch.equal(before.mask, after.mask)
    assert (changed & before.mask).sum() > 0.9 * before.mask.sum()
    assert (changed & ~before.mask).sum() < 0.1 * before.mask.sum()  # the antialiased rim
    share = before.mask.float().mean((1, 2, 3))
    assert share.min() > 0.02 and share.max() < 0.35


def test_there_are_one_to_three_silent_objects() -> None:
    present = draw(0, "task1", "train", range(2000), EASY).objects.present.sum(1) - 1
    assert set(present.tolist()) == {1, 2, 3}
    assert set((draw(0, "task1", "train", range(2000), HARD).objects.present.sum(1) - 1).tolist()) == {4, 5, 6}


@pytest.mark.parametrize("audible", AUDIBLE)
def test_the_link_is_audible(audible: str) -> None:
    """Turning the linked quantity up moves the spectrogram, the more the further."""
    task, label = next((task, i) for task in TASKS for i, kind in enumerate(classes(task)) if kind.audible == audible)
    d = Scenes(task, "eval", 40).draw([label + 4 * i for i in range(3)])
    specs = []
    for value in (0.1, 0.5, 0.9):
        d.audible[:, AUDIBLE.index(audible)] = value
        specs.append(fbank(waveforms(d, 2.56, SAMPLE_RATE, CPU), frames=256))
    near, far = (specs[0] - specs[1]).abs().mean(), (specs[0] - specs[2]).abs().mean()
    assert far > near > 0.02


def test_the_audible_quantity_follows_its_visible_cause() -> None:
    d = draw(0, "task4", "train", range(4000), EASY)
    rows = np.arange(4000)
    cause = d.objects.visible[rows, 0, d.linked_visible]
    effect = d.audible[rows, d.linked_audible]
    assert np.corrcoef(cause, effect)[0, 1] > 0.99
    for quantity in range(len(VISIBLE)):  # no other visible quantity says anything
        free = d.linked_visible != quantity
        assert abs(np.corrcoef(d.objects.visible[free, 0, quantity], effect[free])[0, 1]) < 0.05


def test_the_audit_of_ties_and_order() -> None:
    equal = np.zeros((8, 8))
    assert _mean_recall(equal) == pytest.approx(100 * np.mean([1 / 8, 5 / 8, 1]))
    assert _mean_recall(np.eye(20)) == pytest.approx(100)
    assert _mean_recall(-np.eye(20)) == pytest.approx(0)


def test_shared_cues_are_weak_and_class_is_not_enough() -> None:
    for size in SIZES:
        rows = audit({task: Scenes(task, "eval", 240, size=size) for task in TASKS})
        for gallery, a in rows.items():
            assert a["timing"] < a["everything"] / 3, gallery
            assert a["class"] < a["everything"] / 2, gallery
            assert a["everything"] > 85, gallery
            assert a["chance"] < a["timing"] and a["link"] > 8 * a["chance"]


def test_a_clip_survives_h264_and_aac(tmp_path: Path) -> None:
    scenes = Scenes("task1", "eval", 4)
    for index, path in enumerate(export(scenes, tmp_path)):
        clip: Clip = scenes[index]
        read = decode(path, Plan(duration=2.56, frames=4, size=96, span=None))
        about = json.loads(path.with_suffix(".json").read_text())
        assert about["class"] == clip.labels.name and len(about["mask"]) == 4
        for runs, mask in zip(about["mask"], clip.labels.mask, strict=True):
            inside = torch.repeat_interleave(torch.arange(len(runs)) % 2 == 1, torch.tensor(runs))
            assert torch.equal(inside.view(96, 96), mask)
        assert read.video.shape == clip.video.shape
        error = ((read.video.float() - clip.video.float()) / 255).square().mean((1, 2, 3))
        assert (-10 * error.log10() > 27).all()  # dB, each frame
        one, two = (fbank(x[None, : len(clip.audio)], frames=256)[0, :250] for x in (clip.audio, read.audio))
        heard = one > one.mean()  # AAC does not keep the noise floor
        assert np.corrcoef(one[heard], two[heard])[0, 1] > 0.9
    path.write_bytes(b"mine")
    assert list(export(scenes, tmp_path))[-1] == path and path.read_bytes() == b"mine"  # existing files are kept


def test_the_files_of_scenes_are_known_by_their_names(tmp_path: Path) -> None:
    made = [
        Scenes("task1", "train", 1),
        Scenes("wide-36", "eval", 1, size="scenes-hard"),
        Scenes("novel", "validation", 1),
    ]
    names = [next(export(scenes, tmp_path)) for scenes in made]
    assert all(map(is_scene, names)) and is_scene(names[0].with_suffix("").name + "@2.500")
    assert not any(map(is_scene, ("scenes.mp4", "scenes-0-task1-eval.mp4", "scenes-0-task1-eval-000000/dog.mp4")))


def test_sampled_frames_fall_on_whole_frames_of_the_film() -> None:
    for size in SIZES.values():
        at = size.frame_times * size.duration * FPS
        torch.testing.assert_close(at, at.round(), rtol=0, atol=1e-4)
    scenes = Scenes("task5", "eval", 2)
    film = scenes.film(1, FPS)
    at = (scenes.size.frame_times * scenes.size.duration * FPS).round().long()
    assert torch.equal(film[at], scenes[1].video)


def test_wide_bases_are_drawn_from_the_tasks_space_without_their_looks() -> None:
    some, many = classes("wide-100"), classes("wide-720")
    assert len(some) == 100 and len(many) == 720 and many[:100] == some
    looks = {kind.look for task in TASKS for kind in classes(task)}
    assert not looks & {kind.look for kind in many} and len({kind.look for kind in many}) == 72
    assert all(kind.visible != MOVED_BY.get(kind.action) for kind in many)
    for block in (many[:360], many[360:]):
        assert len({(kind.look, kind.action) for kind in block}) == 360
        assert {sum(kind.timbre == timbre for kind in block) for timbre in TIMBRES} == {20}
    clip = Scenes("wide-100", "train", 130)[101]
    assert clip.labels.name == some[1].name
    for wrong in ("wide-0", "wide-", "wide-1e3", "task7"):
        with pytest.raises(ConfigError, match="choose base, novel, wide-N or one of"):
            Scenes(wrong, "train", 1)

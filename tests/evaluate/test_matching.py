"""Where the sounding object is in patches, the importance ratio, accuracy on pairs, and the record after a task."""

import json
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from stella.clip import BatchSource, Clip, Labels, Source
from stella.data.scenes import Scenes
from stella.data.stream import StreamConfig, evaluation_batches
from stella.errors import ClipError, StellaError
from stella.evaluate import after_task
from stella.evaluate.after_task import evaluate_tasks
from stella.evaluate.matching import evaluate_matching, importance_ratio, regions, some_of
from stella.model.avm import AVM, score
from stella.model.cav import CAV, CAVConfig
from stella.rng import generator

CONFIG = CAVConfig(
    image_size=32, spec_frames=32, mel_bins=128, frames=2, dim=16, depth=2, fusion_from=1, heads=2, dec_dim=8,
    dec_depth=1, dec_heads=2,
)  # fmt: skip
NOTHING = Labels()
STREAM = StreamConfig(batch_size=4, size=32, spec_frames=32)


@dataclass(frozen=True)
class Clips:
    length: int
    about: Labels = NOTHING

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Clip:
        gen = torch.Generator().manual_seed(index)
        video = torch.randint(0, 256, (2, 3, 32, 32), generator=gen, dtype=torch.uint8)
        return Clip(str(index), video, 0.1 * torch.randn(6000, generator=gen), self.about)


def small() -> tuple[CAV, AVM]:
    torch.manual_seed(0)
    return CAV(CONFIG), AVM(CONFIG.dim, CONFIG.heads)


def mask_of(*boxes: tuple[int, int, int, int, int]) -> Tensor:
    mask = torch.zeros(2, 32, 32, dtype=torch.bool)
    for frame, top, bottom, left, right in boxes:
        mask[frame, top:bottom, left:right] = True
    return mask


def test_a_patch_is_inside_from_half_its_area_on() -> None:
    # Frame 0: patch 0 whole, patch 1 one column short of half; frame 1: patch 3 exactly half.
    mask = mask_of((0, 0, 16, 0, 23), (1, 16, 32, 16, 24))
    inside, outside = regions(Labels(mask=mask), CONFIG)
    assert inside.tolist() == [True, False, False, False, False, False, False, True]
    assert outside.tolist() == [not x for x in inside.tolist()]


def test_only_frames_that_hold_an_event_count() -> None:
    mask = mask_of((0, 0, 16, 0, 16), (1, 0, 16, 0, 16))
    events = torch.zeros(10, dtype=torch.bool)
    events[7] = True  # the second of two frames is the middle of the second half: 0.75 of the clip
    inside, outside = regions(Labels(mask=mask, events=events), CONFIG)
    assert inside.tolist() == [False] * 4 + [True, False, False, False]
    assert outside.tolist() == [False] * 4 + [False, True, True, True]


def test_masks_are_cropped_as_the_clips_are() -> None:
    wide = torch.zeros(2, 32, 64, dtype=torch.bool)
    wide[:, :16, 16:32] = True  # the middle square begins at column 16
    assert regions(Labels(mask=wide), CONFIG)[0].tolist() == [True, False, False, False] * 2
    large = torch.zeros(2, 64, 64, dtype=torch.bool)
    large[:, :32, :32] = True
    assert regions(Labels(mask=large), CONFIG)[0].tolist() == [True, False, False, False] * 2


def test_events_of_scenes_fall_on_the_frames_in_which_the_object_acts() -> None:
    """Two of the four slots of a scene sound, and each slot has its frame."""
    config = CAVConfig(image_size=96, spec_frames=256)
    for index in range(8):
        inside, outside = regions(Scenes("task2", "eval", 8)[index].labels, config)
        per_frame = (inside | outside).view(4, -1)
        assert per_frame.all(1).sum() == 2 and per_frame.any(1).sum() == 2


def test_the_ratio_is_of_medians() -> None:
    importance = torch.tensor([[8.0, 2.0, 4.0, 1.0, 100.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    inside = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    outside = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    ratio = importance_ratio(importance, inside, outside)
    assert ratio[0] == 5 / 4  # (2 + 8) / 2 over the middle of 1, 4, 100
    assert ratio[1].isnan()


def test_importance_that_vanishes_outside_gives_a_large_number_not_infinity() -> None:
    inside = torch.tensor([[True, False]])
    ratio = importance_ratio(torch.tensor([[1.0, 0.0]]), inside, ~inside)
    assert math.isfinite(ratio.item()) and ratio.item() > 1e30


class Knowing(AVM):
    """Tells matched from mismatched perfectly (or never), since the first feature of both names the clip."""

    sign = 1.0

    def forward(self, o_a: Tensor, o_v: Tensor) -> Tensor:
        return self.sign * (0.5 - (o_a[:, 0, 0] != o_v[:, 0, 0]).float())


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 1.0), (-1.0, 0.0)])
def test_each_clip_is_judged_with_its_own_video_and_with_anothers(
    sign: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = small()
    avm = Knowing(CONFIG.dim, CONFIG.heads)
    avm.sign = sign

    def name(values: Tensor) -> Tensor:
        names = torch.arange(len(values), dtype=torch.float32)[:, None, None]
        return names.expand(-1, values.shape[1], CONFIG.dim)

    monkeypatch.setattr(model, "encode_a", lambda patches: name(patches.values))
    monkeypatch.setattr(model, "encode_v", lambda patches: name(patches.values))
    monkeypatch.setattr(model, "fuse_joint", lambda x_a, x_v, *positions: (x_a, x_v))
    found = evaluate_matching(model, avm, Clips(9), STREAM, generator(0))
    assert len(found.correct) == 2 * 4 + 2 * 4 + 1  # the clip left alone in the last batch has no other to meet
    assert found.correct.float().mean() == expected


def test_the_ratio_reads_the_models_importance_where_the_mask_is() -> None:
    model, avm = small()
    events = torch.ones(10, dtype=torch.bool)
    source = Clips(5, Labels(mask=mask_of((0, 0, 16, 0, 16), (1, 16, 32, 16, 32)), events=events))
    avm.beta = 0.1
    found = evaluate_matching(model, avm, source, STREAM, generator(0))
    scores = []
    for batch in evaluation_batches(source, STREAM):
        qk = score(model, avm, model.patches_a(batch.audio), model.patches_v(batch.video)).qk
        logits = torch.einsum("bhqd,bhkd->bhqk", qk.q_a, qk.k_v) / (8**0.5 * 0.1)
        scores.append(logits.softmax(-1).mean((1, 2)))
    for row, ratio in zip(torch.cat(scores), found.ratio, strict=True):
        values = row.tolist()
        inside = sorted([values[0], values[7]])
        outside = sorted(values[1:7])
        expected = (inside[0] + inside[1]) / (outside[2] + outside[3])
        assert ratio.item() == pytest.approx(expected, rel=1e-5)


def test_some_clips_are_drawn_once_and_keep_the_fast_way() -> None:
    scenes = Scenes("task1", "eval", 40)
    some = some_of(scenes, torch.arange(40), 12, generator(0))
    assert isinstance(some, BatchSource) and len(some) == 12
    video, _ = some.tensors([3])
    assert torch.equal(video[0], some[3].video)
    other = some_of(Clips(40), torch.arange(40), 12, generator(0))
    assert not isinstance(other, BatchSource)
    chosen = [int(other[i].id) for i in range(12)]
    assert chosen == sorted(set(chosen)) and chosen == [int(some[i].id[-6:]) for i in range(12)]
    assert some_of(scenes, torch.arange(40), 40, generator(0)) is scenes


class Faulty(Clips):
    """Every sixth of its clips cannot be used."""

    def __getitem__(self, index: int) -> Clip:
        if index % 6 == 0:
            raise ClipError(f"clip {index}", "no audio track", "leave it out")
        return super().__getitem__(index)


@pytest.mark.parametrize("clips", [80, 8])
def test_clips_that_cannot_be_used_are_not_matched(clips: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample may have more of them than is allowed, where the whole source has not."""
    monkeypatch.setattr(after_task, "MATCHING_CLIPS", clips)
    matched: list[Source] = []
    plain = after_task.evaluate_matching
    monkeypatch.setattr(after_task, "evaluate_matching", lambda *given: (matched.append(given[2]), plain(*given))[1])
    model, avm = small()
    assert evaluate_tasks(model, avm, [("one", Faulty(80))], STREAM)["clips"] == [66]
    found = [int(matched[0][index].id) for index in range(len(matched[0]))]
    assert len(found) == min(clips, 66) and found == sorted(set(found)) and all(index % 6 for index in found)


def test_the_record_after_a_task_is_plain_json_and_repeats_itself() -> None:
    model, avm = small()
    mask = Labels(mask=mask_of((0, 0, 16, 0, 16)))
    tasks = [("one", Clips(6, mask)), ("two", Clips(5))]
    record = evaluate_tasks(model, avm, tasks, STREAM, "cpu", 3)
    assert (
        json.loads(json.dumps(record, allow_nan=False)) == record == evaluate_tasks(model, avm, tasks, STREAM, seed=3)
    )
    assert record["clips"] == [6, 5]
    assert set(record["recall"]) == {"a2v", "v2a"} and set(record["recall"]["a2v"]) == {"1", "5", "10"}
    assert len(record["recall"]["v2a"]["5"]) == len(record["modality_gap"]) == 2
    assert 0 <= record["avm_accuracy"] <= 100
    assert record["importance_ratio"][0] > 0 and record["importance_ratio"][1] is None  # no masks there


def test_without_a_matching_module_only_retrieval_is_measured() -> None:
    model, avm = small()
    tasks = [("one", Clips(3))]
    record = evaluate_tasks(model, None, tasks, STREAM)
    assert record["avm_accuracy"] is None and record["importance_ratio"] is None
    assert record["recall"] == evaluate_tasks(model, avm, tasks, STREAM)["recall"]


def test_no_task_is_refused() -> None:
    with pytest.raises(StellaError, match="at least one"):
        evaluate_tasks(small()[0], None, [], STREAM)

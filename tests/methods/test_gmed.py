"""GMED against plain versions: a copy that really steps, finite differences."""

import copy

import pytest
import torch
from helpers.method_toys import TOY, batch, batches, method, next_draw, spy, step, train, trainer
from helpers.virtual import losses_of, stepped, virtual_noise

from stella.clip import Batch
from stella.memory import MemoryBatch
from stella.methods import MemoryConfig, Method, ObjectiveConfig, build
from stella.model.cav import CAV


def edited_next(gmed: Method, b: Batch) -> MemoryBatch:
    """What the loss of this batch will edit, and how."""
    virtual, memory = gmed.generators["virtual"].get_state(), gmed.memory.generator.get_state()
    edited = gmed.edit(b, gmed.draw(b))
    gmed.generators["virtual"].set_state(virtual)
    gmed.memory.generator.set_state(memory)
    return edited


def remembered(gmed: Method, ages: list[int]) -> None:
    """Give the memory's first clips edits and ages, as if they had been drawn before."""
    g, n = torch.Generator().manual_seed(5), len(ages)
    edits = {
        f"edit_{name}": torch.randn(n, *gmed.memory.columns[name].shape, generator=g) for name in ("audio", "video")
    }
    gmed.memory.update(torch.arange(n), age=torch.tensor(ages), **edits)


@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 1.0), (0.3, 0.5)])
def test_gmed_edits_by_the_gradients_before_and_after_the_step(beta: float, gamma: float) -> None:
    alpha, ages = 2.0, [0, 1, 3]
    one = method("gmed", clips=3, dtype=torch.float64, alpha=alpha, beta=beta, gamma=gamma)
    train(one, [3])
    remembered(one, ages)
    b = batch(4, 3)
    noise, noise_past = virtual_noise(one, 4, 3)
    drawn = one.draw(b)
    clip = {
        "audio": drawn["audio"].double() + drawn["edit_audio"].double(),
        "video": one.model.normalise(drawn["video"]) + drawn["edit_video"].double(),
    }
    models = [one.model, stepped(one, b, noise)]
    edited = one.edit(b, drawn)
    assert torch.equal(edited["age"], drawn["age"] + 1)
    assert torch.equal(edited.slots, drawn.slots)

    @torch.no_grad()
    def slope(model: CAV, name: str, where: tuple[int, ...], by: float = 1e-5) -> float:
        sums = []
        for sign in (1, -1):
            moved = {key: value.clone() for key, value in clip.items()}
            moved[name][where] += sign * by
            sums.append(losses_of(model, moved["audio"], moved["video"], noise_past).mean())
        return ((sums[0] - sums[1]) / (2 * by)).item()

    g = torch.Generator().manual_seed(1)
    for name, x in clip.items():
        for i in (0, 1, 2, 0, 1, 2):
            where = (i, *(int(torch.randint(n, (), generator=g)) for n in x.shape[1:]))
            g1, g2 = (slope(model, name, where) for model in models)
            expected = alpha * gamma ** drawn["age"][i].item() * ((g2 - g1) + beta * g1)
            found = edited[f"edit_{name}"][where].item() - drawn[f"edit_{name}"][where].double().item()
            assert abs(found - expected) <= 1e-4 * abs(expected) + 1e-9, (name, where)
            assert abs(g2 - g1) > 1e-8


def test_a_gmed_edit_is_a_share_of_the_mean_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without negatives a clip's edit depends on how many were drawn through the mean alone."""
    torch.manual_seed(0)
    no_negatives = ObjectiveConfig(contrast_weight=0.0)
    one = build("gmed", CAV(TOY).double(), {"alpha": 1.0}, no_negatives, MemoryConfig(clips=4), 0)
    train(one, [4])
    b = batch(2, 4)
    four = one.memory.draw(4)
    now, past = one.virtual_splits(b.audio, b.video), one.virtual_splits(four["audio"], four["video"])
    first = type(four)(four.slots[:1], {name: rows[:1] for name, rows in four.columns.items()})
    edits = []
    for drawn in (four, first):
        splits = iter([now, tuple(split[: len(drawn)] for split in past)])
        monkeypatch.setattr(one, "virtual_splits", lambda *_, splits=splits: next(splits))
        edits.append(one.edit(b, drawn))
    for name in ("edit_audio", "edit_video"):
        assert edits[1][name].any()
        torch.testing.assert_close(4 * edits[0][name][:1], edits[1][name], rtol=1e-6, atol=1e-15)


def test_gmed_trains_on_the_edited_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    one, b = method("gmed", clips=4, alpha=100.0), batch(3, 4)
    train(one, [4])
    remembered(one, [0] * 4)
    edited = edited_next(one, b)
    seen = spy(monkeypatch, one)
    losses = one.loss(b)
    audio = torch.cat([b.audio, edited["audio"].float() + edited["edit_audio"]])
    video = torch.cat([one.model.normalise(b.video), one.model.normalise(edited["video"]) + edited["edit_video"]])
    assert torch.equal(seen[0][0].values, one.model.patches_a(audio).values)
    assert torch.equal(seen[0][1].values, one.model.patches_v(video).values)
    assert not any(patches.values.requires_grad for patches in seen[0][:2])
    assert not any(rows.requires_grad for rows in losses.rows.values())


def test_gmed_writes_edits_back_and_then_adds() -> None:
    one, b = method("gmed", clips=6, alpha=100.0), batch(4, 6)
    train(one, [6])
    remembered(one, [0, 1, 2, 3, 4, 5])
    before = copy.deepcopy(one.memory.state_dict()["rows"])
    edited = edited_next(one, b)
    one.after_batch(b, one.loss(b))
    after = one.memory.state_dict()["rows"]
    drawn = edited.slots.tolist()
    kinds = set()
    for slot in range(6):
        new = after["id"][slot] >= 6
        kinds.add((bool(new), slot in drawn))
        if new:  # whether drawn or not: nothing of the clip that was here is left
            row = after["id"][slot] - 6
            expected = {"video": b.video[row], "audio": b.audio[row].half(), "age": 0, "edit_audio": 0, "edit_video": 0}
        elif slot in drawn:
            row = drawn.index(slot)
            expected = {name: before[name][slot] for name in ("id", "video", "audio")}
            expected |= {name: edited[name][row].bfloat16() for name in ("edit_audio", "edit_video")}
            expected["age"] = before["age"][slot] + 1
            assert (expected["edit_audio"] != before["edit_audio"][slot]).any()
            assert (expected["edit_video"] != before["edit_video"][slot]).any()
        else:
            expected = {name: rows[slot] for name, rows in before.items()}
        for name, value in expected.items():
            assert (after[name][slot] == value).all(), (slot, name)
    assert {(True, True), (False, True), (False, False)} <= kinds


def test_gmed_ages_count_the_edits_of_each_clip() -> None:
    one = method("gmed", clips=5)
    loop = trainer(one)
    ages: dict[int, int] = {}
    for b in batches([3, 4, 2, 3, 6, 2]):
        ids = one.memory.ids.clone()
        if len(ids):
            for slot in next_draw(one, len(b)).tolist():
                ages[ids[slot].item()] += 1
        step(loop, b)
        ages |= dict.fromkeys(b.ids.tolist(), 0)
        rows = one.memory.state_dict()["rows"]
        assert rows["age"].tolist() == [ages[i] for i in rows["id"].tolist()]
    assert max(rows["age"]) > 1


def test_gmed_never_mixes_clips_where_a_step_has_several_batches() -> None:
    """The second batch has drawn what the first then replaces."""
    one, first, *several = method("gmed", clips=4, alpha=100.0), *batches([4, 6, 6, 6])
    one.after_batch(first, one.loss(first))
    all_clips = Batch.cat([first, *several])
    for b, losses in [(b, one.loss(b)) for b in several]:
        one.after_batch(b, losses)
        rows = one.memory.state_dict()["rows"]
        assert torch.equal(rows["video"], all_clips.video[rows["id"]])
        assert torch.equal(rows["audio"], all_clips.audio[rows["id"]].half())
        new = rows["id"] >= 4  # these have not been drawn yet
        assert not any(rows[name][new].any() for name in ("age", "edit_audio", "edit_video"))


def test_gmed_keeps_small_edits() -> None:
    """At the paper's length most are below what half precision would tell apart beside the clip."""
    one, b = method("gmed", clips=4, dtype=torch.float64), batch(4, 4)
    train(one, [4])
    edited = one.edit(b, one.draw(b))
    one.memory.update(edited.slots, **edited.columns)
    stored = one.memory.state_dict()["rows"]
    for name in ("edit_audio", "edit_video"):
        assert 0 < edited[name].abs().median() < 1e-4
        torch.testing.assert_close(stored[name][edited.slots].double(), edited[name], rtol=1 / 128, atol=0)

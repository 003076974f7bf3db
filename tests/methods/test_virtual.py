"""MIR and GMED against plain versions: a copy that really steps, loops over clips, finite differences."""

import copy
from typing import Any

import pytest
import torch
from helpers.method_toys import TOY, batch, batches, method, next_draw, plain_losses, spy, step, train, trainer
from helpers.small import same
from torch import Tensor

from stella.clip import Batch
from stella.memory import MemoryBatch
from stella.methods import MemoryConfig, Method, ObjectiveConfig, build
from stella.methods.virtual import adam_step
from stella.model.cav import CAV, Split

LA, LV = TOY.patches_a, TOY.patches_v
SEEN = int(LA * 0.2), int(LV * 0.2)
both = pytest.mark.parametrize("name", ["mir", "gmed"])


def virtual_noise(one: Method, *clips: int) -> list[tuple[Tensor, Tensor]]:
    """What "virtual" will give next, for the current clips and then for memory's: audio, video."""
    g = one.generators["virtual"].clone_state()
    return [(torch.rand(n, LA, generator=g), torch.rand(n, LV, generator=g)) for n in clips]


def losses_of(model: CAV, audio: Tensor, video: Tensor, noise: tuple[Tensor, Tensor]) -> Tensor:
    """L of each clip, clip by clip, with these masks."""

    def split(noise: Tensor, seen: int) -> Split:
        order = noise.argsort()
        return Split(order[:, :seen], order[:, seen:])

    return plain_losses(model, model.patches_a(audio), model.patches_v(video), *map(split, noise, SEEN))


def stepped(one: Method, b: Batch, noise: tuple[Tensor, Tensor]) -> CAV:
    """A copy of the model that has taken the step, with a copy of the run's optimiser."""
    model = copy.deepcopy(one.model)
    adam = torch.optim.Adam(model.parameters())
    state = copy.deepcopy(one.optimizer.state_dict())
    if not state["state"]:
        state["state"] = adam.state_dict()["state"]
    adam.load_state_dict(state)
    losses_of(model, b.audio, b.video, noise).mean().backward()
    adam.step()
    return model


# ---- the virtual step


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_the_virtual_step_is_the_optimisers_own(steps: int) -> None:
    """Adam with weight decay and a learning rate in a tensor, from no moments, and from those of some steps."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((3, 4), (5,), ())]
    rate = torch.tensor(0.01, dtype=torch.float64)
    adam = torch.optim.Adam(weights, lr=rate, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    for _ in range(steps):
        for p in weights:
            p.grad = torch.randn_like(p)
        adam.step()
    rate.fill_(0.03)  # as a warm-up changes it
    gradients = tuple(torch.randn_like(p) for p in weights)
    before = copy.deepcopy((weights, adam.state_dict()["state"]))
    found = adam_step(adam, weights, gradients)
    assert all(torch.equal(p, q) for p, q in zip(weights, before[0], strict=True))
    for index, moments in before[1].items():
        assert all(torch.equal(value, adam.state_dict()["state"][index][key]) for key, value in moments.items())
    for p, g in zip(weights, gradients, strict=True):
        p.grad = g
    adam.step()
    for ours, p in zip(found, weights, strict=True):
        torch.testing.assert_close(ours, p.detach(), rtol=1e-9, atol=1e-12)
        assert not ours.requires_grad


@both
@pytest.mark.parametrize("sizes", [[], [4, 4]])
def test_virtual_weights_are_those_after_a_step_on_the_current_clips(name: str, sizes: list[int]) -> None:
    one, b = method(name, dtype=torch.float64), batch(3, 8)
    train(one, sizes)
    (noise,) = virtual_noise(one, 3)
    expected = dict(stepped(one, b, noise).named_parameters())
    found = one.virtual_weights(b)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key].detach(), rtol=1e-6, atol=1e-9)
        assert not value.requires_grad
    moved = torch.cat([(value - one.model.get_parameter(key)).flatten().abs() for key, value in found.items()])
    assert moved.median() > 1e-4  # about the learning rate, 1e-3


@both
def test_what_is_not_trained_does_not_move(name: str) -> None:
    torch.manual_seed(3)
    model = CAV(TOY)
    model.pos_embed_a.requires_grad_(False)
    one = build(name, model, {}, ObjectiveConfig(), MemoryConfig(clips=4), 0)
    trainer(one)
    assert "pos_embed_a" not in one.virtual_weights(batch(3))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_half_precision_ranks_candidates_as_float32_does() -> None:
    """A step of Adam is large enough for bfloat16 to see. (`benchmarks/virtual_step.py` has larger models.)"""
    one, b = method("mir", clips=40), batch(6, 48)
    train(one, [8] * 6)
    drawn, state = one.memory.draw(40), one.generators["virtual"].get_state()
    ranks = []
    for half in (False, True):
        one.generators["virtual"].set_state(state)
        flags = torch.backends.mkldnn.flags(enabled=False)  # oneDNN's half precision crashes some processors
        with flags, torch.autocast("cpu", torch.bfloat16, enabled=half):
            after = one.virtual_weights(b)
            with torch.no_grad():
                splits = one.virtual_splits(drawn["audio"], drawn["video"])
                clips = drawn["audio"], drawn["video"], splits
                increase = one.clip_losses(after, *clips) - one.clip_losses(one.weights(), *clips)
        ranks.append(increase.argsort().argsort().double())
    assert torch.corrcoef(torch.stack(ranks))[0, 1] > 0.95


@both
def test_looking_ahead_touches_neither_model_nor_optimiser_nor_memory_and_masks_as_er_does(name: str) -> None:
    """But for one draw from the memory, and masks from a generator of its own, for current and then for drawn clips."""
    one, b = method(name), batch(4, 12)
    loop = trainer(one)
    for earlier in batches([6, 6]):
        step(loop, earlier)
    n = 10 if name == "mir" else 4  # what is looked at: all of the memory, as many as the batch
    for p in one.parameters():
        p.grad = torch.full_like(p, 7.0)

    def state() -> dict[str, Any]:
        return {
            "method": one.state_dict(),
            "rows": one.memory.state_dict()["rows"],
            "adam": loop.optimizer.state_dict(),
        }

    before, mask, virtual = copy.deepcopy(state()), *(one.generators[g].clone_state() for g in ("mask", "virtual"))
    assert len(before["adam"]["state"]) == len(list(one.parameters()))
    memory = one.memory.generator.get_state()
    one.memory.draw(n)
    drawn = one.memory.generator.get_state()
    one.memory.generator.set_state(memory)
    one.loss(b)
    assert same(state(), before)
    assert all((p.grad == 7).all() and p.requires_grad for p in one.parameters())
    assert torch.equal(one.memory.generator.get_state(), drawn)
    for given, clips in ((virtual, (4, n)), (mask, (8,))):
        for number in clips:
            torch.rand(number, LA, generator=given)
            torch.rand(number, LV, generator=given)
    assert torch.equal(one.generators["virtual"].get_state(), virtual.get_state())
    assert torch.equal(one.generators["mask"].get_state(), mask.get_state())


# ---- MIR


@pytest.mark.parametrize("clips", [7, 30])  # fewer and more than are asked for
def test_mir_keeps_the_candidates_whose_loss_rises_most(clips: int) -> None:
    one = method("mir", clips=clips, dtype=torch.float64, candidates=3)
    train(one, [12, 12, 12])
    b = batch(4, 36)
    candidates = next_draw(one, 12)
    assert len(candidates) == min(clips, 12)
    rows = one.memory.state_dict()["rows"]
    audio, video = rows["audio"][candidates], rows["video"][candidates]
    noise, noise_past = virtual_noise(one, 4, len(candidates))
    after = stepped(one, b, noise)
    with torch.no_grad():
        rises = losses_of(after, audio, video, noise_past) - losses_of(one.model, audio, video, noise_past)
    ranked = sorted(range(len(candidates)), key=lambda i: -rises[i].item())
    chosen = one.draw(b)
    assert chosen.slots.tolist() == [candidates[i].item() for i in ranked[:4]]
    for name, column in rows.items():
        assert torch.equal(chosen[name], column[chosen.slots])


def test_mir_looks_at_candidates_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While memory fills there are more of them each step: the model sees shapes it knows, and takes no more memory."""
    one, sizes = method("mir", clips=30), []
    forward = one.model.forward
    monkeypatch.setattr(one.model, "forward", lambda a, *more: sizes.append(len(a.values)) or forward(a, *more))
    train(one, [4, 4, 4])  # 12 clips: 3 batches of candidates, before and after
    one.draw(batch(4, 12))
    assert sizes[-7:] == [4] + [4, 4, 4] * 2  # the virtual step's own, then candidates'
    train(one, [4, 3])  # 19
    one.draw(batch(4, 19))
    assert sizes[-11:] == [4] + [4, 4, 4, 4, 3] * 2


def test_mir_then_is_er_on_the_clips_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    mir, er, b = method("mir"), method("er"), batch(4, 12)
    train(mir, [6, 6])
    train(er, [6, 6])
    er.model.load_state_dict(mir.model.state_dict())
    states = {key: g.get_state() for key, g in mir.generators.items()}
    memory = mir.memory.generator.get_state()
    chosen = mir.draw(b)
    for key, state in states.items():
        mir.generators[key].set_state(state)
    mir.memory.generator.set_state(memory)
    monkeypatch.setattr(er, "draw", lambda _: chosen)
    ours, theirs = mir.loss(b), er.loss(b)
    assert ours.parts == theirs.parts
    assert ours.rows.keys() == theirs.rows.keys()


def test_mir_replays_as_many_different_clips_as_the_batch_has_or_all_there_are() -> None:
    one = method("mir", clips=6)
    loop = trainer(one)
    for b, replayed in zip(batches([2, 1, 2, 4, 7, 3]), [0, 1, 2, 4, 6, 3], strict=True):
        drawn = one.draw(b)
        assert (0 if drawn is None else len(set(drawn.slots.tolist()))) == replayed
        step(loop, b)


# ---- GMED


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


# ---- settings

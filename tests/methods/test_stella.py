"""STELLA's step against loops over clips, heads, patches and chunks; what its memories hold; its ablations."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.method_toys import TOY, batch, method, next_draw, spy, train
from torch import Tensor

from stella.clip import Batch
from stella.methods import Method
from stella.model.avm import draw_pairs
from stella.model.cav import Pretrained, Split

LA, LV, FREQ = TOY.patches_a, TOY.patches_v, TOY.grid_a[1]
KA, KV = LA // 2, LV // 2
SEEN_A, SEEN_V = int(LA * (1 - 0.8)), int(LV * (1 - 0.8))


# ---- one step, naively


def exponential(noise: float) -> float:
    return -math.log1p(-noise)


def attention_importance(q: Tensor, k: Tensor, beta: float) -> list[float]:
    """q, k [H, L, d] of one clip."""
    heads, queries, d = q.shape
    total = torch.zeros(k.shape[1], dtype=q.dtype)
    for h in range(heads):
        for i in range(queries):
            logits = torch.stack([q[h, i] @ key / (math.sqrt(d) * beta) for key in k[h]])
            total += logits.softmax(0)
    return (total / (heads * queries)).tolist()


def ranked(importance: list[float]) -> list[int]:
    return sorted(range(len(importance)), key=lambda i: (-importance[i], i))


def mean_query(q: Tensor, importance: list[float], kappa: int) -> Tensor:
    top = ranked(importance)[:kappa]
    return sum(importance[i] * q[:, i] for i in top) / sum(importance[i] for i in top)


def past_share(k: Tensor, now: Tensor, past: Tensor, importance: list[float], kappa: int) -> list[float]:
    share = [0.0] * len(importance)
    for i in ranked(importance)[:kappa]:
        for h in range(k.shape[0]):
            scale = math.sqrt(k.shape[2])
            old, new = (math.exp(float(query[h] @ k[h, i]) / scale) for query in (past, now))
            share[i] += old / (old + new) / k.shape[0]
    return share


def choose_video(importance: list[float], pruned: list[bool], noise: list[float]) -> list[int]:
    kept = [i for i in range(LV) if not pruned[i]]
    kept.sort(key=lambda i: -importance[i] / exponential(noise[i]))
    return (kept + [i for i in ranked(importance) if pruned[i]])[:KV]


def choose_audio(importance: list[float], pruned: list[bool], noise: list[float], chunk: int) -> list[int]:
    size = chunk * FREQ
    chunks = [list(range(first, min(first + size, LA))) for first in range(0, LA, size)]
    means = [sum(importance[i] for i in c) / len(c) for c in chunks]
    order = sorted(range(len(chunks)), key=lambda c: -means[c] / exponential(noise[c]))
    kept: list[int] = []
    for c in order:
        kept += [i for i in chunks[c] if not pruned[i]]
    return (kept + [i for i in ranked(importance) if pruned[i]])[:KA]


@dataclass
class Clip:
    audio: Tensor
    video: Tensor
    importance_a: list[float]
    importance_v: list[float]
    correlation_a: list[float]
    correlation_v: list[float]


def score_clip(one: Method, b: Batch, i: int, past_q_a: Tensor, past_q_v: Tensor, beta: float) -> Clip:
    model, avm = one.model, one.avm
    x_a = model.encode_a(model.patches_a(b.audio[i : i + 1]))
    x_v = model.encode_v(model.patches_v(b.video[i : i + 1]))
    qk = avm.project(*model.fuse_joint(x_a, x_v))
    q_a, k_a, q_v, k_v = (t[0] for t in (qk.q_a, qk.k_a, qk.q_v, qk.k_v))
    importance_a, importance_v = attention_importance(q_v, k_a, beta), attention_importance(q_a, k_v, beta)
    now_a, now_v = mean_query(q_a, importance_a, KA), mean_query(q_v, importance_v, KV)
    return Clip(
        b.audio[i],
        b.video[i],
        importance_a,
        importance_v,
        past_share(k_a, now_v, past_q_v, importance_a, KA),  # audio keys meet video queries
        past_share(k_v, now_a, past_q_a, importance_v, KV),
    )


def learn_clip(one: Method, clip: Clip, kept_a: list[int], kept_v: list[int], noise: dict[str, list[float]]) -> Any:
    """The backbone on one clip's kept patches; the visible ones have the smallest noise of these."""

    def split(kept: list[int], noise: list[float], seen: int) -> Split:
        order = sorted(kept, key=lambda i: noise[i])
        return Split(torch.tensor([order[:seen]]), torch.tensor([order[seen:]]))

    a, v = one.model.patches_a(clip.audio[None]), one.model.patches_v(clip.video[None])
    split_a, split_v = split(kept_a, noise["a"], SEEN_A), split(kept_v, noise["v"], SEEN_V)
    return one.model.pretrain(a, v, split_a, split_v)


def reconstruction(recon: Tensor, target: Tensor) -> Tensor:
    total = torch.zeros((), dtype=recon.dtype)
    for predicted, patch in zip(recon[0], target[0], strict=True):
        total = total + (predicted - (patch - patch.mean()) / (patch.var() + 1e-6).sqrt()).square().mean()
    return total / len(recon[0])


def info_nce(queries: list[Tensor], keys: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=queries[0].dtype)
    for i, query in enumerate(queries):
        logits = torch.stack([torch.cosine_similarity(query[0], key[0], 0) / 0.05 for key in keys])
        total = total - logits.log_softmax(0)[i]
    return total / len(queries)


def matching_loss(one: Method, b: Batch) -> Tensor:
    pairs = draw_pairs(len(b), one.generators["pairs"].clone_state())
    couples = [(i, i, True) for i in pairs.matched.tolist()]
    couples += [(i, j, False) for i, j in zip(pairs.audio.tolist(), pairs.video.tolist(), strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for i, j, matched in couples:
        x_a = one.model.encode_a(one.model.patches_a(b.audio[i : i + 1]))
        x_v = one.model.encode_v(one.model.patches_v(b.video[j : j + 1]))
        chance = one.avm(*one.model.fuse_joint(x_a, x_v)).sigmoid()[0]
        total = total - (chance if matched else 1 - chance).log()
    return total / len(couples)


@torch.no_grad()
def naive_step(one: Method, b: Batch, chunk: int, beta: float, alpha: float) -> dict[str, Tensor]:
    rows = one.memory.state_dict()["rows"]
    slots = next_draw(one, len(b)).tolist()
    n = len(b) + len(slots)
    select, mask = one.generators["select"].clone_state(), one.generators["mask"].clone_state()
    prune_a, chunks = torch.rand(n, LA, generator=select), torch.rand(n, math.ceil(LA / FREQ / chunk), generator=select)
    prune_v, patches = torch.rand(n, LV, generator=select), torch.rand(n, LV, generator=select)
    mask_a, mask_v = torch.rand(n, LA, generator=mask), torch.rand(n, LV, generator=mask)

    clips = []
    for i in range(len(b)):
        past = slots[i % len(slots)]
        clips.append(score_clip(one, b, i, rows["q_a"][past].double(), rows["q_v"][past].double(), beta))
    names = ("audio", "video", "importance_a", "importance_v", "correlation_a", "correlation_v")
    for slot in slots:
        stored = [rows[name][slot] for name in names]
        clips.append(Clip(*stored[:2], *(t.tolist() for t in stored[2:])))

    outs: list[Pretrained] = []
    for i, clip in enumerate(clips):
        pruned_a = [u < c for u, c in zip(prune_a[i].tolist(), clip.correlation_a, strict=True)]
        pruned_v = [u < c for u, c in zip(prune_v[i].tolist(), clip.correlation_v, strict=True)]
        kept_a = choose_audio(clip.importance_a, pruned_a, chunks[i].tolist(), chunk)
        kept_v = choose_video(clip.importance_v, pruned_v, patches[i].tolist())
        noise = {"a": mask_a[i].tolist(), "v": mask_v[i].tolist()}
        outs.append(learn_clip(one, clip, kept_a, kept_v, noise))

    penalty = torch.zeros((), dtype=torch.float64)
    for slot, out in zip(slots, outs[len(b) :], strict=True):
        penalty = penalty + (out.z_a[0] - rows["z_a"][slot]).square().mean()
        penalty = penalty + (out.z_v[0] - rows["z_v"][slot]).square().mean()
    z_a, z_v = [out.z_a for out in outs], [out.z_v for out in outs]
    return {
        "recon_a": sum(reconstruction(out.recon_a, out.target_a) for out in outs) / n,
        "recon_v": sum(reconstruction(out.recon_v, out.target_v) for out in outs) / n,
        "contrastive": 0.1 * (info_nce(z_a, z_v) + info_nce(z_v, z_a)) / 2,
        "penalty": alpha * penalty / len(slots),
        "avm": matching_loss(one, b),
    }


@pytest.mark.parametrize("chunk", [2, 3])  # 3 does not divide the 8 time steps
@pytest.mark.parametrize("size", [2, 5])  # fewer and more than the memory holds
def test_one_step_is_the_paper_step(size: int, chunk: int) -> None:
    one = method("stella", clips=3, dtype=torch.float64, chunk=chunk, beta=0.3, alpha=0.7)
    train(one, [4, 3])
    b = batch(size, 7)
    expected = naive_step(one, b, chunk, beta=0.3, alpha=0.7)
    parts = one.loss(b).parts
    assert list(parts) == list(expected)
    for name, part in parts.items():
        assert abs(part.item() - expected[name].item()) <= 1e-9 * abs(expected[name].item()), name


# ---- gradients


@pytest.mark.parametrize("name", ["stella", "stella_plus"])
def test_the_matching_loss_reaches_the_module_alone_and_nothing_else_does(name: str) -> None:
    one = method(name)
    train(one, [4, 4])
    parts = one.loss(batch(4, 8)).parts
    module, backbone = list(one.avm.parameters()), list(one.model.parameters())
    assert all(g is None for g in torch.autograd.grad(parts["avm"], backbone, retain_graph=True, allow_unused=True))
    assert all(g is not None for g in torch.autograd.grad(parts["avm"], module, retain_graph=True))
    rest = sum(part for key, part in parts.items() if key != "avm")
    assert all(g is None for g in torch.autograd.grad(rest, module, allow_unused=True))


def test_the_module_is_trained_and_saved_with_the_method() -> None:
    one = method("stella", avm_heads=4)
    before = {key: value.clone() for key, value in one.state_dict().items()}
    train(one, [4])
    changed = {key for key, value in one.state_dict().items() if not torch.equal(value, before[key])}
    assert {f"avm.{key}" for key in one.avm.state_dict()} <= changed
    assert one.avm.heads == 4
    assert method("derpp").avm is None


# ---- what is trained on and what is stored


@pytest.mark.parametrize("name", ["stella", "stella_plus", "random", "mats"])
def test_a_fifth_of_all_patches_is_visible_and_the_rest_of_half_is_reconstructed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = method(name)
    train(one, [6])
    calls = spy(monkeypatch, one.model)
    one.loss(batch(6, 6))
    a, v, split_a, split_v, _ = calls[0]
    for patches, split, kept, seen in ((a, split_a, KA, SEEN_A), (v, split_v, KV, SEEN_V)):
        assert split.visible.shape == (12, seen)
        assert split.masked.shape == (12, kept - seen)
        used = patches.positions.gather(1, torch.cat([split.visible, split.masked], 1))
        assert all(len(set(row)) == kept for row in used.tolist())


def test_ratios_may_differ_by_modality(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("stella_plus", keep_ratio_a=0.375, keep_ratio_v=0.625)
    train(one, [3])
    calls = spy(monkeypatch, one.model)
    one.loss(batch(3, 3))
    a, v, *_ = calls[0]
    assert (a.positions.shape, v.positions.shape) == ((6, 24), (6, 10))


def test_stella_stores_the_scores_of_its_clips() -> None:
    one = method("stella", clips=8)
    train(one, [4, 4])
    rows = one.memory.state_dict()["rows"]
    for name, kappa in (("a", KA), ("v", KV)):
        torch.testing.assert_close(rows[f"importance_{name}"].sum(1), torch.ones(8))
        assert (rows[f"correlation_{name}"] > 0).sum(1).tolist() == [0] * 4 + [kappa] * 4  # first the memory was empty


def test_stella_plus_stores_the_patches_it_trained_on_and_masks_them_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_contract: the patches stored are those at the positions stored."""
    one = method("stella_plus", clips=5)
    calls = spy(monkeypatch, one.model)
    train(one, [5])
    a, v, *_ = calls.pop()
    assert torch.equal(a.positions, one.memory.state_dict()["rows"]["positions_a"].long())
    assert torch.equal(v.positions, one.memory.state_dict()["rows"]["positions_v"].long())
    slots = [next_draw(one, 5)]
    one.loss(batch(5, 5))
    slots.append(next_draw(one, 5))
    one.loss(batch(5, 5))
    rows = one.memory.state_dict()["rows"]
    seen = []
    for (a, v, split_a, *_), order in zip(calls, slots, strict=True):
        assert torch.equal(a.positions[5:], rows["positions_a"][order].long())
        assert torch.equal(a.values[5:], rows["patches_a"][order].float())
        assert torch.equal(v.positions[5:], rows["positions_v"][order].long())
        assert torch.equal(v.values[5:], rows["patches_v"][order])
        seen.append({i: set(split_a.visible[5 + row].tolist()) for row, i in enumerate(order.tolist())})
    assert any(seen[0][i] != seen[1][i] for i in range(5))


def test_memory_clips_are_selected_anew_by_their_stored_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stored clip gives a few patches all importance, these are chosen; where C is 1, they are not."""
    one = method("stella", clips=2, audio="free")
    train(one, [2])
    importance = torch.full((2, LV), 1e-20)
    importance[:, 3:7] = 0.25
    one.memory.update(torch.arange(2), importance_v=importance, correlation_v=torch.zeros(2, LV))
    calls = spy(monkeypatch, one.model)
    one.loss(batch(2, 2))
    pruned = torch.zeros(2, LV)
    pruned[:, 3:7] = 1
    one.memory.update(torch.arange(2), correlation_v=pruned)
    one.loss(batch(2, 2))
    for row in (2, 3):
        assert {3, 4, 5, 6} <= set(calls[0][1].positions[row].tolist())
        assert not {3, 4, 5, 6} & set(calls[1][1].positions[row].tolist())


# ---- ablations


@pytest.mark.parametrize(("audio", "axis"), [("time", 0), ("frequency", 1)])
def test_audio_is_kept_in_whole_time_steps_or_whole_mel_rows(
    audio: str, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = method("stella", audio=audio, chunk=1, correlation=False)
    calls = spy(monkeypatch, one.model)
    one.loss(batch(3))
    for positions in calls[0][0].positions:
        kept = torch.zeros(LA, dtype=torch.bool).scatter(0, positions, True).view(TOY.grid_a)
        along = kept.all(1 - axis)
        assert along.sum() == 4  # half of 8
        assert kept.sum() == KA


def test_video_is_kept_in_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("stella", video="blocks", correlation=False)
    calls = spy(monkeypatch, one.model)
    one.loss(batch(3))
    for positions in calls[0][1].positions:  # a frame of these clips is one block
        kept = torch.zeros(TOY.patches_v, dtype=torch.bool).scatter(0, positions, True).view(TOY.grid_v)
        assert kept.flatten(1).all(1).sum() == 2 and kept.sum() == 8


def test_audio_without_constraint_is_kept_patch_by_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("stella", audio="free", correlation=False)
    calls = spy(monkeypatch, one.model)
    one.loss(batch(3))
    kept = torch.zeros(3, LA).scatter(1, calls[0][0].positions, 1).view(3, *TOY.grid_a)
    assert ((kept.sum(1) % 8 != 0).any(1) & (kept.sum(2) % 8 != 0).any(1)).all()


def test_without_correlation_nothing_is_pruned_and_without_importance_patches_are_drawn_uniformly() -> None:
    found = []
    for args in ({}, {"correlation": False}, {"importance": False}):
        one, b = method("stella", **args), batch(4)
        one.after_batch(b, one.loss(b))
        found.append(one.loss(batch(4, 4)).rows)
    full, unpruned, uniform = found
    for m in "av":
        assert torch.equal(unpruned[f"importance_{m}"], full[f"importance_{m}"])
        assert not unpruned[f"correlation_{m}"].any() and (uniform[f"importance_{m}"] == 1).all()
        assert torch.equal(uniform[f"correlation_{m}"], full[f"correlation_{m}"])  # of what attention finds important
        assert torch.equal(uniform[f"q_{m}"], full[f"q_{m}"])


def test_mats_keeps_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("mats")
    b = batch(2)
    still = b.video[:, :1].repeat(1, TOY.frames, 1, 1, 1)
    still[:, :, :, :16] = b.video[:, :, :, :16]  # the upper row of patches changes, the lower does not
    quiet = b.audio[:, :16].repeat(1, 8, 1)
    quiet[:, :, :64] = b.audio[:, :, :64]
    calls = spy(monkeypatch, one.model)
    one.loss(Batch(still, quiet, b.ids))
    a, v, *_ = calls[0]
    assert torch.equal(v.positions.sort(1).values[0], torch.tensor([4 * t + i for t in range(4) for i in (0, 1)]))
    assert (a.positions % FREQ < 4).all()


def test_random_keeps_every_patch_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("random", clips=0)
    calls = spy(monkeypatch, one.model)
    with torch.no_grad():
        for _ in range(30):
            one.loss(batch(8))
    counts = torch.bincount(torch.cat([v.positions.flatten() for _, v, *_ in calls]), minlength=LV)
    chi_square = ((counts - 120) ** 2 / (120 * 0.5)).sum() * (LV - 1) / LV
    assert torch.special.gammaincc(torch.tensor((LV - 1) / 2), chi_square / 2) > 0.001

"""Chorus: its loss against one written clip by clip, what it stores, how many clips it draws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.method_toys import TOY, batch, method, next_draw, plain_parts, spy, train

from stella import selection
from stella.model.cav import Patches, Split, split_by_noise

KA, KV = TOY.patches_a // 2, TOY.patches_v // 2
SEEN_A, SEEN_V = selection.visible(TOY.patches_a, 0.8), selection.visible(TOY.patches_v, 0.8)


def watch(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """The arguments that a function will be called with."""
    calls: list[Any] = []
    function: Callable[..., Any] = getattr(owner, name)
    patch.setattr(owner, name, lambda *args: (calls.append(args), function(*args))[1])
    return calls


def test_the_loss_is_the_one_written_clip_by_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconstruction of the current clips alone; contrast of these and of the drawn ones."""
    one = method("chorus", clips=20, dtype=torch.float64)
    train(one, [6, 6])
    slots = next_draw(one, 12)  # three for each current clip are more than memory has
    calls, seen_a, seen_v = (spy(monkeypatch, one.model), *(watch(monkeypatch, one.model, f"pooled_{m}") for m in "av"))
    parts = one.loss(batch(4, 12)).parts
    ((a, v, split_a, split_v, _),) = calls
    ((past_a,),), ((past_v,),) = seen_a, seen_v
    monkeypatch.undo()
    assert len(past_a.positions) == 12 and len(a.positions) == 4
    expected, z_a, z_v = plain_parts(one.model, a, v, split_a, split_v)
    # The drawn clips' outputs, each alone: the visible patches of a pass whose targets do not matter.
    rows = one.memory.state_dict()["rows"]
    for i, slot in enumerate(slots.tolist()):
        outputs = []
        for m, past in (("a", past_a), ("v", past_v)):
            stored = rows[f"positions_{m}"][slot].long().tolist()
            at = [stored.index(position) for position in past.positions[i].tolist()]
            values = rows[f"patches_{m}"][slot : slot + 1]
            whole = Patches(values.double() if m == "a" else values, rows[f"positions_{m}"][slot : slot + 1].long())
            rest = [j for j in range(len(stored)) if j not in at]
            outputs += [whole, Split(torch.tensor([at]), torch.tensor([rest]))]
        out = one.model.pretrain(outputs[0], outputs[2], outputs[1], outputs[3])
        z_a, z_v = torch.cat([z_a, out.z_a]), torch.cat([z_v, out.z_v])
    similar = torch.stack([torch.stack([(x / x.norm()) @ (y / y.norm()) for y in z_v]) for x in z_a]) / 0.05
    contrast = -(similar.log_softmax(1) + similar.log_softmax(0)).diagonal().mean() / 2
    naive = {
        "recon_a": expected["recon_a"].mean(),
        "recon_v": expected["recon_v"].mean(),
        "contrastive": 0.1 * contrast,
    }
    assert parts.keys() == naive.keys()
    for name, part in parts.items():
        assert part.item() == pytest.approx(naive[name].item(), rel=1e-9), name


def test_half_of_the_patches_is_kept_and_a_fifth_of_all_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("chorus", clips=30)
    train(one, [6, 6, 6, 6])
    calls = spy(monkeypatch, one.model)
    seen = {m: watch(monkeypatch, one.model, f"pooled_{m}") for m in "av"}
    losses = one.loss(batch(6, 24))
    a, v, split_a, split_v, _ = calls[0]
    for m, patches, split, kept, visible in (("a", a, split_a, KA, SEEN_A), ("v", v, split_v, KV, SEEN_V)):
        assert (split.visible.shape, split.masked.shape) == ((6, visible), (6, kept - visible))
        assert torch.equal(losses.rows[f"positions_{m}"], patches.positions)  # what is trained on is stored
        ((past,),) = seen[m]
        assert past.positions.shape == (18, visible)  # three past clips for each current one
        assert all(len(set(row)) == visible for row in past.positions.tolist())


def test_kept_patches_are_a_uniform_draw_for_each_clip() -> None:
    """Every patch is kept about as often as any other, and clips of a batch keep different ones."""
    one = method("chorus", clips=4)
    kept = torch.stack([one.loss(batch(6)).rows["positions_v"] for _ in range(100)]).flatten(0, 1).long()
    share = torch.bincount(kept.flatten(), minlength=TOY.patches_v) / len(kept)
    assert (share - 0.5).abs().max() < 0.1  # five standard deviations of 600 draws
    assert len({tuple(sorted(row)) for row in kept[:6].tolist()}) > 1


def test_drawn_clips_are_masked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("chorus", clips=6)
    train(one, [6])
    seen = watch(monkeypatch, one.model, "pooled_a")
    found = []
    for _ in range(2):
        slots = next_draw(one, 6)
        one.loss(batch(6, 6))
        found.append(
            {slot: set(row) for slot, row in zip(slots.tolist(), seen.pop()[0].positions.tolist(), strict=True)}
        )
    stored = one.memory.state_dict()["rows"]["positions_a"].tolist()
    assert all(found[turn][slot] <= set(stored[slot]) for turn in (0, 1) for slot in range(6))
    assert found[0] != found[1]


def test_draws_and_shares_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    one = method("chorus", clips=40, keep_ratio=0.75, draws=0.5)
    train(one, [6])
    seen = watch(monkeypatch, one.model, "pooled_v")
    one.loss(batch(6, 6))
    assert len(seen[0][0].positions) == 3
    assert one.memory.columns["patches_v"].shape == (12, 768)
    assert train(method("chorus", clips=4, draws=0.01), [3, 3])  # at least one clip is drawn


def test_pooled_outputs_are_those_of_the_training_pass() -> None:
    """`CAV.pooled_a` of the visible patches is `pretrain`'s z_a."""
    model, x = method("finetune").model, batch(3)
    a, v = model.patches_a(x.audio), model.patches_v(x.video)
    splits = split_by_noise(torch.rand(3, TOY.patches_a), SEEN_A), split_by_noise(torch.rand(3, TOY.patches_v), SEEN_V)
    out = model.pretrain(a, v, *splits)
    torch.testing.assert_close(model.pooled_a(a.take(splits[0].visible)), out.z_a)
    torch.testing.assert_close(model.pooled_v(v.take(splits[1].visible)), out.z_v)

"""The virtual step of MIR and GMED against a copy that really steps."""

import copy
from typing import Any

import pytest
import torch
from helpers.method_toys import TOY, batch, batches, method, step, train, trainer
from helpers.small import same
from helpers.virtual import LA, LV, stepped, virtual_noise

from stella.methods import MemoryConfig, ObjectiveConfig, build
from stella.methods.virtual import adam_step
from stella.model.cav import CAV

both = pytest.mark.parametrize("name", ["mir", "gmed"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_the_virtual_step_is_the_optimisers_own(steps: int, kind: type[torch.optim.Adam]) -> None:
    """With weight decay and a learning rate in a tensor, from no moments, and from those of some steps."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((3, 4), (5,), ())]
    rate = torch.tensor(0.01, dtype=torch.float64)
    adam = kind(weights, lr=rate, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
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

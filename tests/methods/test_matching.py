"""The matching module alone: it learns, and the backbone stays as it is."""

import copy

import torch
from helpers.method_toys import batch, method, step, trainer

CHANCE = 0.693  # nats: half of the pairs match


def test_the_module_learns_which_sound_belongs_to_which_picture_and_the_backbone_stays() -> None:
    one = method("matching")
    backbone, module = copy.deepcopy(one.model.state_dict()), copy.deepcopy(one.avm.state_dict())
    loop, clips = trainer(one, lr=1e-2), batch(10)
    losses = [step(loop, clips) for _ in range(80)]
    assert all(parts.keys() == {"avm"} for parts in losses)
    first, last = (sum(parts["avm"] for parts in some) / 10 for some in (losses[:10], losses[-10:]))
    assert last < 0.6 * CHANCE < 0.9 * CHANCE < first
    assert all(torch.equal(value, backbone[name]) for name, value in one.model.state_dict().items())
    assert not any(torch.equal(value, module[name]) for name, value in one.avm.state_dict().items())

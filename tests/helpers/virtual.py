"""A step that is really taken, by a copy: what MIR and GMED look ahead to."""

import copy

import torch
from torch import Tensor

from helpers.method_toys import TOY, plain_losses
from stella.clip import Batch
from stella.methods import Method
from stella.model.cav import CAV, Split

LA, LV = TOY.patches_a, TOY.patches_v
SEEN = int(LA * 0.2), int(LV * 0.2)


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

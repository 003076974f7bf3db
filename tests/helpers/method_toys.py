"""A small model, batches and a few training steps, for the tests of methods."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from stella.clip import Batch
from stella.data.stream import Stream, StreamConfig
from stella.methods import MemoryConfig, Method, ObjectiveConfig, build
from stella.model.cav import CAV, Patches, Split, preset
from stella.rng import generator
from stella.train.config import TrainConfig
from stella.train.device import runtime
from stella.train.trainer import Trainer

TOY = preset(  # 8 x 8 audio, 4 x 2 x 2 video patches
    "tiny", image_size=32, spec_frames=128, dim=24, depth=2, fusion_from=1, dec_dim=16, dec_depth=1
)
ALL_ENTER: dict[str, dict[str, Any]] = {"esmer": {"beta": 1e9}}  # so that every clip may enter the memory


def method(
    name: str,
    clips: int = 10,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    coded: bool = False,
    **args: Any,
) -> Method:
    """A method on a toy model, with an optimiser that has not stepped yet."""
    torch.manual_seed(3)
    memory = MemoryConfig(clips=clips, codec="dct" if coded else None)
    one = build(name, CAV(TOY).to(dtype), args, ObjectiveConfig(), memory, seed)
    trainer(one)
    return one


def trainer(one: Method, **config: Any) -> Trainer:
    """A trainer without a stream, for `step`."""
    config = {"lr": 1e-3, **config}
    return Trainer(one, Stream([], StreamConfig()), TrainConfig(**config), runtime("cpu"))


def next_draw(method: Method, n: int) -> torch.Tensor:
    """The slots that the method's next draw of n clips will have."""
    assert method.memory is not None
    state = method.memory.generator.get_state()
    drawn = method.memory.draw(n)
    assert drawn is not None
    method.memory.generator.set_state(state)
    return drawn.slots


def spy(patch: pytest.MonkeyPatch, owner: Any) -> list[tuple[Any, ...]]:
    """What `pretrain` of a model or a method will be given and will return, call by call: (*arguments, outputs)."""
    calls: list[tuple[Any, ...]] = []
    pretrain = owner.pretrain

    def spied(*args: Any) -> Any:
        calls.append((*args, pretrain(*args)))
        return calls[-1][-1]

    patch.setattr(owner, "pretrain", spied)
    return calls


def plain_parts(
    model: CAV, a: Patches, v: Patches, split_a: Split, split_v: Split, tau: float = 0.05, norm_pix: bool = True
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The unweighted parts of L of each clip [n], z_a and z_v [n, D]. Each clip runs alone; all are negatives."""
    outs = [model.pretrain(*(x[i : i + 1] for x in (a, v, split_a, split_v))) for i in range(len(a.values))]

    def recon(predicted: Tensor, target: Tensor) -> Tensor:
        if norm_pix:
            target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
        return (predicted - target).square().mean()

    z_a, z_v = torch.cat([out.z_a for out in outs]), torch.cat([out.z_v for out in outs])
    similar = torch.stack([torch.stack([(x / x.norm()) @ (y / y.norm()) for y in z_v]) for x in z_a]) / tau
    parts = {
        "recon_a": torch.stack([recon(out.recon_a, out.target_a) for out in outs]),
        "recon_v": torch.stack([recon(out.recon_v, out.target_v) for out in outs]),
        "contrastive": -(similar.log_softmax(1) + similar.log_softmax(0)).diagonal() / 2,
    }
    return parts, z_a, z_v


def plain_losses(model: CAV, *given: Any) -> Tensor:
    """L of each clip [n], with the paper's weight."""
    parts, *_ = plain_parts(model, *given)
    return parts["recon_a"] + parts["recon_v"] + 0.1 * parts["contrastive"]


def batch(n: int, first: int = 0) -> Batch:
    g = generator("batch", n, first)
    video = torch.randint(256, (n, TOY.frames, 3, TOY.image_size, TOY.image_size), generator=g, dtype=torch.uint8)
    audio = torch.randn(n, TOY.spec_frames, TOY.mel_bins, generator=g)
    return Batch(video, audio, torch.arange(first, first + n))


def batches(sizes: Iterable[int], first: int = 0) -> list[Batch]:
    made = []
    for n in sizes:
        made.append(batch(n, first))
        first += n
    return made


def step(trainer: Trainer, *batches: Batch) -> dict[str, float]:
    """A training step on these batches; returns the mean of each part of the loss."""
    assert trainer.compute(batches).all()
    parts = trainer.meter.read()
    parts.pop("loss")
    return parts


def train(method: Method, sizes: Iterable[int] = (6, 6, 6, 5, 6, 1)) -> list[dict[str, float]]:
    one = trainer(method)
    return [step(one, each) for each in batches(sizes)]


def assert_same_weights(one: Method, other: Method, part: str = "model") -> None:
    ours, theirs = (getattr(each, part).state_dict() for each in (one, other))
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different

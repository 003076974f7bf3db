"""How many bits MIR and GMED need to see a step of 1e-4, and what their passes cost on a GPU.

    python benchmarks/look_ahead.py

What a step does to candidates from memory, in several precisions against float64: by how much each one's loss changes
(MIR ranks these), and how its gradient does (g₂ − g₁, the part of GMED's edits that looks ahead; the other is β·g₁).
The models are the shipped ones, the clips scenes of the first two tasks. Then, on a GPU, the same passes at the
paper's sizes, on noise: milliseconds, as written and compiled.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor

from stella.clip import Batch
from stella.config import resolve
from stella.data.scenes import Scenes
from stella.data.stream import Stream, StreamConfig
from stella.fast.compile import compiled
from stella.methods.gmed import GMEDConfig
from stella.methods.virtual import LooksAhead, Weights
from stella.model.cav import Split
from stella.model.linear import exact_products
from stella.runs.build import build_method
from stella.runs.config import RunConfig
from stella.runs.environment import environment
from stella.train.device import Clock, runtime

LR = 1e-4
DEVICE = runtime().device


@contextmanager
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


PRECISIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float32": nullcontext,
    "three products of halves": exact_products,
}
if DEVICE.type == "cuda":
    PRECISIONS |= {"TF32": tf32, "bfloat16": lambda: torch.autocast("cuda", torch.bfloat16)}


def looks_ahead(preset: str, weights: str | None) -> LooksAhead:
    more = [f"model.weights={weights}"] if weights else []
    config = resolve(RunConfig, None, ["method=mir", f"model.preset={preset}", *more])
    method = build_method(config, DEVICE)
    assert isinstance(method, LooksAhead)
    return method


def scenes(task: str, clips: int) -> Batch:
    """As a stream gives them, without augmentation."""
    config = StreamConfig(batch_size=clips, augment=False, size=96, spec_frames=256)
    return next(Stream([(task, Scenes(task, "train", clips))], config, DEVICE))


def change(
    method: LooksAhead, before: Weights, after: Weights, past: Batch, splits: tuple[Split, Split]
) -> tuple[Tensor, Tensor, Tensor]:
    """What the step does to each candidate's loss [n], g₂ − g₁ of sound and pictures, and an edit's direction."""

    def at(weights: Weights) -> tuple[Tensor, Tensor]:
        dtype = method.model.pixel_scale.dtype
        clips = [past.audio.to(dtype).requires_grad_(), method.model.normalise(past.video).requires_grad_()]
        losses = method.clip_losses(weights, *clips, splits)
        gradients = method.gradients(losses.sum(), clips)
        return losses.detach().double(), torch.cat([g.double().flatten() for g in gradients])

    (loss_1, gradient_1), (loss_2, gradient_2) = at(before), at(after)
    ahead = gradient_2 - gradient_1
    return loss_2 - loss_1, ahead, ahead + GMEDConfig().beta * gradient_1


def ranks_alike(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation."""
    return float(torch.corrcoef(torch.stack([x.argsort().argsort(), y.argsort().argsort()]).double())[0, 1])


def exactness(preset: str) -> None:
    method, now, past = looks_ahead(preset, f"base-{preset}"), scenes("task2", 24), scenes("task1", 120)
    now_splits, splits = method.virtual_splits(len(now)), method.virtual_splits(len(past))
    method.model.double()
    theta = {name: p.detach().requires_grad_() for name, p in method.model.named_parameters()}
    loss = method.clip_losses(theta, now.audio.double(), now.video, now_splits).mean()
    gradients = torch.autograd.grad(loss, list(theta.values()), materialize_grads=True)
    before = {name: p.detach() for name, p in theta.items()}
    after = {name: (p - LR * g).detach() for (name, p), g in zip(before.items(), gradients, strict=True)}
    exact = change(method, before, after, past, splits)
    method.model.float()
    before, after = ({name: p.float() for name, p in each.items()} for each in (before, after))
    for name, precision in PRECISIONS.items():
        with precision():
            found = change(method, before, after, past, splits)
        spread = (found[0] - exact[0]).square().mean().sqrt() / exact[0].std()
        ahead, edit = ((ours - right).norm() / right.norm() for ours, right in zip(found[1:], exact[1:], strict=True))
        print(
            f"{preset}, {name}: ranks {ranks_alike(found[0], exact[0]):.4f}, error of a change {spread:.2g} of their "
            f"deviation, of g2 - g1 {ahead:.2g}, of an edit {edit:.2g}",
            flush=True,
        )


def cost(clips: int = 48) -> None:
    method = looks_ahead("base", None)
    c = method.model.config
    audio = torch.randn(clips, c.spec_frames, c.mel_bins, device=DEVICE)
    video = torch.randint(256, (clips, c.frames, 3, c.image_size, c.image_size), dtype=torch.uint8, device=DEVICE)
    splits, weights, clock = method.virtual_splits(clips), method.weights(), Clock(DEVICE)
    for compile in (False, True):
        for name, precision in PRECISIONS.items():
            times = []
            with torch.no_grad(), compiled(compile), precision():
                for _ in range(12):
                    start = clock.mark()
                    method.clip_losses(weights, audio, video, splits)
                    times.append(clock.ms(start, clock.mark()))
            how = "compiled" if compile else "as written"
            print(f"base, {clips} clips forward, {name}, {how}: {median(times[2:]):.1f} ms", flush=True)


if __name__ == "__main__":
    facts = environment(runtime())
    print(f"commit {facts['commit']}, {facts['gpu'] or facts['processor']}, torch {facts['torch']}", flush=True)
    for preset in ("tiny", "small"):
        exactness(preset)
    if DEVICE.type == "cuda":
        cost()

"""How many bits MIR and GMED need to see a step of 1e-4, and what their passes cost, on one GPU.

    python benchmarks/look_ahead.py

What a step does to candidates from memory, in several precisions against float64: by how much each one's loss changes
(MIR ranks these) and its gradient (GMED's edits). The models are the shipped ones, the clips scenes of the first two
tasks. Then the same passes at the paper's sizes, on noise: milliseconds, products as written and compiled.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from stella.clip import Batch
from stella.config import resolve
from stella.data.scenes import Scenes
from stella.methods.virtual import LooksAhead, Weights
from stella.model.cav import Split
from stella.model.compiling import compiled
from stella.model.linear import exact_products
from stella.train.config import RunConfig
from stella.train.run import build_method
from stella.train.runtime import Clock

LR = 1e-4


@contextmanager
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@contextmanager
def float32() -> Iterator[None]:
    yield


def bfloat16() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


PRECISIONS: dict[str, Callable[[], object]] = {
    "float32": float32,
    "three products of halves": exact_products,
    "TF32": tf32,
    "bfloat16": bfloat16,
}


def looks_ahead(preset: str, weights: str | None) -> LooksAhead:
    more = [f"model.weights={weights}"] if weights else []
    config = resolve(RunConfig, None, ["method=mir", f"model.preset={preset}", *more])
    method = build_method(config, torch.device("cuda"))
    assert isinstance(method, LooksAhead)
    return method


def scenes(task: str, clips: int) -> Batch:
    """As a stream gives them, without augmentation."""
    from stella.data.stream import Stream, StreamConfig

    config = StreamConfig(batch_size=clips, augment=False, size=96, spec_frames=256)
    return next(Stream([(task, Scenes(task, "train", clips))], config, torch.device("cuda")))


def change(
    method: LooksAhead, before: Weights, after: Weights, past: Batch, splits: tuple[Split, Split]
) -> tuple[Tensor, Tensor]:
    """What the step does to each candidate's loss [n], and to the gradient of its sound."""

    def at(weights: Weights) -> tuple[Tensor, Tensor]:
        audio = past.audio.to(method.model.pixel_scale.dtype).requires_grad_()
        losses = method.clip_losses(weights, audio, past.video, splits)
        return losses.detach().double(), method.gradients(losses.sum(), [audio])[0].double()

    (loss_1, gradient_1), (loss_2, gradient_2) = at(before), at(after)
    return loss_2 - loss_1, gradient_2 - gradient_1


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
    exact, exact_gradient = change(method, before, after, past, splits)
    method.model.float()
    before, after = ({name: p.float() for name, p in each.items()} for each in (before, after))
    for name, precision in PRECISIONS.items():
        with precision():  # type: ignore[attr-defined]
            found, gradient = change(method, before, after, past, splits)
        spread = (found - exact).square().mean().sqrt() / exact.std()
        edits = (gradient - exact_gradient).norm() / exact_gradient.norm()
        print(
            f"{preset}, {name}: ranks {ranks_alike(found, exact):.4f}, error of a change {spread:.2g} of their "
            f"deviation, error of edits {edits:.2g}",
            flush=True,
        )


def cost(clips: int = 48) -> None:
    method = looks_ahead("base", None)
    c = method.model.config
    audio = torch.randn(clips, c.spec_frames, c.mel_bins, device="cuda")
    video = torch.randint(256, (clips, c.frames, 3, c.image_size, c.image_size), dtype=torch.uint8, device="cuda")
    splits, weights, clock = method.virtual_splits(clips), method.weights(), Clock(torch.device("cuda"))
    for compile in (False, True):
        for name, precision in PRECISIONS.items():
            times = []
            with torch.no_grad(), compiled(compile), precision():  # type: ignore[attr-defined]
                for _ in range(12):
                    start = clock.mark()
                    method.clip_losses(weights, audio, video, splits)
                    times.append(clock.ms(start, clock.mark()))
            how = "compiled" if compile else "as written"
            print(f"base, {clips} clips forward, {name}, {how}: {median(times[2:]):.1f} ms", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for preset in ("tiny", "small"):
        exactness(preset)
    cost()

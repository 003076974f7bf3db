"""How far MIR's ranking and GMED's edits in bfloat16 agree with float32, with the optimiser's own virtual step.

    python benchmarks/virtual_step.py            (a CPU: `tiny`; a GPU: `tiny` and `small`)

Trains MIR for some steps on scenes from the shipped weights, so that Adam has moments and the memory has clips. Then
candidates are ranked by their loss increase after the virtual step, in float32 and under bfloat16 autocast, from the
same weights, clips and masks.
"""

import argparse

import torch
from torch import Tensor

from stella.config import resolve
from stella.data.scenes import Scenes
from stella.data.stream import Stream
from stella.methods.virtual import LooksAhead
from stella.runs.build import build_method
from stella.runs.config import RunConfig, settle
from stella.train.device import runtime
from stella.train.trainer import Trainer


def looks_ahead(preset: str, steps: int, batch: int, device: str) -> tuple[LooksAhead, Stream]:
    config = settle(
        resolve(
            RunConfig,
            None,
            [
                "method=mir",
                f"model.preset={preset}",
                f"model.weights=base-{preset}",
                f"stream.batch_size={batch}",
                "stream.augment=false",
                "memory.clips=400",
                "train.lr=5e-4",
                f"train.device={device}",
                "train.precision=float32",
            ],
        )
    )
    machine = runtime(device, "float32")
    tasks = [(task, Scenes(task, "train", steps * batch // 2)) for task in ("task1", "task2")]
    stream = Stream(tasks, config.stream, machine.device)
    method = build_method(config, machine.device)
    trainer = Trainer(method, stream, config.train, machine)
    for _ in range(steps - 1):
        trainer.advance()
    assert isinstance(method, LooksAhead)
    return method, stream


def increases(method: LooksAhead, stream: Stream, candidates: int) -> dict[str, Tensor]:
    """The loss increase of the same candidates in both precisions."""
    batch = next(stream)
    assert method.memory is not None
    drawn = method.memory.draw(candidates, to=method.device)
    assert drawn is not None
    state = method.generators["virtual"].get_state()
    found = {}
    for name, half in (("float32", False), ("bfloat16", True)):
        method.generators["virtual"].set_state(state)
        with torch.autocast(method.device.type, torch.bfloat16, enabled=half):
            after = method.virtual_weights(batch)
            with torch.no_grad():
                splits = method.virtual_splits(drawn["audio"], drawn["video"])
                clips = drawn["audio"], drawn["video"], splits, len(batch)
                change = method.clip_losses(after, *clips) - method.clip_losses(method.weights(), *clips)
        found[name] = change.double().cpu()
    return found


def rank_correlation(x: Tensor, y: Tensor) -> float:
    ranks = torch.stack([x.argsort().argsort(), y.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="training steps before the comparison")
    parser.add_argument("--batch", type=int, default=24, help="clips of a batch")
    parser.add_argument("--candidates", type=int, default=120, help="clips that are ranked")
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    for preset in ("tiny", "small") if gpu else ("tiny",):
        method, stream = looks_ahead(preset, given.steps, given.batch, "cuda" if gpu else "cpu")
        found = increases(method, stream, given.candidates)
        exact, half = found["float32"], found["bfloat16"]
        top = given.batch
        shared = len(set(exact.topk(top).indices.tolist()) & set(half.topk(top).indices.tolist()))
        print(
            f"{preset}: rank correlation {rank_correlation(exact, half):.4f}, {shared} of the {top} replayed clips are "
            f"the same; increase {exact.mean():.4f} ± {exact.std():.4f}, error {(half - exact).abs().mean():.5f}"
        )


if __name__ == "__main__":
    main()

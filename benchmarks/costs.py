"""What a step of each method costs: FLOPs a clip, and the bytes of weights, gradients and optimiser.

    python -m benchmarks.costs base large > results/scaling/costs.csv

Steps are taken on fake tensors, which have shapes and no values, so that any size fits. FLOPs are those of matrix
products and attention, forward and backward, without activation recomputation, as `stella bench` counts them on a GPU.
"""

import argparse
import csv
import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from stella.bench.steps import advance, make_trainer, settle_draws
from stella.config import resolve
from stella.methods import METHODS
from stella.runs.config import RunConfig
from stella.train.trainer import Trainer

BATCH = 4
aten = torch.ops.aten
ATTENTION: dict[Any, Any] = {  # a CPU's kernel, as the GPU's is counted
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def cost(method: str, preset: str) -> dict[str, Any]:
    keys = [f"method={method}", f"model.preset={preset}", f"stream.batch_size={BATCH}", "memory.clips=40"]
    config = resolve(RunConfig, None, [*keys, "data.size=scenes-full", "train.device=cpu", "train.compile=off"])
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        patch.object(nn.Module, "to", lambda self, *_: self),
        patch.object(Trainer, "settle", lambda self, wait=True: self._unsettled.clear()),  # every step is finite
        patch.object(Tensor, "__int__", lambda self: BATCH),  # every clip is offered to the memory
    ):
        trainer = make_trainer(config)
        settle_draws(trainer)
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            advance(trainer, 1)
        numbers = [(p.numel(), p.requires_grad) for p in trainer.method.parameters()]
    state = sum(size * (16 if trained else 4) for size, trained in numbers)  # float32: weights, gradients, two moments
    return {
        "method": method,
        "preset": preset,
        "gflop_per_clip": round(counter.get_total_flops() / BATCH / 1e9, 1),
        "parameters": sum(size for size, _ in numbers),
        "state_gib": round(state / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--methods", default=",".join(METHODS))
    args = parser.parse_args()
    writer = None
    for preset in args.presets:
        for method in args.methods.split(","):
            row = cost(method, preset)
            if writer is None:
                writer = csv.DictWriter(sys.stdout, row)
                writer.writeheader()
            writer.writerow(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()

from typing import Any

import torch
from helpers.noise import Noise

from stella.columns import Column
from stella.data.stream import StreamConfig
from stella.memory import Memory
from stella.runs.plan import plan


def told(
    sizes: list[int], judged: int, batch: int, epochs: int, steps: int, capacity: int = 0, accumulate: int = 1
) -> str:
    train: Any = [(f"t{i}", Noise(i, size)) for i, size in enumerate(sizes)]
    evaluation: Any = [(name, Noise(9, judged)) for name, _ in train]
    memory = (
        Memory({"x": Column(torch.uint8, (992,))}, capacity, torch.Generator(), epochs * sum(sizes))
        if capacity
        else None
    )
    stream = StreamConfig(batch_size=batch, epochs=epochs)
    return "\n".join(plan(train, evaluation, stream, steps, memory, accumulate))


def test_a_plan_says_clips_steps_epochs_and_memory() -> None:
    assert told([2000, 2000], 240, 40, 3, 300, 1000) == (
        "2 tasks, 4,000 clips (2,000 each): 300 steps of 40 clips, 3 epochs of each task; evaluated on 480 other clips"
        "\nrehearsal memory: 1,000 clips in 1 MB"
    )
    assert "2 tasks, 2,010 clips (10 to 2,000 each): " in told([2000, 10], 240, 40, 1, 200)
    assert ": 100 steps of 160 clips, 4 epochs" in told([4000], 240, 40, 4, 100, accumulate=4)
    assert told([50], 20, 1, 4, 200, 300).endswith("200 clips in 0 MB: all that this run brings, 300 were allowed")


def test_two_steps_for_seventy_videos_are_pointed_out_with_what_to_change() -> None:
    lines = told([63], 7, 32, 1, 2).splitlines()
    assert lines[0].startswith("1 task, 63 clips: 2 steps of 32 clips, 1 epoch")
    assert "only 2 steps" in lines[1] and "set stream.epochs=50, or stream.batch_size=8, or add clips" in lines[1]
    assert lines[2] == "few clips to evaluate on: t0 (7); figures of so few say little"
    assert "t0 (7), t1 (7), t2 (7) and 2 more" in told([500] * 5, 7, 1, 1, 2500)
    assert "batch_size=" not in told([3], 30, 1, 1, 3)

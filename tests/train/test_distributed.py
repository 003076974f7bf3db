"""Several real processes train as one does: values, gradients, weights, memory."""

from typing import Any

import pytest
from helpers.team import compare

from stella.methods import METHODS
from stella.train import sharing

ODD = [f"{name}:{clips}" for name in ("er", "stella", "mir", "lump", "gmed") for clips in (3, 5, 7)]


@pytest.mark.parametrize(
    ("count", "steps", "cases"),
    [
        (2, 5, ["stella", "mir", "esmer"]),
        pytest.param(2, 20, [*METHODS, *ODD], marks=pytest.mark.slow),
        pytest.param(4, 20, [*METHODS, *ODD], marks=pytest.mark.slow),
    ],
)
def test_processes_train_as_one_does(count: int, steps: int, cases: list[str]) -> None:
    """In batches that divide, that do not, and that are smaller than the processes are many."""
    for case, found in compare(count, steps, cases).items():
        assert found["losses"] < 1e-12 and found["gradients"] < 1e-12 and found["weights"] < 1e-8, (case, found)
        assert found.get("memory", 0) < 1e-3 and found.get("ids", 0) == 0, (case, found)  # columns in half precision


@pytest.mark.slow
def test_several_batches_a_step_and_slow_weights() -> None:
    for case, found in compare(2, 20, ["gmed", "cls_er", "stella"], accumulate=3, ema=0.9).items():
        assert found["losses"] < 1e-12 and found["weights"] < 1e-8 and found["slow"] < 1e-8, (case, found)


def test_the_comparison_sees_a_gather_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def cut(ctx: Any, gradient: Any) -> Any:
        start = sum(ctx.counts[: ctx.world.rank])
        return gradient[start : start + ctx.counts[ctx.world.rank]], None, None

    monkeypatch.setattr(sharing.GatherRows, "backward", staticmethod(cut))
    found = compare(2, 2, ["finetune"])["finetune"]
    assert found["gradients"] > 1e-3 and found["weights"] > 1e-3, found

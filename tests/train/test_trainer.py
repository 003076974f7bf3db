from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers.small import Noise, quick, same
from torch import Tensor

from stella.clip import Batch
from stella.data.stream import Stream
from stella.errors import StellaError
from stella.fast.activations import Activations
from stella.methods import Losses, Method
from stella.peers import cut
from stella.runs.build import build_method
from stella.runs.config import RunConfig, settle
from stella.train import trainer as trainer_module
from stella.train.device import runtime
from stella.train.distributed import BatchSpread, LocalBatch
from stella.train.trainer import Trainer

CPU = torch.device("cpu")
ADAM: dict[str, Any] = {"lr": torch.tensor(1e-3), "betas": (0.95, 0.999), "weight_decay": 5e-7, "fused": True}


def make(config: RunConfig, lengths: tuple[int, ...] = (10, 11)) -> Trainer:
    config = settle(replace(config, stream=replace(config.stream, epochs=2)))
    stream = Stream([(str(i), Noise(i, length)) for i, length in enumerate(lengths)], config.stream)
    return Trainer(build_method(config, CPU), stream, config.train, runtime("cpu"))


def weights(method: Method) -> list[Tensor]:
    return [p.detach().clone() for p in method.parameters()]


def test_steps_are_those_of_a_plain_loop() -> None:
    config = settle(quick("er", "train.warmup_steps=3", "train.weight_decay=0.01"))
    trainer = make(config)
    while trainer.advance():
        pass
    plain = make(config)
    optimizer = torch.optim.Adam(plain.method.parameters(), **(ADAM | {"weight_decay": 0.01}))
    clips = 0
    for number, batch in enumerate(plain.stream, 1):
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3 * min(1, number / 3))
        losses = plain.method.loss(batch)
        optimizer.zero_grad()
        sum(losses.parts.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        plain.method.after_batch(batch, losses)
        clips += len(batch)
    assert same(weights(trainer.method), weights(plain.method))
    assert trainer.counters.step == len(plain.stream) == 12 and trainer.counters.clips == clips == 42


@pytest.mark.parametrize("activations", get_args(Activations))
def test_steps_run_with_the_activations_that_are_set(activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, seen = make(quick("finetune", f"train.activations={activations}")), []
    plain = trainer_module.applied
    monkeypatch.setattr(trainer_module, "applied", lambda *how: seen.append(how) or plain(*how))
    trainer.advance()
    assert seen == [(False, activations, False, True)]


def test_short_batches_are_compiled_when_their_size_has_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner's rounds end with batches of ever new sizes. All of them recompute activations."""
    trainer, seen, plain = make(quick("finetune", "stream.batch_size=4"), (5, 6, 5)), [], trainer_module.applied
    trainer.runtime = replace(trainer.runtime, compile=True)
    monkeypatch.setattr(trainer_module, "OFTEN", 2)
    monkeypatch.setattr(trainer_module, "applied", lambda *how: seen.append(how) or plain(False))
    while trainer.advance():
        pass
    assert {(kept, lean) for _, kept, lean, _ in seen} == {("products", True)}
    # Two epochs each: batches of 4 and 1, of 4 and 2, of 4 and 1 clips.
    assert [compiled for compiled, *_ in seen] == [True, False] * 4 + [True, True] * 2


def test_processes_agree_on_which_short_batches_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 and 6 clips one process has 3 each time, the other 2 and 3. Steps that are compiled are recorded too."""
    monkeypatch.setattr(trainer_module, "OFTEN", 3)
    said = []
    for rank in range(2):
        trainer = make(quick("finetune", "stream.batch_size=8"))
        rows = [cut(clips, 2) for clips in (5, 6) * 4]
        none = torch.empty(0)
        batches = [LocalBatch(torch.empty(n[rank], 1), none, none, BatchSpread(n, replicated=False)) for n in rows]
        said.append([trainer._compiles([each]) for each in batches])
    assert said[0] == said[1] == [False] * 6 + [True] * 2


def test_accumulation_steps_on_the_mean_of_its_batches_and_ends_with_a_task() -> None:
    trainer, plain = make(quick("finetune", "train.accumulate=4")), make(quick("finetune"))
    optimizer = torch.optim.Adam(plain.method.parameters(), **ADAM)
    for group in (4, 2, 4, 2):  # two epochs of three batches a task
        optimizer.zero_grad()
        for _ in range(group):
            (plain.method.loss(next(plain.stream)).total / group).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert trainer.advance()
        for ours, theirs in zip(weights(trainer.method), weights(plain.method), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert not trainer.advance()


@pytest.mark.parametrize(
    ("settings", "lengths", "expected"),
    [
        (("warmup_steps=4", "decay=0.5", "accumulate=2"), (10, 11, 12), [2.25, 4.5, 6.75, 9, 9, 8, 6, 4, 2]),
        (("decay=1.0", "accumulate=5"), (4, 4, 4), [9, 6, 3]),  # with the short step of each task
        (("schedule=cosine", "decay=1.0", "warmup_steps=2"), (4, 4), [4.5, 9, 9, 4.5]),
        (("schedule=cosine", "accumulate=2"), (4, 4, 4), [9, 6.75, 2.25]),
        (("schedule=cosine", "accumulate=2"), (4,), [9]),
    ],
)
def test_the_learning_rate_rises_stays_and_falls_to_its_last_step(
    settings: tuple[str, ...], lengths: tuple[int, ...], expected: list[float]
) -> None:
    """In ninths of it, over tasks of six, or of two, batches."""
    trainer, rates = make(quick("finetune", *(f"train.{setting}" for setting in settings)), lengths), []
    assert trainer.steps == len(expected)
    while trainer.advance():
        rates.append(9 * float(trainer.optimizer.param_groups[0]["lr"]) / 1e-3)
    assert rates == pytest.approx(expected) and trainer.counters.step == trainer.steps


def spoil(trainer: Trainer, steps: set[int], how: Callable[[Tensor], Tensor]) -> None:
    plain = trainer.method.loss

    def loss(batch: Batch) -> Losses:
        losses = plain(batch)
        if trainer.counters.step not in steps:
            return losses
        return Losses({**losses.parts, "recon_a": how(losses.parts["recon_a"])}, losses.rows)

    trainer.method.loss = loss  # type: ignore[method-assign]


class FiniteWithBadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.inf


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (lambda x: x * torch.nan, "recon_a"),
        (lambda x: x + torch.inf, "recon_a"),
        (FiniteWithBadGradient.apply, "the gradients"),
    ],
)
def test_a_non_finite_step_is_skipped(how: Callable[[Tensor], Tensor], named: str) -> None:
    trainer = make(quick("derpp"))
    spoil(trainer, {3, 4}, how)
    trainer.advance()
    trainer.advance()
    assert trainer.method.memory is not None
    trainer.meter.read()
    before = weights(trainer.method), trainer.optimizer.state_dict()["state"], trainer.method.memory.seen
    before = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, before)
    trainer.advance()
    assert trainer.skipped == [(3, [named])]
    trainer.advance()
    after = weights(trainer.method), trainer.optimizer.state_dict()["state"], trainer.method.memory.seen
    assert same(before, after)
    assert trainer.meter.read() == {}
    assert (trainer.counters.skipped, trainer.counters.skipped_in_a_row) == (2, 2)
    trainer.advance()
    assert (trainer.counters.skipped, trainer.counters.skipped_in_a_row, trainer.counters.step) == (2, 0, 5)
    assert not same(weights(trainer.method), after[0])


def test_the_meter_means_over_steps() -> None:
    trainer = make(quick("finetune"))
    totals: list[float] = []
    plain = trainer.method.loss

    def loss(batch: Batch) -> Losses:
        losses = plain(batch)
        totals.append(losses.total.item())
        return losses

    trainer.method.loss = loss  # type: ignore[method-assign]
    for _ in range(3):
        trainer.advance()
    means = trainer.meter.read()
    assert means.pop("loss") == pytest.approx(sum(totals) / 3)
    assert list(means) == ["recon_a", "recon_v", "contrastive"]
    assert trainer.meter.read() == {}


def test_the_seed_decides_the_initial_weights_and_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (make(quick("stella", f"seed={seed}")).method for seed in (1, 1, 2))
    assert same(weights(first), weights(again))
    assert not same(weights(first), weights(other))
    assert torch.equal(torch.get_rng_state(), state)


def test_clips_of_a_skipped_first_step_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host counts what the memory is offered, without knowing whether the step was taken."""
    trainer = make(quick("derpp"))
    memory, loss = trainer.method.memory, trainer.method.loss
    assert memory is not None
    add, drawn = memory.add, []

    def offered(ids: Tensor, **columns: Tensor) -> None:
        before = memory.offered
        add(ids, **columns)
        memory.offered = before + len(ids)

    def spoilt(batch: Batch) -> Losses:
        drawn.append(len(trainer.method.draw(batch) or ()))
        losses = loss(batch)
        return Losses({**losses.parts, "bad": losses.total * torch.nan}, losses.rows) if len(drawn) < 3 else losses

    monkeypatch.setattr(memory, "add", offered)
    monkeypatch.setattr(trainer.method, "loss", spoilt)
    for _ in range(4):
        trainer.advance()
    assert drawn[:3] == [0, 0, 0] and drawn[3] > 0


def test_a_state_of_another_kind_of_device_is_refused() -> None:
    trainer = make(quick("er"))
    trainer.advance()
    with pytest.raises(StellaError, match=r"started with train\.device=cuda and cannot resume on cpu"):
        make(quick("er")).load_state_dict(trainer.state_dict() | {"device": "cuda"})


def test_slow_weights_average_the_weights_after_each_step_and_travel_with_the_state(tmp_path: Path) -> None:
    """With decay 1 they are the plain mean of the weights before the first step and after each one."""
    trainer, seen = make(quick("derpp", "train.ema=1.0")), []
    assert trainer.slow is not None
    seen.append(weights(trainer.method))
    spoil(trainer, {3}, lambda x: x * torch.nan)
    for _ in range(5):
        trainer.advance()
        if trainer.counters.step != 3:  # skipped
            seen.append(weights(trainer.method))
    for slow, *each in zip(trainer.slow.model.parameters(), *seen, strict=True):
        torch.testing.assert_close(slow, torch.stack(each).mean(0), rtol=1e-4, atol=1e-6)
    torch.save(trainer.state_dict(), tmp_path / "state.pt")
    other = make(quick("derpp", "train.ema=1.0"))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(list(other.slow.parameters()), list(trainer.slow.parameters())) and other.slow.steps == 4  # type: ignore[union-attr]

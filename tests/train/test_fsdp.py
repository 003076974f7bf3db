"""Processes that divide the weights (FSDP) train as one does, and their checkpoints go on with any number."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.method_toys import method
from helpers.noise import Noise
from helpers.small import same
from helpers.team import SHAPES, compare, difference, fork, trainer
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stella.data.stream import Stream, StreamConfig
from stella.methods import METHODS
from stella.peers import ALONE, Peers
from stella.train import fsdp
from stella.train.checkpoint import Checkpoints
from stella.train.config import TrainConfig
from stella.train.device import Runtime
from stella.train.distributed import World
from stella.train.trainer import Trainer

KINDS = ("method/model.norm.weight", "optimizer/state/0/exp_avg", "slow/model.norm.weight")
ODD = [f"{name}:{clips}" for name in ("er", "stella", "mir", "lump", "gmed") for clips in (3, 5, 7)]


@pytest.mark.parametrize(
    ("count", "steps", "cases"),
    [
        (2, 3, ["cls_er", "gmed"]),
        pytest.param(2, 20, [*METHODS, *ODD], marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(4, 20, [*METHODS, *ODD], marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_divided_weights_train_as_whole_ones_do(count: int, steps: int, cases: list[str]) -> None:
    """Teachers, virtual steps, batches that do not divide and that are smaller than the processes are many."""
    for case, found in compare(count, steps, cases, shard=True).items():
        assert found["losses"] < 1e-12 and found["gradients"] < 1e-12 and found["weights"] < 1e-8, (case, found)
        assert found.get("memory", 0) < 1e-3 and found.get("ids", 0) == 0, (case, found)  # columns in half precision


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_batches_a_step_and_slow_weights() -> None:
    for case, found in compare(2, 8, ["gmed", "cls_er", "stella"], accumulate=3, ema=0.9, shard=True).items():
        assert found["losses"] < 1e-12 and found["weights"] < 1e-8 and found["slow"] < 1e-8, (case, found)


def test_the_comparison_sees_gradients_that_are_not_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one block's gradients are those of half the batch."""

    def careless(root: Any, place: Any, divide: Any = fsdp.divide) -> None:
        divide(root, place)
        block = root.method.model.blocks_a[0]
        block.set_requires_gradient_sync(False)

    monkeypatch.setattr(fsdp, "divide", careless)
    with pytest.raises(AssertionError):  # or no gradient at all
        found = compare(2, 2, ["finetune"], shard=True)["finetune"]
        assert found["gradients"] < 1e-3 and found["weights"] < 1e-3, found


def state_of(one: Trainer) -> dict[str, Any]:
    return {"trainer": one.state_dict()}


def weights_of(one: Trainer) -> list[Tensor]:
    models = [one.method.model] if one.slow is None else [one.method.model, one.slow.model]
    return [p.detach().clone() for model in models for p in one.plain(model).parameters()]


def stepped(one: Trainer, steps: int) -> Trainer:
    for _ in range(steps):
        assert one.advance()
    return one


def going_on(folder: Path, peers: Peers = ALONE, **train: Any) -> list[Tensor]:
    """The weights a step after the checkpoint."""
    one = trainer("er", 12, peers, ema=0.9, **train)
    loaded = Checkpoints(folder, peers=peers).load()
    assert loaded is not None
    one.load_state_dict(loaded["trainer"])
    return weights_of(stepped(one, 1))


@pytest.mark.parametrize("others", [(), pytest.param((3, 4), marks=pytest.mark.slow)])
def test_a_checkpoint_of_shards_goes_on_with_any_number(others: tuple[int, ...], tmp_path: Path) -> None:
    """Written while one more step was taken; to the last bit with as many processes, else to rounding."""

    def two(world: World) -> dict[str, Any]:
        one = stepped(trainer("er", 12, world, ema=0.9, shard=True), 2)
        own = next(p for p in one.method.model.blocks_v.parameters())
        kept = isinstance(own, DTensor) and own.to_local().numel() == own.numel() // 2
        moments = next(iter(one.optimizer.state.values()))["exp_avg"]
        checkpoints = Checkpoints(tmp_path / "two", peers=world)
        checkpoints.begin(2, state_of(one))
        after = weights_of(stepped(one, 1))
        assert checkpoints.finished(wait=True)
        exact = same(going_on(tmp_path / "two", world, shard=True), after)
        plain = difference(going_on(tmp_path / "two", world), after)
        from_one = difference(going_on(tmp_path / "one", world, shard=True), after)
        return {"divided": [kept, isinstance(moments, DTensor), exact], "differences": [plain, from_one]}

    alone = stepped(trainer("er", 12, ema=0.9), 2)
    Checkpoints(tmp_path / "one").save(2, state_of(alone))
    expected = weights_of(stepped(alone, 1))
    for found in fork(2, two):
        assert all(found["divided"]) and max(found["differences"]) < 1e-8, found
    [path] = (tmp_path / "two").iterdir()
    known = FileSystemReader(path).read_metadata().state_dict_metadata
    assert [len(known[f"state/trainer/{kind}"].chunks) for kind in KINDS] == [2, 2, 2]  # type: ignore[union-attr]
    assert difference(going_on(tmp_path / "two"), expected) < 1e-8
    for count in others:
        found = fork(count, lambda world: difference(going_on(tmp_path / "two", world, shard=True), expected))
        assert max(found) < 1e-8


def test_a_step_that_is_not_finite_in_one_shard_is_skipped_by_all() -> None:
    def work(world: World) -> list[bool]:
        one = stepped(trainer("er", 12, world, shard=True), 1)
        before = weights_of(one), one.method.memory and one.method.memory.ids.clone()

        def poison() -> None:
            if world.rank == 1:
                gradient = next(p.grad for p in one.method.parameters() if p.grad is not None)
                assert isinstance(gradient, DTensor)
                gradient.to_local()[-1] = torch.inf

        one.method.before_step = poison  # type: ignore[method-assign]
        stepped(one, 1).settle()
        divided = all(isinstance(p, DTensor) for p in one.method.parameters())  # also after a pass
        after = weights_of(one), one.method.memory and one.method.memory.ids.clone()
        del one.method.before_step
        moved = not same(weights_of(stepped(one, 1)), after[0])
        model = one.method.model
        blocks = [*model.blocks_a, *model.blocks_v, *model.blocks_u, *model.decoder_blocks]
        one_by_one = all(isinstance(block, FSDPModule) for block in blocks)
        return [one.counters.skipped == 1, same(before, after), moved, divided, one_by_one]

    assert all(map(all, fork(2, work)))


@pytest.mark.slow
def test_blocks_compute_in_half_precision_and_the_rest_is_kept_in_float32() -> None:
    """As a GPU does by default; the first loss is DDP's under autocast, the others are so but for norms' weights."""

    def work(world: World) -> dict[str, Any]:
        place, losses, seen = Runtime(torch.device("cpu"), torch.bfloat16), {}, set()
        for shard in (False, True):
            stream = Stream([("one", Noise(1, 18))], StreamConfig(batch_size=6, **SHAPES), "cpu", None, world)
            one = Trainer(method("initial"), stream, TrainConfig(lr=1e-3, shard=shard), place, world)
            if shard:
                linear = one.method.model.blocks_u[0].mlp.fc1
                linear.register_forward_pre_hook(lambda m, _: seen.add(m.weight.dtype))
            losses[shard] = [one.meter.read()["loss"] for _ in range(3) if one.advance()]
        kept = {p.dtype for p in one.method.parameters()} | {s["exp_avg"].dtype for s in one.optimizer.state.values()}
        return {"losses": losses, "kinds": [seen == {torch.bfloat16}, kept == {torch.float32}]}

    for found in fork(2, work):
        assert all(found["kinds"]) and found["losses"]["true"][0] == found["losses"]["false"][0]
        assert found["losses"]["true"] == pytest.approx(found["losses"]["false"], rel=1e-3)

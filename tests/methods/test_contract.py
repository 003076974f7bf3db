"""What every method of the registry promises, and with them the example of docs/methods.md.

A new method needs no line here. First on scenes, through stream and trainer; then on toys, step by step.
"""

import copy
import dataclasses
import inspect
import io
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers.example import DOCS, EXAMPLE, EXAMPLE_NAME, example
from helpers.method_scenes import Told, advance, held_out, scenes, scenes_trainer
from helpers.method_toys import ALL_ENTER, TOY, assert_same_weights, batch, batches, method, step, train, trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path

from stella.clip import Batch
from stella.columns import ID, bytes_per_clip
from stella.methods import METHODS, Losses, MemoryConfig, Method, ObjectiveConfig, build
from stella.methods.er import ER
from stella.model.cav import CAV
from stella.report.methods import hyper_parameters

every = pytest.mark.parametrize("name", [*METHODS, EXAMPLE_NAME])
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", autouse=True)
def _example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example as an entry of the registry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, EXAMPLE_NAME, example(tmp_path_factory.mktemp("example")))
        yield


# ---- what it says of itself


@every
def test_says_what_it_is(name: str) -> None:
    cls = METHODS[name]
    assert issubclass(cls, Method) and not inspect.isabstract(cls)
    for said in (cls.title, cls.summary, cls.citation, cls.cost):
        assert said and "\n" not in said
    assert [other.title for other in METHODS.values()].count(cls.title) == 1
    assert dataclasses.is_dataclass(cls.Config) and cls.Config() == cls.Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls.Config().anything = 1


def test_the_order_is_the_papers() -> None:
    paper = ["Finetune", "ER", "MIR", "DER++", "GMED", "CLS-ER", "LUMP", "ESMER", "STELLA", "STELLA+", "Multitask"]
    assert [cls.title for cls in METHODS.values() if cls.title in paper] == paper


def test_the_documentation_tells_of_them_as_they_are() -> None:
    table = DOCS.partition("## The methods")[2].partition("## A new one")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) >= 14
    for name, title, parameters, citation in rows:
        cls = METHODS[name.strip("`")]
        told = ", ".join(f"{field}={default}" for field, default, _, _ in hyper_parameters(cls.Config)) or "–"
        assert [title, parameters, citation] == [cls.title, told, cls.citation]
    assert len(EXAMPLE.splitlines()) < 60


@pytest.mark.slow
def test_a_new_method_needs_no_change_of_other_tests() -> None:
    """All others that go through the registry, run with the example in it: recipes, curves, runs, commands, pages."""
    here = Path(__file__).parent
    places = [here.parent / place for place in ("experiments/test_recipes.py", "cli", "report", "runs", "train")]
    chosen = ["-k", f"{EXAMPLE_NAME} or methods or main_comparison", "-m", "not slow"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "helpers.example", "-p", "no:cacheprovider", *map(str, places), *chosen],
        env=os.environ | {"PYTHONPATH": str(here.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


# ---- on scenes

HALF = 6  # steps, in the middle of an epoch and of the first task


@dataclasses.dataclass
class Trained:
    name: str
    parts: list[dict[str, float]]
    half: bytes  # a checkpoint
    end: dict[str, Any]  # the last state
    before: float  # held-out clips' reconstruction
    after: float


@pytest.fixture(scope="module", params=[*METHODS, EXAMPLE_NAME])
def trained(request: pytest.FixtureRequest, _example: None) -> Trained:
    """A method's run. pytest groups the tests of one method, so that each trains once."""
    one = scenes_trainer(request.param)
    before = held_out(one.method)
    parts = advance(one, HALF)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    parts += advance(one)
    return Trained(request.param, parts, file.getvalue(), one.state_dict(), before, held_out(one.method))


def test_learns(trained: Trained) -> None:
    """What all objectives have in common falls while training, and with it the whole; reconstruction also on clips
    that were never seen."""
    assert len(trained.parts) == 16
    if trained.name == "matching":  # it trains no backbone
        assert trained.after == trained.before and all(parts["loss"] == parts["avm"] for parts in trained.parts)
        return
    for names, share in ((["recon_a", "recon_v"], 0.95), (["contrastive"], 0.9), (["loss"], 0.95)):
        found = [sum(parts[each] for each in names) for parts in trained.parts]
        first = found[:1] if trained.name == "esmer" else found[:4]  # then it weighs clips less until μ has grown
        assert fmean(found[-4:]) < share * fmean(first), names
    assert trained.after < 0.99 * trained.before  # moving averages are slow


def test_goes_on_exactly_from_a_checkpoint(trained: Trained) -> None:
    """Weights, moving averages, optimiser, memory and generators: nothing else carries over to the next step."""
    other = scenes_trainer(trained.name, seed=9)
    other.load_state_dict(torch.load(io.BytesIO(trained.half), weights_only=True))
    assert advance(other) == trained.parts[HALF:]
    assert_equal(other.state_dict(), trained.end)


def test_never_sees_a_task(trained: Trained) -> None:
    """Names and labels permuted and renamed: no bit changes. (A batch has no field for them.)"""
    assert [field.name for field in dataclasses.fields(Batch)] == ["video", "audio", "ids"]
    lies = [("task2", Told(scenes("task1", 22), "bells")), ("task1", Told(scenes("task2", 23), "task1"))]
    other = scenes_trainer(trained.name, lies)
    assert advance(other, HALF) == trained.parts[:HALF]
    ours, theirs = other.state_dict(), torch.load(io.BytesIO(trained.half), weights_only=True)
    for what in ("method", "memory", "optimizer", "generators"):
        assert_equal(ours[what], theirs[what])


def assert_equal(ours: Any, theirs: Any) -> None:
    """Trees, to the last bit."""
    a, b = dict(tree_flatten_with_path(ours)[0]), dict(tree_flatten_with_path(theirs)[0])
    assert a.keys() == b.keys()
    for path, leaf in a.items():
        assert torch.equal(leaf, b[path]) if isinstance(leaf, Tensor) else leaf == b[path], path


# ---- on toys


@pytest.mark.parametrize("clips", [0, 4])
@every
def test_works_with_any_batch_and_any_filling(name: str, clips: int) -> None:
    """Empty, part-full, full; batches smaller and larger than the memory, and of one clip: always the same parts."""
    one = method(name, clips=clips, **ALL_ENTER.get(name, {}))
    found = train(one, [1, 2, 6, 3, 1, 7])
    for parts in found:
        assert list(parts) == list(found[0])
        assert all(math.isfinite(part) for part in parts.values())
    if one.memory is not None:
        assert (len(one.memory), one.memory.seen) == (clips, 20)


@every
def test_stores_what_it_says(name: str) -> None:
    """Columns, bytes, and the clips themselves, each in one row with all that belongs to it."""
    one = method(name, clips=20)
    declared = one.columns(TOY, one.config)
    if declared is None or one.memory is None:
        assert declared is None and one.memory is None
        return
    clips = batch(6)
    losses = one.loss(clips)
    one.after_batch(clips, losses)
    rows = one.memory.state_dict()["rows"]
    assert {key: (r.dtype, r.shape[1:]) for key, r in rows.items()} == {
        key: (column.dtype, column.shape) for key, column in (ID | declared).items()
    }
    assert sum(r.nbytes for r in rows.values()) == 6 * bytes_per_clip(declared)
    assert sorted(rows["id"].tolist()) == clips.ids.tolist()
    for key in declared:
        assert torch.equal(rows[key], losses.rows[key][rows["id"]].to(rows[key].dtype)), key
    video, audio = clips.video[rows["id"]], clips.audio[rows["id"]].half()
    if "video" in rows:
        assert torch.equal(rows["video"], video) and torch.equal(rows["audio"], audio)
    else:  # parts of clips, with their places
        for kept, whole in (("v", one.model.patches_v(video)), ("a", one.model.patches_a(audio))):
            chosen = whole.take(rows[f"positions_{kept}"].long())
            assert torch.equal(rows[f"patches_{kept}"], chosen.values.to(rows[f"patches_{kept}"].dtype))


@every
def test_a_skipped_step_changes_nothing(name: str) -> None:
    one = method(name, clips=7, **ALL_ENTER.get(name, {}))
    train(one, [4, 4])
    before, loop = copy.deepcopy(state(one)), trainer(one)
    bad = dataclasses.replace(batch(4, 8), audio=torch.full_like(batch(4, 8).audio, torch.nan))
    for _ in range(10):  # slow weights move at random
        assert not loop.compute([bad]).all()
    assert_equal(state(one), before)
    assert not loop.optimizer.state or all(s["step"] == 0 for s in loop.optimizer.state.values())
    step(loop, batch(4, 8))
    if one.memory is not None:
        assert one.memory.seen == before["seen"] + 4


class Counting(ER):
    title = "Counting"
    seen: Tensor
    taken: Tensor

    def setup(self) -> None:
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("taken", torch.zeros(()))
        self.level = torch.nn.BatchNorm1d(1)

    def loss(self, batch: Batch) -> Losses:
        losses = super().loss(batch)
        self.seen += len(batch)
        self.level(losses.total.detach().expand(2, 1))
        return losses

    def after_step(self) -> None:
        self.taken += 1


def test_a_skipped_step_restores_buffers_wherever_they_were_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loss, after the step, and by a module of the method's own."""
    monkeypatch.setitem(METHODS, "counting", Counting)
    one = method("counting")
    step(loop := trainer(one), batch(4))
    before = copy.deepcopy(one.state_dict())
    assert (one.seen, one.taken, one.level.num_batches_tracked) == (4, 1, 1)
    assert not loop.compute([dataclasses.replace(batch(4), audio=torch.full_like(batch(4).audio, torch.nan))]).all()
    assert_equal(one.state_dict(), before)


def state(one: Method) -> dict[str, Any]:
    """All that steps change, the random generators apart."""
    memory = one.memory.state_dict() if one.memory is not None else {"rows": None, "seen": 0}
    return {"method": one.state_dict(), "rows": memory["rows"], "seen": memory["seen"]}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # said when oneDNN's switches are read
@every
def test_stays_finite_in_bfloat16(name: str) -> None:
    """With a black and silent clip among the others. oneDNN's products need instructions that not all CPUs have."""
    one = method(name, clips=6)
    adam = torch.optim.Adam([p for p in one.parameters() if p.requires_grad], lr=1e-3)
    one.attach(adam)
    with torch.backends.mkldnn.flags(enabled=False):
        for clips in batches([4, 4, 4, 2]):
            clips.video[0], clips.audio[0] = 0, 0.0
            with torch.autocast("cpu", torch.bfloat16):
                losses = one.loss(clips)
            adam.zero_grad()
            losses.total.backward()
            adam.step()
            one.after_batch(clips, losses)
            one.after_step()
            assert all(part.isfinite() for part in losses.parts.values())
    assert all(p.isfinite().all() for p in one.parameters())  # each step's gradients were finite, then
    if one.memory is not None:
        assert all(rows.isfinite().all() for rows in one.memory.state_dict()["rows"].values())


@every
def test_total_is_the_sum_of_its_parts_and_teaches_every_parameter(name: str) -> None:
    one = method(name)
    train(one, [6, 6])
    losses = one.loss(batch(6, 12))
    assert all(part.shape == () for part in losses.parts.values())
    torch.testing.assert_close(losses.total, sum(losses.parts.values()))
    one.zero_grad()
    losses.total.backward()
    silent = [n for n, p in one.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not silent
    assert not any(rows.requires_grad for rows in losses.rows.values())


@every
def test_the_seed_alone_decides_the_weights_not_ids_nor_the_global_generator(name: str) -> None:
    one, same, other = (method(name, seed=seed) for seed in (1, 1, 2))
    train(one, [4, 4])
    train(other, [4, 4])
    torch.manual_seed(99)
    state, loop = torch.get_rng_state(), trainer(same)
    for b in batches([4, 4]):
        step(loop, dataclasses.replace(b, ids=1000 - b.ids))
    assert torch.equal(state, torch.get_rng_state())
    part = "avm" if name == "matching" else "model"
    assert_same_weights(one, same, part)
    with pytest.raises(AssertionError):
        assert_same_weights(one, other, part)


class NoWaiting(TorchDispatchMode):
    """Fails on what makes the host wait for values of a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@every
def test_loss_reads_no_value(name: str) -> None:
    one = method(name)
    train(one, [4, 4])
    with NoWaiting():
        one.loss(batch(4, 8))


@cuda
@pytest.mark.parametrize("where", ["cpu", "model"])
@every
def test_never_waits_for_the_gpu(name: str, where: Any) -> None:
    torch.manual_seed(0)
    memory = MemoryConfig(clips=10, device=where)
    one = build(name, CAV(TOY).cuda(), ALL_ENTER.get(name, {}), ObjectiveConfig(), memory, 0)
    one.attach(torch.optim.Adam([p for p in one.parameters() if p.requires_grad], lr=torch.tensor(1e-3).cuda()))
    for b in batches([4, 4, 4, 4]):
        there = b.to("cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                losses = one.loss(there)
            losses.total.backward()
            if where == "model":
                one.after_batch(there, losses)
                one.after_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if where == "cpu":
            one.after_batch(there, losses)
            one.after_step()
        assert losses.total.isfinite()
    if one.memory is not None:
        assert len(one.memory) == 10

"""Which steps are recorded; on a GPU, replayed and compiled ones are the steps of the plain loop, for every method."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.small import Noise, noise_tasks, quick, use_tasks
from rich.console import Console

from stella import selection
from stella.data.stream import Stream
from stella.fast.graphs import records
from stella.fast.parts import applied
from stella.files import read_json
from stella.methods import METHODS
from stella.peers import ALONE, Peers
from stella.runs.build import build_method
from stella.runs.config import settle
from stella.runs.loop import pretrain
from stella.train import trainer
from stella.train.config import TrainConfig
from stella.train.device import runtime
from stella.train.distributed import World
from stella.train.trainer import Trainer

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("device", "memory", "divided", "processes", "why"),
    [
        ("cuda", "cuda", False, 64, ""),
        ("cuda", "cuda", True, 8, "weights that processes divide"),
        ("cuda", "cuda", False, 65, "more than 64 processes"),
        ("cuda", "cpu", False, 1, "the rehearsal memory is not on the GPU"),
        ("cpu", "cpu", True, 2, ""),
    ],
)
def test_what_is_not_recorded_says_why(device: str, memory: str, divided: bool, processes: int, why: str) -> None:
    found, remark = records(device, memory, divided, processes)
    assert found is (device == "cuda" and not why) and why in remark and bool(why) == bool(remark)


@pytest.mark.parametrize(("count", "recorded"), [(64, True), (65, False)])
def test_a_trainer_counts_its_processes(count: int, recorded: bool) -> None:
    config, device = TrainConfig(), SimpleNamespace(device=torch.device("cuda"))
    one = SimpleNamespace(method=SimpleNamespace(memory=None), runtime=device, config=config)
    peers = SimpleNamespace(alone=False, count=count, neighbours=8)
    assert Trainer._records(one, peers)[0] is recorded  # type: ignore[arg-type]


def test_a_run_says_it_and_notes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU no step is recorded anyway: the sentence is put into its mouth. Without train.graph it is not said."""
    monkeypatch.setattr(trainer, "records", lambda *_: (False, "steps are not recorded"))
    use_tasks(monkeypatch, noise_tasks(("one",)))
    for graph, times in (("true", 1), ("false", 0)):
        said, run = io.StringIO(), tmp_path / graph
        pretrain(quick("finetune", f"train.graph={graph}"), run, console=Console(file=said))
        assert said.getvalue().count("steps are not recorded") == times
        assert read_json(run / "notes.json")["speed"] == ["steps are not recorded"] * times


def trained(
    name: str,
    *more: str,
    graph: bool,
    compile: str = "off",
    precision: str = "float32",
    clips: int = 40,
    peers: Peers = ALONE,
) -> Trainer:
    """Short last batches, a memory that is filled on the way, more than one shape."""
    settings = f"train.graph={str(graph).lower()}", f"train.compile={compile}", f"train.precision={precision}"
    config = settle(quick(name, *settings, "model.preset=tiny", "train.device=cuda", "memory.clips=9", *more))
    config = replace(config, stream=replace(config.stream, epochs=5))
    machine = runtime("cuda", config.train.precision, config.train.compile)
    tasks = [("one", Noise(0, clips)), ("two", Noise(1, clips + 1))]
    stream = Stream(tasks, config.stream, machine.device, None, peers)
    trainer = Trainer(build_method(config, machine.device), stream, config.train, machine, peers)
    while trainer.advance():
        pass
    trainer.settle()
    return trainer


@cuda
@pytest.mark.parametrize("more", [(), ("memory.codec=dct",)], ids=["", "codec"])
@pytest.mark.parametrize("name", METHODS)
def test_replayed_steps_are_the_same_steps(name: str, more: tuple[str, ...]) -> None:
    if more and name == "gmed":
        return  # refused
    same(trained(name, *more, graph=False), trained(name, *more, graph=True))


@pytest.fixture
def world() -> Iterator[World]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield World()
    dist.destroy_process_group()


@cuda
@pytest.mark.parametrize("case", [*METHODS, "stella train.accumulate=2"])
def test_steps_of_processes_are_recorded_and_the_same(case: str, world: World) -> None:
    """With DDP and all that travels: here, from a process to itself."""
    name, *more = case.split()
    same(trained(name, *more, graph=False), trained(name, *more, graph=True, peers=world))


def same(plain: Trainer, replayed: Trainer) -> None:
    assert replayed._graphs and replayed._graphs._recorded, "no step was recorded"
    one, other = plain.state_dict(), replayed.state_dict()
    for key, value in one["method"].items():
        torch.testing.assert_close(other["method"][key], value, rtol=1e-3, atol=1e-4, msg=key)
    assert one["counters"] == other["counters"]
    assert all(torch.equal(one["generators"][g], other["generators"][g]) for g in one["generators"])
    if plain.method.memory is not None:
        assert torch.equal(one["memory"]["rows"]["id"], other["memory"]["rows"]["id"])
        assert one["memory"]["seen"] == other["memory"]["seen"] == replayed.method.memory.seen


@cuda
@pytest.mark.parametrize("name", ["derpp", "stella", "stella_plus"])
def test_a_step_that_is_not_finite_is_left_out_of_a_replay(name: str) -> None:
    trainer = trained(name, graph=True, clips=12)
    before = [p.detach().clone() for p in trainer.method.parameters()]
    seen = trainer.method.memory.seen
    assert trainer._graphs
    recorded = next(iter(trainer._graphs._recorded.values()))
    batch = recorded.batches[0]
    batch.audio.fill_(torch.nan)
    recorded.graph.replay()
    torch.cuda.synchronize()
    assert not recorded.out.all()
    assert all(torch.equal(p, q) for p, q in zip(trainer.method.parameters(), before, strict=True))
    assert trainer.method.memory.seen == seen


@cuda
@pytest.mark.parametrize("name", METHODS)
def test_half_precision_stays_finite(name: str) -> None:
    trainer = trained(name, graph=True, precision="bfloat16", clips=20)
    assert trainer.counters.skipped == 0
    assert all(p.isfinite().all() for p in trainer.method.parameters())


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys", "dim"), [(512, 784, 64), (144, 128, 32), (7, 5, 16)])
def test_importance_without_the_map_is_importance(dtype: torch.dtype, queries: int, keys: int, dim: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(3, queries, 4, dim, device="cuda").to(dtype).transpose(1, 2)
    k = torch.randn(3, keys, 4, dim, device="cuda").to(dtype).transpose(1, 2)
    with applied():
        ours = selection.importance(q, k, 0.2)
    naive = selection.importance(q.double().cpu(), k.double().cpu(), 0.2)
    torch.testing.assert_close(ours.double().cpu(), naive, rtol=1e-4, atol=1e-9)

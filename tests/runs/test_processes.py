"""Runs of several processes: as those of one, killed and resumed, on another number."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers import ranks
from helpers.disk import fill, own_disk, small_disk
from helpers.small import noise_tasks, outcome, quick, same, use_tasks
from helpers.team_runs import End, content, losses, run
from safetensors.torch import load_file

from stella.clip import Batch
from stella.errors import StellaError
from stella.files import read_lines
from stella.methods.base import Losses
from stella.methods.finetune import Finetune
from stella.runs.loop import pretrain
from stella.train.device import Later


def test_a_run_changes_hands(tmp_path: Path) -> None:
    """Alone to the end; or alone, then in two processes of which one is killed, then in two that divide the weights."""
    one, turns = tmp_path / "one", tmp_path / "turns"
    assert run(one, 1, "er", 1) == [0]
    assert run(turns, 1, "er", 1, {0: End()}) == [9]
    statuses = run(turns, 2, "er", 1, {random.randrange(2): End()})
    assert sorted(statuses) == [9, 2 << 8], (tmp_path / "output").read_text()
    assert "another process of this run is gone" in (tmp_path / "output").read_text()
    assert [path.suffix for path in sorted((turns / "checkpoints").iterdir())] == [".pt", ".dcp"]
    assert run(turns, 2, "er", 1, None, "train.shard=true") == [0, 0]
    assert same(content(turns), content(one))
    assert losses(turns) == pytest.approx(losses(one), rel=1e-4)
    ours, theirs = (load_file(run / "model.safetensors") for run in (turns, one))
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-3) for name in theirs)  # three steps of 1e-3


def test_an_error_of_one_process_ends_all_with_its_sentence(tmp_path: Path) -> None:
    error = StellaError("the second one cannot go on; repair it")
    assert run(tmp_path / "run", 2, "er", 1, {1: End(by=error)}) == [2 << 8, 2 << 8]
    told = (tmp_path / "output").read_text()
    assert "1: StellaError('the second one cannot go on; repair it')" in told
    assert "0: Elsewhere(2)" in told and "another process" not in told


def test_a_stop_of_several_says_how_they_go_on(tmp_path: Path) -> None:
    assert run(tmp_path / "run", 2, "er", 1, {1: End(by=signal.SIGTERM)}) == [3 << 8, 3 << 8]
    told = " ".join((tmp_path / "output").read_text().split())
    assert f"--resume {tmp_path / 'run'}, with torchrun in front as before, for 2 processes" in told


def test_processes_stop_together_where_steps_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one learns of it last, as the host of another GPU may."""
    plain, calls = Finetune.loss, 0

    def loss(self: Finetune, batch: Batch) -> Losses:
        nonlocal calls
        calls += 1
        made = plain(self, batch)
        return made if calls < 3 else Losses({name: part * torch.nan for name, part in made.parts.items()})

    monkeypatch.setattr(Finetune, "loss", loss)
    monkeypatch.setattr(Later, "known", property(lambda _: os.environ["RANK"] == "0"))
    more = ("stream.epochs=9", "train.log_every=100", "train.checkpoint_minutes=9", "train.patience_minutes=0.2")
    assert run(tmp_path / "run", 2, "finetune", 1, None, *more) == [2 << 8, 2 << 8]
    told = " ".join((tmp_path / "output").read_text().split())
    assert told.count("10 steps in a row up to step 12 were not finite") == 1 and "another process" not in told
    assert [path.suffix for path in (tmp_path / "run" / "checkpoints").iterdir()] == [".dcp"]


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["false", "true"])
def test_a_full_disk_ends_all_with_a_sentence(shard: str, tmp_path: Path) -> None:
    how = f"train.shard={shard}"
    assert run(tmp_path / "run", 2, "er", 1, dict.fromkeys(range(2), End()), how) == [9, 9]
    with small_disk(20_000):
        assert run(tmp_path / "run", 2, "er", 1, None, how) == [2 << 8, 2 << 8]
    told = (tmp_path / "output").read_text()
    assert told.count("cannot be written") == 1 and "free some space" in told and "Elsewhere(2)" in told, told
    assert [path.suffix for path in (tmp_path / "run" / "checkpoints").iterdir()] == [".dcp"]
    assert run(tmp_path / "run", 2, "er", 1, None, how) == [0, 0]


@pytest.mark.slow
def test_a_disk_without_room_is_told_as_such(tmp_path: Path) -> None:
    """torch tells of an unexpected position in its file."""
    with own_disk(tmp_path / "disk", 64) as disk:
        assert run(disk / "run", 2, "er", 1, dict.fromkeys(range(2), End())) == [9, 9]
        os.truncate(full := fill(disk), full.stat().st_size - 300_000)
        assert run(disk / "run", 2, "er", 1) == [2 << 8, 2 << 8]
        full.unlink()
        told = (disk / "output").read_text()
        assert run(disk / "run", 2, "er", 1) == [0, 0]
    assert "unexpected pos" not in told, told
    assert re.search(r"cannot be written to .* \((No space left on device|the disk is probably full: .* free)\)", told)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("method", "shard"), [("stella", "false"), ("stella", "true"), ("gmed", "true"), ("chorus", "false")]
)
def test_a_run_of_several_is_that_of_one(method: str, shard: str, tmp_path: Path) -> None:
    """In two, three or changing numbers of processes, which may divide the weights; and killed in two."""
    one, two, three, turns, killed = (tmp_path / name for name in ("one", "two", "three", "turns", "killed"))
    how, divided = f"train.shard={shard}", "train.shard=true"
    assert run(one, 1, method, 2) == [0]
    assert run(two, 2, method, 2, None, how) == [0, 0]
    assert run(three, 3, method, 2, None, how) == [0, 0, 0]
    for count, setting in ((1, divided), (2, how), (3, divided), (2, "train.shard=false")):
        assert run(turns, count, method, 2, dict.fromkeys(range(count), End()), setting) == [9] * count
    assert run(turns, 1, method, 2) == [0]
    for other in (two, three, turns):
        assert same(content(other), content(one))
        assert losses(other) == pytest.approx(losses(one), rel=1e-4)
    for rank in range(2):
        assert sorted(run(killed, 2, method, 2, {rank: End()}, how)) == [9, 2 << 8]
    told = {1: End(by=signal.SIGTERM)}  # one is told to stop: both do
    assert run(killed, 2, method, 2, told, how) == [3 << 8, 3 << 8]
    assert run(killed, 2, method, 2, None, how) == [0, 0]
    assert same(outcome(killed), outcome(two))


def test_a_job_of_torchrun_goes_on_without_being_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another job, torchrun without a name, or no torchrun must say --resume."""
    use_tasks(monkeypatch, noise_tasks(("one",)))
    run, config = tmp_path / "run", quick("finetune")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert pretrain(config, run).finished and pretrain(config, run).finished
    assert starts(run) == [(0, 1)]
    for other in ("two", "none", None):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", other) if other else monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        with pytest.raises(StellaError, match="holds a finished run"):
            pretrain(config, run)


def test_what_torchrun_starts_again_finds_the_folder_that_it_took(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_tasks(monkeypatch, noise_tasks(("one",)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    taken = [pretrain(quick("finetune")).run for _ in range(2)]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    taken.append(pretrain(quick("finetune")).run)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    taken.append(pretrain(quick("finetune")).run)
    assert [run.name for run in taken] == ["pretrain", "pretrain", "pretrain-2", "pretrain-2"]


LONG = "stream.epochs=15"


def torchrun(
    folder: Path, restarts: int = 3, more: tuple[str, ...] = ("2",), shutdown: int = 3
) -> "subprocess.Popen[str]":
    where = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    where += ["--shutdown-timeout", str(shutdown)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", *where, ranks.__file__, str(folder), "stella", *more]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: "subprocess.Popen[str]") -> str:
    said, _ = process.communicate(timeout=250)
    assert process.returncode == 0, said
    return said


def signalled(folder: Path, rank: int, wait: float, number: signal.Signals) -> None:
    """Send a signal to a process of a run, so long after its first step."""
    for _ in range(2000):
        if any(line["kind"] == "checkpoint" for line in read_lines(folder / "speed.jsonl")):
            break
        time.sleep(0.1)
    time.sleep(wait)
    with suppress(ProcessLookupError):  # it has ended
        os.kill(int((folder.parent / f"{folder.name}.{rank}.pid").read_text()), number)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_torchrun_brings_a_run_back_after_each_of_twenty_kills(tmp_path: Path) -> None:
    draw = random.Random(5)
    said = ended(torchrun(tmp_path / "whole"))
    assert said.count("rehearsal memory") == 1  # one process speaks
    expected = outcome(tmp_path / "whole")
    starts = [line for line in read_lines(tmp_path / "whole" / "speed.jsonl") if line["kind"] == "start"]
    assert [(line["processes"], line["restarts"]) for line in starts] == [(2, 0)]
    times = [line["seconds"] for line in read_lines(tmp_path / "whole" / "speed.jsonl") if line["kind"] == "checkpoint"]
    restarted = 0
    for moment in range(20):
        folder = tmp_path / f"killed-{moment}"
        process = torchrun(folder)
        signalled(folder, draw.randrange(2), draw.uniform(0, 0.7 * sum(times)), signal.SIGKILL)
        ended(process)
        assert same(outcome(folder), expected), moment
        restarted += any(line.get("restarts") for line in read_lines(folder / "speed.jsonl"))
    assert restarted >= 10


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_who_is_left_tells_of_a_killed_process_before_torchrun_ends_it(rank: int, tmp_path: Path) -> None:
    process = torchrun(tmp_path / "run", 0, ("2", LONG), shutdown=30)
    signalled(tmp_path / "run", rank, 0.0, signal.SIGKILL)
    said, _ = process.communicate(timeout=250)
    assert process.returncode == 1 and said.count("error: another process of this run is gone") == 1, said


@pytest.mark.slow
def test_a_process_that_hangs_is_given_up(tmp_path: Path) -> None:
    """The others wait for `train.patience_minutes`; then torchrun starts all again."""
    folder = tmp_path / "hung"
    process = torchrun(folder, more=("2", LONG))
    signalled(folder, 1, 0.0, signal.SIGSTOP)
    assert "another process of this run is gone, or did not answer in time" in ended(process)
    assert [line["restarts"] for line in read_lines(folder / "speed.jsonl") if line["kind"] == "start"] == [0, 1]
    ended(torchrun(tmp_path / "whole", more=("2", LONG)))
    assert same(outcome(folder), outcome(tmp_path / "whole"))


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them, 10.77.0.1 and 10.77.0.2; needs root."""
    names = [f"stella{os.getpid()}{side}" for side in "ab"]
    if subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode:
        pytest.skip("needs the right to make network namespaces")
    ends = [f"st{os.getpid() % 10**8}{side}" for side in "ab"]
    commands = [["netns", "add", names[1]], ["link", "add", ends[0], "type", "veth", "peer", "name", ends[1]]]
    for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
        commands += [["link", "set", end, "netns", name], ["-n", name, "link", "set", "lo", "up"]]
        commands += [["-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end]]
        commands += [["-n", name, "link", "set", end, "up"]]
    try:
        for command in commands:
            subprocess.run(["ip", *command], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name])


def agent(machines: list[str], number: int, folder: Path) -> "subprocess.Popen[str]":
    """torchrun on a machine, with one process; the first keeps the rendezvous. One machine is enough."""
    where = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    where += ["--rdzv-endpoint", "10.77.0.1:29400", "--rdzv-id", "run", "--local-addr", f"10.77.0.{number + 1}"]
    where += ["--rdzv-conf", f"is_host={int(number == 0)},last_call_timeout=5"]
    listed = subprocess.run(["ip", "-n", machines[number], "-o", "link"], capture_output=True, text=True, check=True)
    [end] = [line.split(": ")[1].partition("@")[0] for line in listed.stdout.splitlines() if "LOOPBACK" not in line]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": end}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a torchrun that comes later never finds the others
    run = [sys.executable, "-m", "torch.distributed.run", *where, ranks.__file__, str(folder), "stella", "3", LONG]
    command = ["ip", "netns", "exec", machines[number], *run]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def starts(folder: Path) -> list[tuple[int, int]]:
    """Of each start of a run, its step and how many processes there were."""
    lines = [line for line in read_lines(folder / "speed.jsonl") if line["kind"] == "start"]
    return [(line["step"], line["processes"]) for line in lines]


def until(process: "subprocess.Popen[str]", folder: Path, count: int) -> None:
    """Wait for a start, and a checkpoint after it, with the torchrun of the first machine still there."""
    for _ in range(3000):
        lines = [line for line in read_lines(folder / "speed.jsonl") if line["kind"] in ("start", "checkpoint")]
        if len(starts(folder)) >= count and lines[-1]["kind"] == "checkpoint":
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError(f"no start {count} in time: {starts(folder)}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_machine_is_lost_and_comes_back(number: signal.Signals, machines: list[str], tmp_path: Path) -> None:
    """All its processes are killed, or hang, torchrun too. The other goes on alone; when it is back, with it."""
    folder, whole = tmp_path / "lost", tmp_path / "whole"
    first, second = (agent(machines, side, folder) for side in range(2))
    until(first, folder, 1)
    inside = subprocess.run(["ip", "netns", "pids", machines[1]], capture_output=True, text=True, check=True)
    for pid in inside.stdout.split():
        os.kill(int(pid), number)
    until(first, folder, 2)
    if number == signal.SIGKILL:
        second = agent(machines, 1, folder)
    else:
        for pid in inside.stdout.split():
            os.kill(int(pid), signal.SIGCONT)
    until(first, folder, 3)
    ended(first)
    ended(second)
    steps, counts = zip(*starts(folder), strict=True)
    assert counts == (2, 1, 2) and 0 == steps[0] < steps[1] < steps[2]
    ended(torchrun(whole, more=("3", LONG)))
    assert same(content(folder), content(whole))
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-4)

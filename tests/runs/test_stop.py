"""A stop is answered in time, whatever the run is doing, and the run goes on from there."""

import io
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.noise import Noise
from helpers.small import outcome, quick, same, use_tasks
from rich.console import Console

from stella.clip import Clip
from stella.data import chunk, workers
from stella.errors import StellaError, one_line
from stella.methods import METHODS
from stella.runs import loop, stop
from stella.runs.loop import pretrain, resume
from stella.train.checkpoint import Checkpoints

QUIET = Console(file=io.StringIO())


class Files:
    """Clips that are read one by one, as from files; the given one asks for a stop and then hangs."""

    def __init__(self, seed: int, length: int, hanging: int | None = None) -> None:
        self.noise, self.hanging = Noise(seed, length), hanging

    def __len__(self) -> int:
        return len(self.noise)

    def __getitem__(self, index: int) -> Clip:
        if index == self.hanging:
            hang()
        return self.noise[index]


def hang(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "PATIENCE", 0.3)


def tasks(hanging: int | None = None) -> list[tuple[str, Any]]:
    return [("one", Files(0, 10)), ("two", Files(1, 23, hanging))]


def stopped(run: Path) -> None:
    began = time.monotonic()
    result = pretrain(quick("er", "stream.shuffle=false"), run, console=QUIET)
    assert (result.finished, result.exit_code) == (False, 143) and time.monotonic() - began < 50  # (of 100)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("hanging, steps", [(18, 6), (0, 3)])  # (0: of the first batch after an evaluation)
def test_a_stop_does_not_wait_for_a_file_that_hangs(
    hanging: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is of the moment, not of the last task."""
    use_tasks(monkeypatch, tasks())
    pretrain(quick("er", "stream.shuffle=false"), tmp_path / "whole", console=QUIET)
    use_tasks(monkeypatch, tasks(hanging))
    stopped(tmp_path / "run")
    state = Checkpoints(tmp_path / "run" / "checkpoints").load()
    assert state is not None and state["trainer"]["counters"]["step"] == steps
    use_tasks(monkeypatch, tasks())
    assert resume(tmp_path / "run", console=QUIET).finished
    assert same(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("place", ["a step", "a start"])
def test_a_stop_does_not_wait_for_work_that_hangs(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tasks(monkeypatch)
    with monkeypatch.context() as patch:
        owner, name = (METHODS["er"], "loss") if place == "a step" else (loop, "build_method")
        patch.setattr(owner, name, hang)
        stopped(tmp_path / "run")
    again = (lambda: resume(tmp_path / "run", console=QUIET)) if place == "a step" else None
    assert (
        again() if again else pretrain(quick("er", "stream.shuffle=false"), tmp_path / "run", console=QUIET)
    ).finished


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("error", [StellaError("a worker process could not start"), EOFError(), BrokenPipeError()])
def test_workers_that_end_by_the_same_signal_are_part_of_the_stop(
    error: Exception, training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal sends a signal to all processes: a pool that starts then fails in any way, and no word of it."""
    use_tasks(monkeypatch, tasks(), tasks())
    plain, console = chunk.Pool, Console(file=io.StringIO(), width=200)

    def fail(maker: Any, *more: Any) -> Any:
        if getattr(maker, "augment", None) is not training:
            return plain(maker, *more)
        with suppress(stop.Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
        raise error

    monkeypatch.setattr(chunk, "Pool", fail)
    monkeypatch.setattr(workers, "START_METHOD", "fork")
    result = pretrain(quick("er", "stream.workers=1", "data.cache=off"), tmp_path, console=console)
    assert (result.finished, result.exit_code) == (False, 143)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.splitlines()[-1].startswith("stopped by SIGTERM before the first checkpoint; resume with")
    assert one_line(error) not in said


def test_what_is_being_written_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "PATIENCE", 0.1)
    use_tasks(monkeypatch)
    plain = Checkpoints._write

    def slow(self: Checkpoints, *args: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            time.sleep(0.01)
        return plain(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_write", slow)
        stopped(tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").load() is not None


def test_a_context_in_another_leaves_it_as_it_was() -> None:
    with stop.Stop() as own:
        with pytest.raises(stop.Stopped), own.at_once():
            with own.at_once():
                pass
            os.kill(os.getpid(), signal.SIGTERM)
        assert not own._at_once


def test_workers_are_left_alone_by_a_run_that_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end, as one that waits for a dead disk, is not waited for."""
    monkeypatch.setattr(workers, "START_METHOD", "fork")
    pool = workers.Pool(_nothing, 2, 1, 10)
    joined: list[float | None] = []
    monkeypatch.setattr(type(pool._workers[0].process), "join", lambda self, timeout=None: joined.append(timeout))
    pool.close()
    assert joined == [5, 5]


def _nothing(job: Any, tick: Any) -> None:
    pass

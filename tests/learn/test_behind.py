"""States that are written while the next round trains."""

import errno
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.learning import SHARE, config_for, packed, quiet, state
from helpers.small import same

from stella.errors import StellaError
from stella.learn.behind import Behind
from stella.learn.examine import Examiner
from stella.learn.home import Home
from stella.learn.loop import Watch, learn
from stella.learn.round import Learner
from stella.runs.stop import Stop, Stopped
from stella.train.checkpoint import Checkpoints, copied

WAIT = 30.0


def test_the_next_round_trains_while_a_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first state is held back until the second round trains. All ends as it would otherwise."""
    sources = packed(tmp_path / "in", (12, 12))
    plain_save, plain_train = Checkpoints.save, Learner._train
    training, seen = threading.Event(), []

    def save(self: Checkpoints, step: int, given: Any) -> Path:
        if not seen:
            seen.append(training.wait(WAIT))
        return plain_save(self, step, given)

    def train(self: Learner, folder: Any, *more: Any) -> dict[str, float]:
        if folder.number == 2:
            assert Home(self.home.root).current == 0 and self.home.current == 1
            training.set()
        return plain_train(self, folder, *more)

    config = config_for(sources[0], method="derpp")
    learn(tmp_path / "plain", sources, config, SHARE, clips=12, console=quiet())
    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr(Learner, "_train", train)
    learn(tmp_path / "home", sources, config, SHARE, clips=12, console=quiet())
    assert seen == [True] and Home(tmp_path / "home").current == 2
    assert same(state(tmp_path / "home"), state(tmp_path / "plain"))


def test_a_round_is_told_when_it_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second state cannot be written twice. Nothing is told of it until it is."""
    sources, plain_use, tries = packed(tmp_path / "in", (12, 12, 12)), Home.use, []

    def use(self: Home, number: int) -> None:
        tries.append(number)
        if tries.count(2) in (1, 2) and number == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain_use(self, number)

    monkeypatch.setattr(Home, "use", use)
    monkeypatch.setattr("stella.learn.loop.PAUSE", 0.0)
    plain_say, in_use = Learner.say, []

    def say(self: Learner, line: str, style: str = "") -> None:
        if "learnt in" in line:
            in_use.append((line.split(":")[0], Home(self.home.root).current))
        plain_say(self, line, style)

    monkeypatch.setattr(Learner, "say", say)
    when = Watch(clips=12, every=0, settle=0, scan=0.01, idle=0)
    learn(tmp_path / "home", sources, config_for(sources[0]), SHARE, watch=when, console=quiet())
    assert tries == [1, 2, 2, 2, 3] and in_use == [("round 1", 1), ("round 2", 2), ("round 3", 3)]


def test_nothing_is_written_while_clips_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_save, plain_embed = Checkpoints.save, Examiner.embed
    writing, measuring, together = threading.Event(), threading.Event(), []

    def save(self: Checkpoints, step: int, given: Any) -> Path:
        writing.set()
        together.append(measuring.is_set())
        path = plain_save(self, step, given)
        writing.clear()
        return path

    def embed(self: Examiner, *given: Any) -> Any:
        measuring.set()
        together.append(writing.wait(0.5))  # it would begin by now
        found = plain_embed(self, *given)
        measuring.clear()
        return found

    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr(Examiner, "embed", embed)
    sources = packed(tmp_path / "in", (12, 12, 12))
    learn(tmp_path / "home", sources, config_for(sources[0]), SHARE, clips=12, console=quiet())
    assert Home(tmp_path / "home").current == 3
    assert together == [False] * 9  # three states, each measured before and after its round


def test_writing_begins_when_the_next_round_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_save, plain_advance = Checkpoints.save, Learner._advance
    written, seen = threading.Event(), []

    def save(self: Checkpoints, step: int, given: Any) -> Path:
        path = plain_save(self, step, given)
        written.set()
        return path

    def advance(self: Learner, *given: Any) -> bool:
        if self.home.next.number == 2 and not seen:
            seen.append(written.wait(WAIT / 2))
        return plain_advance(self, *given)

    monkeypatch.setattr("stella.learn.behind.PAUSE", 2 * WAIT)
    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr(Learner, "_advance", advance)
    sources = packed(tmp_path / "in", (12, 12))
    learn(tmp_path / "home", sources, config_for(sources[0]), SHARE, clips=12, console=quiet())
    assert seen == [True]


def test_a_pause_ends_with_go_with_wait_and_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    behind, done = Behind(), threading.Event()
    for goes_on in (behind.go, behind.wait):
        behind.pause()
        behind.do(done.set)
        assert not done.wait(0.2)
        goes_on()
        assert done.wait(WAIT)
        done.clear()
    monkeypatch.setattr("stella.learn.behind.PAUSE", 0.1)
    behind.pause()
    behind.do(done.set)
    assert done.wait(WAIT)


def test_after_a_failure_nothing_later_is_written(tmp_path: Path) -> None:
    behind, done = Behind(), []
    behind.do(lambda: done.append("one"))
    behind.wait()

    def fail() -> None:
        raise StellaError("the disk is full")

    behind.do(fail)
    behind.do(lambda: done.append("two"))
    with pytest.raises(StellaError, match="the disk is full"):
        behind.wait()
    assert done == ["one"]
    behind.wait()  # told once
    behind.do(lambda: done.append("three"))
    behind.wait()
    assert done == ["one", "three"]


def test_after_a_signal_in_a_wait_the_rest_is_waited_for() -> None:
    """The process holds its lock until all is written: whoever comes next would write the same round."""
    behind, goes_on, done = Behind(), threading.Event(), threading.Event()

    def slow() -> None:
        goes_on.wait(WAIT)
        done.set()

    behind.do(slow)
    with pytest.raises(Stopped), Stop() as stop, stop.at_once():
        threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGTERM]).start()
        behind.wait()
    assert not done.is_set()
    goes_on.set()
    behind.wait()
    assert done.is_set()


def test_a_copied_state_does_not_change_with_training() -> None:
    weight = torch.zeros(3)
    state = {"a": [weight, 1, "x", None], "b": {"c": (weight[1:],)}}
    found = copied(state)
    weight += 1
    assert same(found, {"a": [torch.zeros(3), 1, "x", None], "b": {"c": [torch.zeros(2)]}})

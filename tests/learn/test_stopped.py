"""A signal while a learner writes: what it has learnt is on the disk when it ends, however long that takes."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.learning import SHARE, config_for, packed, quiet, state
from helpers.small import same

from stella.learn import page
from stella.learn.home import Home
from stella.learn.loop import learn
from stella.learn.round import Learner
from stella.runs import stop
from stella.train.checkpoint import Checkpoints

PATIENCE = 0.1


@pytest.mark.parametrize("last", [False, True])
def test_a_signal_loses_no_step_if_saving_takes_longer_than_its_patience(
    last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in the second round, after its first step or in its last one, while the first state is being written."""
    sources, save, advance = packed(tmp_path / "in", (12, 12)), Checkpoints.save, Learner._advance
    learn(tmp_path / "plain", sources, config_for(sources[0]), SHARE, clips=12, console=quiet())

    def slow(*given: Any) -> Path:
        time.sleep(4 * PATIENCE)
        return save(*given)

    def signalled(self: Learner, plan: Any, trainer: Any, skipped: Any) -> bool:
        more = advance(self, plan, trainer, skipped)
        if self.home.next.number == 2 and last == (trainer.stream.finished_task is not None):
            signal.raise_signal(signal.SIGTERM)
        return more

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop, "PATIENCE", PATIENCE)
        patch.setattr(Checkpoints, "save", slow)
        patch.setattr(Learner, "_advance", signalled)
        patch.setattr(page, "write_page", lambda home: time.sleep(0.6))  # a signal is repeated by then
        done = learn(tmp_path / "home", sources, config_for(sources[0]), SHARE, clips=12, console=quiet())
    assert done.exit_code == 143
    home, steps = Home(tmp_path / "home"), [record["steps"] for record in Home(tmp_path / "plain").history()]
    saved = home.next.checkpoints.load()
    assert home.current == 1 and saved is not None and ("loss" in saved) == last
    assert saved["trainer"]["counters"]["step"] == (steps[1] if last else steps[0] + 1)
    learn(tmp_path / "home", sources, clips=12, console=quiet())
    assert same(state(tmp_path / "home"), state(tmp_path / "plain"))

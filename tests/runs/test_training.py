"""What every training says while it goes on."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stella.runs.training import Training


@pytest.mark.parametrize(("seconds", "more"), [([], ""), ([2.0], ""), ([90.0, 36.0], ", and 3 of evaluations")])
def test_the_time_left_is_told_once_at_the_rate_of_the_second_record(
    tmp_path: Path, seconds: list[float], more: str
) -> None:
    """The first record includes start-up. Evaluations come on top: here five more, one of which is due."""
    speed = tmp_path / "speed.jsonl"
    speed.write_text("".join(json.dumps({"kind": "evaluation", "seconds": each}) + "\n" for each in seconds))
    said: list[str] = []
    counters = SimpleNamespace(step=100)
    run: Any = SimpleNamespace(
        _rates=0,
        trainer=SimpleNamespace(steps=2100, counters=counters, config=SimpleNamespace(accumulate=4)),
        stream=SimpleNamespace(
            config=SimpleNamespace(batch_size=9),
            names=list("abcdef"),
            position=SimpleNamespace(task=2),
            finished_task=1,
        ),
        folder=SimpleNamespace(speed=speed),
        display=SimpleNamespace(say=said.append),
    )
    run._evaluations_left = lambda: Training._evaluations_left(run)
    for rate in (1.0, 20.0, 5.0):
        Training._say_time(run, rate)
    assert said == ["about 60 minutes of training left at 20 clips/s" + more]

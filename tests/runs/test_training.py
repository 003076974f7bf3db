"""What every training says while it goes on."""

from types import SimpleNamespace
from typing import Any

from stella.runs.training import Training


def test_the_time_left_is_told_once_at_the_rate_of_the_second_record() -> None:
    """The first record includes start-up."""
    said: list[str] = []
    counters = SimpleNamespace(step=100)
    run: Any = SimpleNamespace(
        _rates=0,
        trainer=SimpleNamespace(steps=2100, counters=counters, config=SimpleNamespace(accumulate=4)),
        stream=SimpleNamespace(config=SimpleNamespace(batch_size=9)),
        display=SimpleNamespace(say=said.append),
    )
    for rate in (1.0, 20.0, 5.0):
        Training._say_time(run, rate)
    assert said == ["about 60 minutes of training left at 20 clips/s"]

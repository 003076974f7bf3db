"""What is said of a run where there is no terminal to draw a bar on, and on a narrow one."""

import io

import pytest
from rich.console import Console

from stella.runs import progress
from stella.runs.progress import Display

MEANS = {"loss": 1.5, "recon_a": 1.0, "recon_v": 0.5}


def test_a_run_into_a_file_speaks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, file = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Display(Console(file=file, width=200), total=40, done=0) as display:
        for step in range(1, 41):
            now[0] = 10.0 * step
            display.at(step, "er: task1")
            display.losses(MEANS, 12.0, 2 * 10**9)
    lines = file.getvalue().splitlines()
    assert lines[0] == "er: task1, step 7 of 40  loss 1.500  recon_a 1.000  recon_v 0.500  12 clips/s  2.00 GB"
    assert [line.split()[3] for line in lines] == ["7", "14", "21", "28", "35"]  # more than a minute apart


@pytest.mark.parametrize(("width", "parts"), [(80, False), (200, True)])
def test_a_narrow_terminal_shows_steps_and_rate_before_parts_of_the_loss(width: int, parts: bool) -> None:
    file = io.StringIO()
    with Display(Console(file=file, width=width, force_terminal=True), total=4321, done=1234) as display:
        display.at(1235, "stella_plus: task1")
        display.losses(MEANS, 1234.0, 2 * 10**9)
        display.refresh()
    shown = file.getvalue()
    assert "1235/4321" in shown and "-:--:--" in shown and "loss 1.500" in shown and "clips/s" in shown
    assert ("recon_a" in shown) == parts


def test_a_long_name_does_not_push_the_time_left_off_a_narrow_terminal() -> None:
    file = io.StringIO()
    with Display(Console(file=file, width=80, force_terminal=True), total=50, done=20) as display:
        display.at(25, "classify: epoch 10 of 40")
        display.losses(MEANS, 54965.0, 2 * 10**9)
        display.refresh()
    assert "25/50" in file.getvalue() and "-:--:--" in file.getvalue()


def test_clips_into_a_file_are_counted_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, file = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Display(Console(file=file, width=200)) as display, display.clips(2000, "after task3") as done:
        for batch in range(40):
            now[0] += 10.0
            done("embedding task1" if batch < 10 else "embedding task2", 50)
    assert file.getvalue().splitlines()[:2] == [
        "embedding task1 after task3: 350 of 2,000, about 6 minutes left",
        "embedding task2 after task3: 700 of 2,000, about 4 minutes left",
    ]


def test_clips_on_a_terminal_have_a_bar_that_goes() -> None:
    file = io.StringIO()
    with Display(Console(file=file, width=80, force_terminal=True)) as display:
        with display.clips(60) as done:
            done("features", 20)
            display.refresh()
        assert not [task for task in display.tasks if task.visible]
    assert "features" in file.getvalue() and "20/60" in file.getvalue() and "0/0" not in file.getvalue()

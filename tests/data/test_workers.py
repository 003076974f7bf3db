"""Workers that take too much memory, stop, or are stopped: the pool goes on, and the parent never waits for ever."""

import os
import signal
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes import alive, wait_for

from stella.data import workers
from stella.data.stream import StreamConfig
from stella.data.workers import Done, Lost, Pool, not_counted
from stella.errors import StellaError


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers forked from this process start at once; `test_stream` uses the real ones."""
    monkeypatch.setattr(workers, "START_METHOD", "fork")


def allocate(megabytes: int, tick: Any) -> str:
    tick(0)
    try:
        return f"{np.ones(megabytes << 20, np.uint8).nbytes >> 20}"
    except MemoryError:
        return "too much"


def state(_: object, tick: Any) -> tuple[int, str]:
    return os.getpid(), Path("/proc/self/oom_score_adj").read_text().strip()


def results(pool: Pool, jobs: list[Any]) -> list[Any]:
    for key, job in enumerate(jobs):
        pool.submit(key, job)
    found = {}
    while pool.running:
        event = pool.wait()
        found[event.key] = event.result if isinstance(event, Done) else event
    return [found[key] for key in range(len(jobs))]


def test_a_worker_may_take_so_much_memory_and_no_more() -> None:
    with closing(Pool(allocate, 1, 4, 10, gigabytes=0.1)) as pool:
        assert results(pool, [60, 200, 50]) == ["60", "too much", "50"]
    assert allocate(200, lambda _: None) == "200"  # the parent is not limited


def test_the_system_ends_workers_first() -> None:
    with closing(Pool(state, 1, 2, 10)) as pool:
        [(_, score)] = results(pool, [None])
    assert score == "1000" and int(Path("/proc/self/oom_score_adj").read_text()) < 1000


def wait(how: str, tick: Any) -> str:
    tick(0)
    with not_counted() if how == "network" else nullcontext():
        time.sleep(1.5)
    return how


def test_waiting_for_a_network_is_not_the_clip_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Pool(wait, 1, 2, 0.5)) as pool:
        good, bad = results(pool, ["network", "clip"])
    assert good == "network" and isinstance(bad, Lost) and bad.hung
    monkeypatch.setattr(workers, "NETWORK", 0.2)  # the limit of that
    with closing(Pool(wait, 1, 1, 0.5)) as pool:
        [late] = results(pool, ["network"])
    assert isinstance(late, Lost) and late.hung


def test_workers_that_were_stopped_with_this_process_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z: for as long, nobody looked at them."""
    assert StreamConfig().time_limit / 4 > workers.AWAY  # a stop as long as the limit must be seen
    monkeypatch.setattr(workers, "AWAY", 0.6)
    with closing(Pool(wait, 1, 1, 1.0)) as pool:
        pool.submit(0, "clip")
        time.sleep(1.2)
        event = pool.wait()
        assert isinstance(event, Done) and event.result == "clip"


def stop_once(flag: Path, tick: Any) -> str:
    """Stops itself, as a signal from outside would, in a job and not at an item."""
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return "done"


def pause(item: int, tick: Any) -> str:
    tick(item)
    time.sleep(1.5)
    return "done"


def test_an_item_may_be_silent_and_a_job_between_items_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SILENCE", 0.5)
    with closing(Pool(pause, 1, 1, time_limit=100)) as pool:
        assert results(pool, [0]) == ["done"]
        with pytest.raises(StellaError, match=r"workers keep dying \(no sign of life\)"):
            results(pool, [-1])


def test_a_stopped_worker_is_replaced_and_its_jobs_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SILENCE", 0.5)
    began = time.monotonic()
    with closing(Pool(stop_once, 1, 3, time_limit=100)) as pool:
        assert results(pool, [tmp_path / "a", tmp_path / "b", tmp_path / "b"]) == ["done"] * 3
        idle = pool._workers[0].process.pid
        os.kill(idle, signal.SIGSTOP)  # it waits for a job
        assert results(pool, [tmp_path / "a"]) == ["done"] and pool._workers[0].process.pid != idle
    assert time.monotonic() - began < 6


class Slow:
    """A result that takes the worker's help to unpack, as tensors in shared memory do: the worker stops first."""

    def __reduce__(self) -> Any:
        return _ask_the_worker, (os.getpid(),)


def _ask_the_worker(pid: int) -> str:
    os.kill(pid, signal.SIGSTOP)
    while alive(pid):
        time.sleep(0.01)
    raise EOFError


def answer(flag: Path, tick: Any) -> Any:
    if flag.exists():
        return "done"
    flag.touch()
    return Slow()


def test_a_worker_that_stops_while_it_answers_does_not_hang_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SILENCE", 0.5)
    with closing(Pool(answer, 1, 1, time_limit=100)) as pool:
        assert results(pool, [tmp_path / "flag"]) == ["done"]


def test_a_stopped_worker_ends_with_its_parent(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    if not (parent := os.fork()):
        pool = Pool(state, 1, 1, 10)
        [(worker, _)] = results(pool, [None])
        os.kill(worker, signal.SIGSTOP)
        pids.write_text(str(worker))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for(lambda: not alive(int(pids.read_text())))


def die_once(flag: Path, tick: Any) -> str:
    tick(0)
    if not flag.exists():
        flag.touch()
        os._exit(9)
    return "done"


def test_a_job_that_succeeds_forgets_its_death(tmp_path: Path) -> None:
    with closing(Pool(die_once, 1, 1, 10)) as pool:
        assert [results(pool, [tmp_path / name]) for name in "ab"] == [["done"]] * 2  # both have the key 0

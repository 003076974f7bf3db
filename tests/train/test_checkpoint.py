import errno
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.disk import small_disk
from helpers.small import same

from stella.errors import StellaError
from stella.train import checkpoint, dcp
from stella.train.checkpoint import Checkpoints

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def state(number: int) -> dict[str, object]:
    return {
        "number": number,
        "nested": {"none": None, "list": [1, 2.5, "a"], "tensor": torch.arange(5000) + number},
        3: torch.full((4,), float(number)),
    }


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(7, state(7))
    assert same(Checkpoints(tmp_path).load(), state(7))
    assert same(torch.load(path, weights_only=True), state(7))  # without this module, and without running a pickle


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 100, 101):
        checkpoints.save(step, state(step))
    assert [name.split("-")[1] for name in files(tmp_path)] == ["00000100", "00000101"]
    assert same(checkpoints.load(), state(101))


def test_of_the_same_step_the_later_one_counts(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (4, 5, 6):
        checkpoints.save(5, state(number))
    assert len(files(tmp_path)) == 2
    assert same(checkpoints.load(), state(6))


def test_views_do_not_drag_along_what_they_are_views_of(tmp_path: Path) -> None:
    rows = torch.zeros(100_000)
    path = Checkpoints(tmp_path).save(1, {"rows": rows[:10]})
    assert path.stat().st_size < 10_000


def test_what_is_loaded_stays_in_the_file_until_it_is_touched(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, {"memory": torch.ones(20_000_000)})
    before = resident()
    state = Checkpoints(tmp_path).load()
    assert state is not None and resident() < before + 20_000_000
    assert state["memory"].sum() == 20_000_000


def resident() -> int:
    """Bytes of this process that only its own memory holds."""
    return next(1024 * int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("RssAnon"))


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_broken_one_is_put_aside_for_the_one_before(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state(1))
    newest = checkpoints.save(2, state(2))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes({"cut": bytes(data[:-100]), "flip": bytes(data), "empty": b""}[damage])
    assert same(checkpoints.load(), state(1))
    checkpoints.save(2, state(2))  # the broken one does not count among the newest
    assert same(Checkpoints(tmp_path).load(), state(2))
    assert sum(name.endswith(".pt") for name in files(tmp_path)) == 2


def test_where_none_is_whole_nothing_begins_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() is None
    checkpoints.save(1, state(1)).write_bytes(b"torn")
    for _ in range(2):  # the second time it is no longer among those that are looked for
        with pytest.raises(StellaError, match=r"all checkpoints .* are damaged \(step-00000001-.*\.broken\)"):
            checkpoints.load()
    checkpoints.save(2, state(2))
    assert same(checkpoints.load(), state(2))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_kill_while_writing_leaves_the_one_before(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    size = checkpoints.save(1, state(1)).stat().st_size
    written = 0

    def dying(self: object, data: bytes, write: object = _writer().write) -> int:
        nonlocal written
        written += memoryview(data).nbytes
        if written >= share * size:
            os._exit(0)
        return write(self, data)  # type: ignore[operator, no-any-return]

    if not (child := os.fork()):
        monkeypatch.setattr(_writer(), "write", dying)
        checkpoints.save(2, state(2))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert any(name.endswith(".tmp") for name in files(tmp_path))
    assert same(checkpoints.load(), state(1))
    assert not any(name.endswith(".tmp") for name in files(tmp_path))


def test_a_full_disk_loses_nothing_and_says_so(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1))
    before = files(tmp_path)
    with small_disk(8192), pytest.raises(StellaError, match=r"step 2 cannot be written .*free some space"):
        checkpoints.save(2, state(2))
    assert files(tmp_path) == before
    assert same(checkpoints.load(), state(1))
    checkpoints.save(2, state(2))
    assert same(checkpoints.load(), state(2))


class Gate:
    """Holds the writing of checkpoints until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open, plain = threading.Event(), _writer().write

        def write(writer: object, data: bytes) -> int:
            assert self.open.wait(20)
            return plain(writer, data)  # type: ignore[no-any-return]

        patch.setattr(_writer(), "write", write)


def test_what_is_written_meanwhile_is_the_state_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, checkpoints = Gate(monkeypatch), Checkpoints(tmp_path)
    assert checkpoints.finished(wait=True) is None
    changing = {"nested": [torch.zeros(1000), {"view": torch.arange(10)[::2]}], "counters": {"step": 7}}
    checkpoints.begin(7, changing)
    changing["nested"][0] += 1  # type: ignore[index]
    changing["nested"][1]["view"] *= 0  # type: ignore[index]
    changing["counters"]["step"] = 8  # type: ignore[index]
    assert checkpoints.finished(wait=False) is None and not list(tmp_path.glob("*.pt"))
    with pytest.raises(AssertionError, match="one at a time"):
        checkpoints.begin(8, changing)
    gate.open.set()
    done = checkpoints.finished(wait=True)
    assert done and done.step == 7 and done.path.exists() and checkpoints.finished(wait=True) is None
    expected = {"nested": [torch.zeros(1000), {"view": torch.arange(0, 10, 2)}], "counters": {"step": 7}}
    assert same(Checkpoints(tmp_path).load(), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("free", [47, 48])  # of 6 numbers of 4 bytes, and as many for a step
def test_where_a_device_has_no_room_to_spare_the_copy_is_in_main_memory(
    device: str, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "free_bytes", lambda _: free)
    rows = torch.arange(6.0, device=device)
    found = checkpoint.copied({"rows": [rows], "step": 3})
    assert found["rows"][0].device.type == ("cpu" if free < 48 else device)
    rows += 1
    assert same(checkpoint.fetched(found), {"rows": [torch.arange(6.0)], "step": 3})


@cuda
def test_a_gpus_state_is_that_of_its_beginning_while_it_goes_on(tmp_path: Path) -> None:
    """A copy on the GPU, fetched by another thread: what the GPU computes before counts, what it computes after not."""
    checkpoints, n = Checkpoints(tmp_path), 4096
    one = torch.eye(n, device="cuda")
    for _ in range(20):
        one = one @ torch.eye(n, device="cuda")  # not done yet when the copy is asked for
    one += 1
    checkpoints.begin(1, {"trainer": {"x": one, "y": [one[:2]]}})
    for _ in range(20):
        one.mul_(2)
    assert checkpoints.finished(wait=True)
    found = checkpoints.load()
    assert found and found["trainer"]["x"].device.type == "cpu"
    assert torch.equal(found["trainer"]["x"], torch.eye(n) + 1)
    assert torch.equal(found["trainer"]["y"][0], (torch.eye(n) + 1)[:2])


def test_an_error_in_the_background_is_raised_when_it_is_asked_for(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1))
    with small_disk(8192):
        checkpoints.begin(2, state(2))
        with pytest.raises(StellaError, match=r"step 2 cannot be written .*free some space"):
            checkpoints.finished(wait=True)
    assert same(checkpoints.load(), state(1))
    checkpoints.begin(2, state(2))
    checkpoints.close()
    assert same(checkpoints.load(), state(2)) and checkpoints.finished(wait=False)


def test_without_room_for_a_copy_a_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "free_bytes", lambda device: 2 * 8 * 5000 + 30)
    monkeypatch.setattr(checkpoint, "copied", lambda tree: pytest.fail("copied"))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin(1, state(1))
    assert same(Checkpoints(tmp_path).load(), state(1)) and checkpoints.finished(wait=False)


def test_a_kill_while_it_is_written_in_the_background_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1))
    if not (child := os.fork()):
        Gate(monkeypatch)
        checkpoints.begin(2, state(2))
        while not any(name.endswith(".tmp") for name in files(tmp_path)):
            time.sleep(0.01)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert same(checkpoints.load(), state(1)) and len(files(tmp_path)) == 1


def _writer() -> type:
    return checkpoint._Writer


def test_a_full_disk_is_named_where_torch_tells_of_positions(tmp_path: Path) -> None:
    """It does so where several processes write."""
    strange = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert re.fullmatch(r"the disk is probably full: [\d,]+ MB are free", dcp._why(strange, tmp_path))
    strange.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert dcp._why(strange, tmp_path) == "No space left on device"
    assert dcp._why(ValueError("another"), tmp_path) == "another" and dcp._why(ValueError(), tmp_path)

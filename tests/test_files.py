"""Whole files, lines and locks, where processes are killed and disks are full."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.disk import small_disk

from stella import files
from stella.data.workers import Done, Pool, Tick
from stella.errors import StellaError
from stella.files import Lines, in_use, lock, read_json, read_lines, write_bytes, write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def child(action: Callable[[], object]) -> int:
    """The exit status of a forked process that does this; 1 for an exception."""
    if not (pid := os.fork()):
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] >> 8


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"12")
    write_text(tmp_path / "b", "é")
    write_json(tmp_path / "c", {"a": [1, None, "ö"]})
    assert (tmp_path / "a").read_bytes() == b"12" and (tmp_path / "b").read_text(encoding="utf-8") == "é"
    assert read_json(tmp_path / "c") == {"a": [1, None, "ö"]} and "ö" in (tmp_path / "c").read_text(encoding="utf-8")
    write_json(tmp_path / "c", {})
    assert read_json(tmp_path / "c") == {} and names(tmp_path) == ["a", "b", "c"]
    with files.temporary(tmp_path / "a") as one, files.temporary(tmp_path / "a") as other:
        assert one != other and one.parent == tmp_path  # two writers of one file
    plain = tmp_path / "plain"
    plain.touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {plain.stat().st_mode}  # as any other file's


def test_a_file_and_its_name_are_forced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[bool, bool]] = []

    def fsync(descriptor: int) -> None:
        is_folder = os.path.samestat(os.fstat(descriptor), tmp_path.stat())
        assert is_folder or os.fstat(descriptor).st_size == 5
        synced.append((is_folder, (tmp_path / "weights").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_bytes(tmp_path / "weights", b"12345")
    assert synced == [(False, False), (True, True)]  # content, then the name, then the folder that holds it


def test_a_failed_or_killed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")

    def fail() -> None:
        with files.whole(path) as fresh:
            fresh.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]

    def die() -> None:
        with files.whole(path) as fresh:
            fresh.write_text("half")
            os._exit(0)

    assert child(die) == 0
    assert path.read_text() == "old" and len(names(tmp_path)) == 2  # killed between write and rename
    (tmp_path / "other.tmp").touch()
    files.sweep(tmp_path)
    assert names(tmp_path) == ["a.json", "other.tmp"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    with small_disk(1000), pytest.raises(OSError):
        write_bytes(tmp_path / "a", bytes(2000))
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]
    with small_disk(1000), pytest.raises(StellaError, match="free some space"), files.explain_full_disk(tmp_path):
        write_bytes(tmp_path / "a", bytes(2000))
    with pytest.raises(FileNotFoundError), files.explain_full_disk(tmp_path):
        write_bytes(tmp_path / "none" / "a", b"")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match=r"x\.json cannot be read .*; look elsewhere"):
        read_json(tmp_path / "x.json", "look elsewhere")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(StellaError, match=r"x\.json is damaged"):
        read_json(tmp_path / "x.json")


def test_lines_continue_after_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "speed.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    lines = Lines(path)
    assert lines.sync() == len(b'{"step": 1}\n')
    lines.write({"step": 2})
    assert lines.sync() == path.stat().st_size
    lines.close()
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_a_full_disk_takes_a_line_whole_or_not_at_all(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "speed.jsonl")
    lines.write({"step": 1})
    before = lines.sync()
    with small_disk(before + 5), pytest.raises(OSError):
        lines.write({"step": 2})
    assert (tmp_path / "speed.jsonl").stat().st_size == before
    lines.write({"step": 3})
    lines.close()
    assert read_lines(tmp_path / "speed.jsonl") == [{"step": 1}, {"step": 3}]


HOLD = """
import sys, time, pathlib, stella.files
with stella.files.lock(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def held_by_another(path: Path) -> bool:
    try:
        with lock(path):
            return False
    except StellaError:
        return True


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        with pytest.raises(StellaError, match=rf"{tmp_path} is in use by process {holder.pid}; wait"), lock(path):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert not held_by_another(path)


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    path, seen = tmp_path / "lock", list[bool]()
    with lock(path):
        thread = threading.Thread(target=lambda: seen.append(held_by_another(path)))
        thread.start()
        thread.join()
        with pytest.raises(StellaError, match=f"in use by process {os.getpid()}"), lock(path):
            pass
        assert held_by_another(path)  # a refusal releases nothing
    assert seen == [True] and not held_by_another(path)


def test_what_a_killed_holder_leaves_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that it was starting has its open file until it runs."""
    path = tmp_path / "lock"
    path.write_text(f"{2**22 + 1}\n")  # no process has this number
    with path.open() as left:
        fcntl.flock(left, fcntl.LOCK_EX)
        threading.Timer(0.2, left.close).start()
        with lock(path):
            assert left.closed
    monkeypatch.setattr(files, "LEFT", 0.05)
    path.write_text(f"{2**22 + 1}\n")
    with path.open() as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        with pytest.raises(StellaError, match=f"in use by process {2**22 + 1}"), lock(path):
            pass


def test_one_can_see_whether_a_lock_is_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not in_use(path)
    with lock(path):
        assert in_use(path)
    assert not in_use(path)
    path.write_text(f"{2**22 + 1}\n")  # a killed holder's number
    assert not in_use(path)


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    """It outlives the block, even the parent's lock; and it cannot take the lock either."""
    path = tmp_path / "lock"
    read, write = os.pipe()
    with lock(path):
        if not (pid := os.fork()):
            os.close(write)
            os.read(read, 1)  # waits until the parent closes its end
            os._exit(0)
        assert child(lambda: None if held_by_another(path) else os._exit(3)) == 0
    assert not held_by_another(path)
    os.close(write)
    os.close(read)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_child_that_leaves_the_block_releases_nothing(tmp_path: Path) -> None:
    with lock(tmp_path / "lock"):
        if pid := os.fork():
            os.waitpid(pid, 0)
            assert held_by_another(tmp_path / "lock")
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    if not pid:
        os._exit(0)


def test_a_full_disk_prevents_no_lock(tmp_path: Path) -> None:
    """Only its number is missing."""
    path = tmp_path / "lock"
    with small_disk(0), lock(path):
        assert held_by_another(path) and path.read_text() == ""
    assert not held_by_another(path)


def test_a_full_disk_is_recognised_as_the_cause_of_an_error() -> None:
    full, other, deep = OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), ValueError("b")
    deep.__cause__ = RuntimeError("a")
    assert files.full_disk(full) is full and files.full_disk(None) is None
    assert files.full_disk(deep) is None and files.full_disk(other) is None
    deep.__cause__.__context__ = full
    assert files.full_disk(deep) is full


def open_locks(job: str, tick: Tick) -> bool:
    """In a worker: whether a descriptor of the lock file is open."""
    return any(job == str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_do_not_inherit_a_lock(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stella.data.workers.START_METHOD", method)
    with lock(tmp_path / "lock"):
        assert open_locks(str(tmp_path / "lock"), lambda item: None)
        pool = Pool(open_locks, 1, 1, time_limit=60)
        pool.submit(0, str(tmp_path / "lock"))
        try:
            assert pool.wait() == Done(0, str(tmp_path / "lock"), False)
        finally:
            pool.close()


def test_a_waiting_lock_waits(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", list[str]()

    def second() -> None:
        with lock(path, wait=True):
            order.append("second")

    with lock(path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.1)
        order.append("first")
        path.unlink()  # whoever waited for the old file takes the new one
    thread.join(10)
    assert order == ["first", "second"] and path.exists()


def test_only_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    """Whatever looks nearly like it stays: other names, folders, links."""
    (tmp_path / "a.json.0123abcd.tmp").write_text("half")
    kept = ["a.json.0123ABCD.tmp", "a.json.tmp", "notes.thesis01.tmp", "a.json.0123abcde.tmp"]
    for name in kept:
        (tmp_path / name).write_text("precious")
    (tmp_path / "folder.0123abcd.tmp").mkdir()
    (tmp_path / "link.0123abcd.tmp").symlink_to(tmp_path / kept[0])
    files.sweep(tmp_path)
    assert names(tmp_path) == sorted([*kept, "folder.0123abcd.tmp", "link.0123abcd.tmp"])


def test_a_file_that_is_no_lock_of_ours_is_not_emptied(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"precious \xff notes\n")
    with pytest.raises(StellaError, match="is not a lock of ours"), lock(path):
        pass
    assert path.read_bytes() == b"precious \xff notes\n"
    path.write_text("12345\n")  # a killed holder's
    with lock(path):
        assert path.read_text() == f"{os.getpid()}\n"

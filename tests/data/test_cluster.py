"""Shards made by many machines: byte for byte those of one."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.archives import PREFIX, pack, reasons, shard_bytes, write_vggsound
from helpers.in_turn import InTurn
from helpers.media_files import write_video
from helpers.processes import wait_for
from helpers.rays import ray_of
from upath import UPath

from stella.data import cluster
from stella.data import workers as pool
from stella.data.plan import Plan
from stella.data.prepare import Summary, prepare
from stella.errors import StellaError
from stella.files import lock

SMALL: dict[str, Any] = {"seconds": 1.0, "size": 48, "progress": False, "workers": 2, "shard_clips": 2}


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_METHOD", "fork")
    ray = InTurn()
    monkeypatch.setattr(cluster, "require", lambda name, extra: ray)


@pytest.fixture
def mixed(tmp_path: Path, videos: list[bytes]) -> Path:
    """Archives with their dirt, one clip in both, and files, one of them broken, one in an archive too."""
    root = write_vggsound(tmp_path, videos)
    for n, id in enumerate(("gone_000000", "c_000010", "y_000001")):
        (root / f"{id}.mp4").write_bytes(videos[n])
    with (tmp_path / "vggsound.csv").open("a") as file:
        file.write("y,1,zebra braying,train\n")
    return root


def run(src: Path, dst: Path | str, **more: Any) -> Summary:
    return prepare(src, dst, **(SMALL | {"csv": [src.parent / "vggsound.csv"]} | more))


def same(one: Path, other: Path) -> bool:
    texts = [(one / name).read_text() == (other / name).read_text() for name in ("skipped.jsonl", "plan.jsonl")]
    return shard_bytes(one) == shard_bytes(other) and all(texts) and not list(other.glob("*.tmp"))


def test_many_machines_leave_what_one_does(mixed: Path, tmp_path: Path, in_turn: None) -> None:
    one = run(mixed, tmp_path / "one")
    many = run(mixed, tmp_path / "many", ray="x")
    assert same(tmp_path / "one", tmp_path / "many") and len(shard_bytes(tmp_path / "one")) >= 8
    assert (one.clips, one.added, one.missing, one.listed) == (many.clips, many.added, many.missing, many.listed)
    assert one.skipped == many.skipped and one.clips == 9
    far = UPath(f"memory://{tmp_path}/far")
    assert run(mixed, str(far), ray="x").clips == one.clips
    stored = {path.name: path.read_bytes() for path in far.iterdir() if path.name.startswith("shard-")}
    assert stored == shard_bytes(tmp_path / "one")
    assert run(mixed, tmp_path / "many", ray="x").added == 0 and run(mixed, tmp_path / "many").added == 0


def test_what_one_began_the_other_finishes(
    mixed: Path, tmp_path: Path, in_turn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(mixed, tmp_path / "one")
    finish, left = Plan.finish, [1]

    def die(self: Plan, group: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        finish(self, group)

    for first, then in (("x", None), (None, "x")):
        dst = tmp_path / f"begun by {first}"
        with monkeypatch.context() as patch:
            left[0] = 1
            patch.setattr(Plan, "finish", die)
            with pytest.raises(KeyboardInterrupt):
                run(mixed, dst, ray=first)
        run(mixed, dst, ray=then)
        assert shard_bytes(dst) == shard_bytes(tmp_path / "one") and reasons(dst) == reasons(tmp_path / "one")
        assert not list(dst.glob("*.part"))


def test_what_a_machine_that_died_was_writing_is_removed(
    mixed: Path, tmp_path: Path, in_turn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(mixed, tmp_path / "one")
    call = cluster._call

    def again(task: cluster.Task, *given: Any) -> cluster.Made:
        """The second attempt of a task."""
        (task.dst / f"{task.group.name}-0000.tar.0123abcd.tmp").write_bytes(b"half a shard")
        return call(task, *given)

    monkeypatch.setattr(cluster, "_call", again)
    run(mixed, tmp_path / "many", ray="x")
    assert same(tmp_path / "one", tmp_path / "many")


def test_an_archive_that_changes_under_way_is_not_made_twice(
    mixed: Path, tmp_path: Path, videos: list[bytes], in_turn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clips in shards stay, and only what is new in it is made."""
    dst = tmp_path / "dst"

    def die(self: Plan, group: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Plan, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            run(mixed, dst, ray="x")
    pack(mixed / "vggsound_01.tar.gz", {f"{PREFIX}{id}.mp4": videos[0] for id in ("d_000002", "e_000003", "f_000004")})
    for ray in ("x", None):
        assert run(mixed, dst, ray=ray).clips == 10
        held = [clip["id"] for index in dst.glob("shard-*.json") for clip in json.loads(index.read_text())["clips"]]
        assert len(held) == len(set(held)) == 10 and "f_000004" in held


def test_one_machine_needs_no_ray_and_many_say_what_is_missing(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "START_METHOD", "fork")
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    assert run(mixed, tmp_path / "dst").clips == 9
    with pytest.raises(StellaError, match=r"ray is not installed; in a clone of stella: pip install '\.\[ray\]'"):
        run(mixed, tmp_path / "other", ray="local")
    with lock(tmp_path / "dst" / ".lock"), pytest.raises(StellaError, match="is in use by process"):
        run(mixed, tmp_path / "dst", ray="local")


# ---- with Ray itself


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[Any]:
    with ray_of(tmp_path) as ray:
        yield ray


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [2, 4])
def test_ray_leaves_what_one_machine_does(workers: int, mixed: Path, tmp_path: Path, ray: Any) -> None:
    one = run(mixed, tmp_path / "one")
    many = run(mixed, tmp_path / "many", ray="local", workers=workers)
    assert same(tmp_path / "one", tmp_path / "many") and many.clips == one.clips == 9


def folder(root: Path, count: int) -> Path:
    """Videos, one of them broken, a quarter of them in an archive."""
    files = [write_video(root / f"{n:03d}.mp4", seed=n) for n in range(count)]
    (root / "005b.mp4").write_text("hello")
    some = files[-count // 4 :]
    pack(root / "more.tar", {file.name: file.read_bytes() for file in some})
    for file in some:
        file.unlink()
    return root


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_dies(tmp_path: Path, ray: Any) -> None:
    """One of two machines is killed while both work; the other takes over what it did."""
    from ray.cluster_utils import Cluster

    src, many = folder(tmp_path / "src", 24), {"csv": (), "shard_clips": 4}
    run(src, tmp_path / "one", **many)
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        first, _ = machines.add_node(num_cpus=1), machines.add_node(num_cpus=1)
        ray.init(address=machines.address, log_to_driver=False)
        lost: list[int] = []

        def kill() -> None:
            wait_for(lambda: bool(list((tmp_path / "many").glob("shard-*.tar"))))
            lost.append(len(list((tmp_path / "many").glob("shard-*.tar"))))
            machines.remove_node(first, allow_graceful=False)

        thread = threading.Thread(target=kill)
        thread.start()
        summary = run(src, tmp_path / "many", ray="x", **many)
        thread.join()
        assert lost and lost[0] < 7 and summary.clips == 24
        assert shard_bytes(tmp_path / "one") == shard_bytes(tmp_path / "many")
        assert reasons(tmp_path / "one") == reasons(tmp_path / "many")
    finally:
        ray.shutdown()
        machines.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_process_that_plans_is_killed(tmp_path: Path, ray: Any) -> None:
    src, dst = folder(tmp_path / "src", 24), tmp_path / "many"
    run(src, tmp_path / "one", csv=(), shard_clips=4)
    command = [sys.executable, "-m", "stella", "prepare", str(src), str(dst), "--seconds", "1", "--ray", "local"]
    script = f"from stella.data.prepare import prepare; prepare({str(src)!r}, {str(dst)!r}, seconds=1.0, size=48, "
    script += "progress=False, workers=2, shard_clips=4, ray='local')"
    killed = subprocess.Popen([sys.executable, "-c", script])
    wait_for(lambda: bool(list(dst.glob("shard-*.tar"))) or killed.poll() is not None)
    time.sleep(random.uniform(0, 1))
    killed.kill()
    killed.wait()
    subprocess.run([sys.executable, "-c", script], check=True)
    assert shard_bytes(tmp_path / "one") == shard_bytes(dst) and reasons(tmp_path / "one") == reasons(dst)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "was filled with other settings" in done.stdout + done.stderr

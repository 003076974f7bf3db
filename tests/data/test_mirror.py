"""Shards and arrays at an S3 server: the numbers of a disk, each byte downloaded once, faults told."""

import io
import json
import multiprocessing
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs
import torch
from fsspec.implementations.memory import MemoryFileSystem
from helpers.archives import reasons, shard_bytes, write_vggsound
from helpers.media_files import write_video
from helpers.processes import wait_for
from helpers.s3 import ACCESS, S3
from helpers.streams import same
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner
from upath import UPath

from stella.cli import app
from stella.clip import Batch
from stella.data import mirror
from stella.data import workers as pool
from stella.data.archives.benchmarks import ContinualVSConfig
from stella.data.config import data_config
from stella.data.mirror import mirrored, opened
from stella.data.pack import pack
from stella.data.packed import Packed
from stella.data.prepare import Summary, prepare
from stella.data.shards import Shards
from stella.data.stream import Stream, StreamConfig
from stella.errors import StellaError

SMALL: dict[str, Any] = {"seconds": 1.0, "size": 48, "progress": False, "workers": 2, "shard_clips": 2}


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_METHOD", "fork")
    monkeypatch.setattr(mirror, "WAITS", (0.0, 0.0))


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with S3().running() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in (ACCESS | {"AWS_ENDPOINT_URL": server.url}).items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield server


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    monkeypatch.setenv("STELLA_CACHE", str(tmp_path / "cache"))
    UPath(f"s3://{bucket(tmp_path)}").mkdir()
    server.sent.clear()
    server.torn, server.refused, server.delay = 0, False, 0.0
    return server


def bucket(tmp_path: Path) -> str:
    return tmp_path.name.replace("_", "-").strip("-")[:60]


def copied(folder: Path, address: str) -> str:
    for file in folder.rglob("*.*"):
        if file.is_file():
            (UPath(address) / file.relative_to(folder).as_posix()).write_bytes(file.read_bytes())
    return address


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("disk")
    for n in range(6):
        write_video(root / "videos" / f"{n}.mp4", seed=n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "START_METHOD", "fork")
        prepare(root / "videos", root / "shards", **SMALL)
    return root / "shards"


# ---- prepare


def test_prepare_from_s3_to_s3_leaves_the_bytes_of_a_disk(tmp_path: Path, s3: S3) -> None:
    videos = [write_video(tmp_path / f"{n}.mp4", seed=n).read_bytes() for n in range(4)]
    have = write_vggsound(tmp_path, videos)
    there, lists = f"s3://{bucket(tmp_path)}", [tmp_path / "vggsound.csv"]
    copied(have, f"{there}/have")
    (UPath(there) / "vggsound.csv").write_bytes(lists[0].read_bytes())

    def far() -> Summary:
        return prepare(f"{there}/have", f"{there}/shards", csv=[f"{there}/vggsound.csv"], **SMALL)

    here = prepare(have, tmp_path / "here", csv=lists, **SMALL)
    made = far()
    assert (made.clips, made.skipped, made.missing, made.listed) == (
        *(here.clips, here.skipped, here.missing),
        here.listed,
    )
    stored = {path.name: path.read_bytes() for path in UPath(f"{there}/shards").iterdir()}
    assert {name: data for name, data in stored.items() if name.startswith("shard-")} == shard_bytes(tmp_path / "here")
    listed = {json.loads(line)["id"]: json.loads(line)["reason"] for line in stored["skipped.jsonl"].splitlines()}
    assert listed == reasons(tmp_path / "here") and ".lock" not in stored
    s3.sent.clear()
    assert far().added == 0 and not any(name.endswith(".tar.gz") for name in s3.sent)  # nothing is read again
    config = ContinualVSConfig(path=f"{there}/shards", tasks=("sports", "music"), pixels=32, duration=1.0)
    assert {name: len(clips) for name, clips in config.train_tasks()} == {"sports": 2, "music": 2}
    assert "4 training clips of 7 listed" in config.remarks()[0]


@pytest.mark.slow
def test_killed_on_its_way_to_s3_it_ends_with_the_same_shards(shards: Path, tmp_path: Path, s3: S3) -> None:
    place, src = f"s3://{bucket(tmp_path)}/killed", shards.parent / "videos"
    child = multiprocessing.get_context("fork").Process(target=prepare, args=(src, place), kwargs=SMALL)
    s3.delay = 0.3
    child.start()
    other = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    wait_for(lambda: other.exists(f"{place}/shard-000000.json"))
    child.kill()
    child.join()
    s3.delay = 0.0
    assert other.exists(f"{place}/.lock") and not other.exists(f"{place}/shard-000002.json")
    assert prepare(src, place, **SMALL).clips == 6
    stored = {path.name: path.read_bytes() for path in UPath(place).iterdir() if path.name.startswith("shard-")}
    assert stored == shard_bytes(shards) and not other.exists(f"{place}/.lock")


# ---- read


def batches(place: str, source: str = "shards", workers: int = 0) -> list[Batch]:
    sizes = {} if source == "packed" else {"pixels": 32, "span": 0.5}
    tasks = data_config({"source": source, "path": place} | sizes).all_tasks()
    return list(Stream(tasks, StreamConfig(batch_size=2, epochs=2, workers=workers, size=32, spec_frames=96)))


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_at_s3_give_the_batches_of_a_disk(workers: int, shards: Path, tmp_path: Path, s3: S3) -> None:
    there = copied(shards, f"s3://{bucket(tmp_path)}/shards")
    expected = batches(str(shards))
    assert len(expected) >= 6
    for _ in range(2):  # two epochs, twice: each byte is downloaded once
        assert same(batches(there, workers=workers), expected)
        assert s3.sent == sizes_of(shards, "shard-*", "prepare.json")


def sizes_of(folder: Path, *patterns: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for pattern in patterns for path in folder.glob(pattern)}


def test_packed_arrays_at_s3_give_the_batches_of_a_disk(
    shards: Path, tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "BLOCK", 10_000)  # rows lie across blocks
    config = data_config({"source": "shards", "path": str(shards), "pixels": 32, "duration": 1.0})
    pack(config.all_tasks(), tmp_path / "packed", pixels=32, spec_frames=96, workers=0, progress=False)
    there = copied(tmp_path / "packed", f"s3://{bucket(tmp_path)}/packed")
    assert same(batches(there, "packed"), batches(str(tmp_path / "packed"), "packed"))
    assert s3.sent == sizes_of(tmp_path / "packed", "clips.json", "*.u8", "*.i16", "*.i64")
    again = pickle.loads(pickle.dumps(Packed(there)))
    assert torch.equal(again[0].video, Packed(tmp_path / "packed")[0].video)
    assert again.location(0) == f"{there}, 0.mp4"
    (UPath(there) / "waveforms.i16").unlink()
    with pytest.raises(StellaError, match=r"packed/waveforms\.i16 is missing; restore it"):
        Packed(there)


def read_all(place: str, at_once: Any, sums: Any) -> None:
    torch.set_num_threads(1)  # a forked process has none of its parent's threads, and would wait for them
    shards = Shards(place, span=None)
    at_once.wait()
    sums.put(sum(float(shards[i].audio.sum()) for i in range(len(shards))))


def test_processes_share_one_download(shards: Path, tmp_path: Path, s3: S3) -> None:
    there = copied(shards, f"s3://{bucket(tmp_path)}/shards")
    s3.delay = 0.3
    fork = multiprocessing.get_context("fork")
    at_once, sums = fork.Barrier(3, timeout=60), fork.Queue()
    running = [fork.Process(target=read_all, args=(there, at_once, sums), daemon=True) for _ in range(3)]
    for process in running:
        process.start()
    assert len({sums.get(timeout=60) for _ in running}) == 1
    for process in running:
        process.join(60)
    assert s3.sent == sizes_of(shards, "shard-*", "prepare.json")
    left = {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()} - {".json", ""}
    assert not left  # no temporary file, no lock of a block


def test_a_download_that_breaks_off_is_tried_again_and_then_told(shards: Path, tmp_path: Path, s3: S3) -> None:
    there = Shards(copied(shards, f"s3://{bucket(tmp_path)}/shards"), span=None)
    s3.torn = 1
    assert torch.equal(there[0].video, Shards(shards, span=None)[0].video) and not s3.torn
    s3.refused = True
    with pytest.raises(StellaError, match=r"shard-000001\.tar cannot be read \(.+\); check the network, and run"):
        there[2]  # no clip is skipped for that
    with pytest.raises(StellaError, match=r"shards cannot be read \(.+\); check the network"):
        Shards(there.place)
    assert there[0].id == "0.mp4"  # it is here
    s3.refused = False
    assert there[2].id == "2.mp4"


def test_half_an_answer_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STELLA_CACHE", str(tmp_path))
    UPath("memory://short/file").write_bytes(b"0123456789")
    whole, halves = MemoryFileSystem.cat_file, [2]

    def cat_file(self: Any, path: str, start: int, end: int) -> bytes:
        halves[0] -= 1
        return whole(self, path, start, end)[: 5 if halves[0] >= 0 else 10]

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    assert opened("memory://short").open("file").read() == b"0123456789" and halves == [-1]
    UPath("memory://short/other").write_bytes(b"0123456789")
    halves[0] = 99
    with pytest.raises(StellaError, match="broke off after 5 of 10 bytes"):
        opened("memory://short").open("other").read()


def test_without_room_clips_are_read_from_the_address(
    shards: Path, tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Shards(copied(shards, f"s3://{bucket(tmp_path)}/shards"), span=None)
    monkeypatch.setattr(mirror, "FREE", 1.0)
    assert torch.equal(there[1].video, Shards(shards, span=None)[1].video)
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("000*"))
    monkeypatch.setenv("STELLA_CACHE", "/proc/none")
    with pytest.raises(StellaError, match="set STELLA_CACHE to a folder of yours with room"):
        Shards(there.place)


def test_what_changes_at_the_address_is_read_anew(shards: Path, tmp_path: Path, s3: S3) -> None:
    place = copied(shards, f"s3://{bucket(tmp_path)}/shards")
    assert len(Shards(place)) == 6 and Shards(place, span=None)[0].id == "0.mp4"
    other = s3fs.S3FileSystem(skip_instance_cache=True)  # another machine
    for ending in ("tar", "json"):
        other.pipe_file(f"{place}/shard-000000.{ending}", (shards / f"shard-000001.{ending}").read_bytes())
        other.rm_file(f"{place}/shard-000002.{ending}")
    now = Shards(place, span=None)
    assert sorted(now[i].id for i in range(len(now))) == ["2.mp4", "2.mp4", "3.mp4", "3.mp4"]
    other.pipe_file(f"{place}/shard-000001.tar", b"x")
    with pytest.raises(StellaError, match="is damaged: it has 1 bytes and its index says"):
        Shards(place)
    other.rm_file(f"{place}/shard-000001.tar")
    with pytest.raises(StellaError, match=r"s3://.+shard-000001\.tar is missing beside shard-000001\.json"):
        Shards(place)


def test_addresses_without_shards_are_told(tmp_path: Path, s3: S3) -> None:
    place = f"s3://{bucket(tmp_path)}/nothing"
    for source, says in (
        ("shards", "is not there"),
        ("packed", "is not there"),
        ("continual-vs", "is not there"),
        ("folder", f"give shards: stella prepare {place} SHARDS"),
    ):
        with pytest.raises(StellaError, match=says):
            data_config({"source": source, "path": place}).train_tasks()
    (UPath(place) / "vggsound.csv").write_text("x")
    holds = {"shards": "no finished shards", "packed": "no packed clips", "continual-vs": "no shards"}
    for source, says in holds.items():
        with pytest.raises(StellaError, match=f"holds {says}"):
            data_config({"source": source, "path": place}).train_tasks()
    assert data_config({"source": "shards", "path": place}).absolute().path == place  # type: ignore[union-attr]


def test_a_name_at_an_address_stays_inside_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STELLA_CACHE", str(tmp_path / "cache"))
    far = UPath("memory://a/%2e%2e/b c")
    (far / "x.json").write_text("{}")
    found = mirrored(str(far))
    assert found.folder.is_relative_to(tmp_path / "cache") and ".." not in found.folder.parts
    assert (found.folder / "x.json").read_text() == "{}"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4000), st.lists(st.tuples(st.integers(0, 4100), st.integers(0, 3000)), max_size=8))
def test_a_remote_file_reads_as_the_bytes_it_has(size: int, reads: list[tuple[int, int]]) -> None:
    data = np.random.default_rng(size).bytes(size)
    UPath("memory://remote/file").write_bytes(data)
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STELLA_CACHE", cache)
        patch.setattr(mirror, "BLOCK", 1000)
        with io.BufferedReader(opened("memory://remote").open("file")) as file:
            for at, count in reads:
                file.seek(at)
                assert file.read(count) == data[at : at + count]
            file.seek(-min(size, 7), io.SEEK_END)
            assert file.read() == data[size - min(size, 7) :]


# ---- runs


@pytest.mark.slow
def test_a_run_from_s3_ends_with_the_weights_of_a_disk(tmp_path: Path, s3: S3) -> None:
    for n in range(12):
        write_video(tmp_path / "videos" / f"{n}.mp4", seed=n)
    prepare(tmp_path / "videos", tmp_path / "shards", **SMALL)
    there = copied(tmp_path / "shards", f"s3://{bucket(tmp_path)}/shards")
    sizes = ["data.pixels=32", "data.span=0.5", "data.eval_share=0.3", "stream.batch_size=2", "memory.clips=4"]
    for name, place in (("disk", str(tmp_path / "shards")), ("s3", there)):
        command = ["pretrain", "data.source=shards", f"data.path={place}", *sizes, "method=er", "stream.epochs=2"]
        run = [sys.executable, "-m", "stella", *command, "train.device=cpu", "--run", str(tmp_path / name)]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("disk", "s3"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    look = ["look", there, "--out", str(tmp_path / "look.png")]
    assert "8 of 12 clips shown" in CliRunner().invoke(app, look).output

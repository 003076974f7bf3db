"""The queue and its workers: late, dead and failing jobs, too many of them, uploads of every size."""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.disk import small_disk
from helpers.served import misbehave
from starlette.requests import ClientDisconnect

from stella.serve import app
from stella.serve import work as work_module
from stella.serve.answers import HttpError
from stella.serve.jobs import Jobs
from stella.serve.served import Cache
from stella.serve.uploads import Limits, Uploads


@pytest.fixture(scope="module")
def log() -> list[str]:
    return []


@pytest.fixture(scope="module")
def jobs(log: list[str]) -> Iterator[Jobs]:
    made = Jobs(workers=1, waiting=3, seconds=0.5, log=log.append, task=misbehave)
    yield made
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 3


def outcome(jobs: Jobs, *asked: object) -> list[object]:
    """Results or (status, sentence), of jobs that are asked at the same time."""

    async def one(job: object) -> object:
        try:
            return await jobs.run(job)
        except HttpError as problem:
            return problem.status, str(problem)

    async def every() -> list[object]:
        return list(await asyncio.gather(*map(one, asked)))

    return asyncio.run(every())


def test_a_job_that_hangs_or_dies_is_refused_and_the_next_one_is_answered(jobs: Jobs, log: list[str]) -> None:
    assert outcome(jobs, 7) == [7]
    began = time.monotonic()
    assert outcome(jobs, "hang", 8) == [(422, "it takes longer than 0.5 s to decode"), 8]
    assert time.monotonic() - began < 8
    assert outcome(jobs, "die", 9) == [(422, "the decoder crashed on it; re-encode it, or give another file"), 9]
    assert outcome(jobs, "refuse") == [(422, "it is green; give a blue one")] and log == ["secret"]
    assert outcome(jobs, "full") == [(507, "there is no room")]
    assert outcome(jobs, "fail", 10) == [(500, "the server cannot do this; its log says why"), 10]
    assert "/a/path" in log[1]  # said to the one who runs the server alone


def test_more_than_the_queue_holds_is_told_to_come_again(jobs: Jobs) -> None:
    found = outcome(jobs, *[0.1] * 10)
    busy = (503, "the server is busy; try again in a few seconds")
    assert set(found) == {0.1, busy} and 3 <= found.count(0.1) <= 4


def test_a_job_whose_client_has_gone_is_never_begun(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "GONE", 0.01)

    class Left:
        async def is_disconnected(self) -> bool:
            return True

    async def ask() -> None:
        first = asyncio.create_task(jobs.run(0.2))
        await asyncio.sleep(0)
        with pytest.raises(ClientDisconnect):
            await app._while_asked(Left(), jobs.run(tmp_path / "left"))  # type: ignore[arg-type]
        assert await first == 0.2 and await jobs.run(7) == 7

    asyncio.run(ask())
    assert not (tmp_path / "left").exists()


def test_a_stop_answers_what_waits_and_takes_no_time() -> None:
    jobs = Jobs(workers=1, waiting=9, seconds=60, task=misbehave)

    async def stopped() -> list[object]:
        waiting = [asyncio.create_task(jobs.run(job)) for job in ("hang", 1, 2)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(jobs.close)
        return await asyncio.gather(*waiting, return_exceptions=True)

    began = time.monotonic()
    found = asyncio.run(stopped())
    assert [getattr(one, "status", None) for one in found] == [503] * 3 and time.monotonic() - began < 6


async def body(*chunks: bytes, pause: float = 0.0) -> AsyncIterator[bytes]:
    for chunk in chunks:
        await asyncio.sleep(pause)
        yield chunk


def test_uploads_are_limited_in_size_time_and_number_and_leave_nothing() -> None:
    uploads = Uploads(Limits(bytes=100, transfer=0.2, waiting=2, disk=150))

    async def receive(*chunks: bytes, length: int | None = None, pause: float = 0.0, hold: float = 0.0) -> object:
        try:
            async with uploads.received(body(*chunks, pause=pause), length) as path:
                await asyncio.sleep(hold)
                return path.read_bytes()
        except HttpError as problem:
            return problem.status

    async def several() -> list[object]:
        held = (receive(b"x" * 90, hold=0.1), receive(b"y" * 80, hold=0.1), receive(b"z"))
        return list(await asyncio.gather(*held))

    assert asyncio.run(receive(b"ab", b"c")) == b"abc"
    assert asyncio.run(receive(b"", b"")) == 422
    assert asyncio.run(receive(length=101)) == 413
    assert asyncio.run(receive(b"a" * 60, b"b" * 41, length=3)) == 413  # what is stated is not believed
    assert asyncio.run(receive(*[b"a"] * 50, pause=0.05)) == 408
    assert asyncio.run(several()) == [b"x" * 90, 503, 503]  # the disk is full; too many
    assert asyncio.run(receive(b"abc")) == b"abc" and uploads.sizes == {}
    assert [path.name for path in uploads.folder.iterdir()] == ["lock"]
    uploads.close()
    assert not uploads.folder.exists()


def test_uploads_are_taken_again_after_a_full_disk_and_after_their_folder_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uploads = Uploads(Limits(bytes=300_000, disk=400_000))

    async def receive(*chunks: bytes) -> int:
        async with uploads.received(body(*chunks), None) as path:
            return path.stat().st_size

    chunks = [b"x" * 65_536] * 4
    for _ in range(3):
        with small_disk(100_000), pytest.raises(HttpError, match="no room for the upload"):
            asyncio.run(receive(*chunks))
    assert uploads.sizes == {} and asyncio.run(receive(*chunks)) == 262_144
    shutil.rmtree(uploads.folder)  # by a cleaner of temporary files
    assert asyncio.run(receive(*chunks)) == 262_144
    (uploads.folder / "lock").unlink()  # or only what is old
    assert asyncio.run(receive(*chunks)) == 262_144
    uploads.close()
    assert not uploads.folder.exists()


def test_the_folder_of_a_killed_server_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "stella-serve-left"
    left.mkdir()
    (left / "upload").write_text("secret")
    os.utime(left, (1, 1))
    young = tmp_path / "stella-serve-young"  # its server is about to lock it
    young.mkdir()
    other = Uploads(Limits())
    os.utime(other.folder, (1, 1))
    last = Uploads(Limits())
    assert not left.exists() and other.folder.exists() and young.exists()
    last.close()
    other.close()
    assert list(tmp_path.iterdir()) == [young]


def test_what_is_made_for_a_moment_is_made_once_and_forgotten_when_there_is_too_much() -> None:
    made: list[str] = []

    async def check() -> None:
        cache = Cache(most=10)

        async def make() -> bytes:
            made.append("a")
            await asyncio.sleep(0.01)
            return b"12345"

        assert await asyncio.gather(*(cache.get("a", make) for _ in range(5))) == [b"12345"] * 5 and made == ["a"]
        await cache.get("b", make)
        await cache.get("a", make)
        await cache.get("c", make)  # b was used least recently
        assert len(made) == 3 and cache.size == 10
        await cache.get("a", make)
        assert len(made) == 3
        await cache.get("b", make)
        assert len(made) == 4

        async def fail() -> bytes:
            raise HttpError(422, "no")

        for _ in range(2):
            with pytest.raises(HttpError):
                await cache.get("d", fail)

        one, two = (asyncio.create_task(cache.get("e", make)) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        assert await two == b"12345" and len(made) == 5
        left, begun = asyncio.create_task(cache.get("f", make)), len(made)
        await asyncio.sleep(0.001)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await asyncio.sleep(0.02)
        assert len(made) == begun + 1 and "f" not in cache._kept and not cache._coming
        assert await cache.get("f", make) == b"12345"

    asyncio.run(check())


def test_the_time_that_a_model_takes_to_load_is_not_the_file_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a worker that loads one is no silent worker."""
    said: list[Any] = []

    @contextmanager
    def not_counted() -> Iterator[None]:
        said.append("begin")
        yield
        said.append("end")

    monkeypatch.setattr(work_module, "not_counted", not_counted)
    monkeypatch.setattr(work_module, "_model", lambda weights: said.append(weights))
    job: Any = SimpleNamespace(weights="weights", do=lambda model: said.append("do"))
    work_module.work(job, said.append)
    assert said == ["begin", "weights", "end", 0, "do"]

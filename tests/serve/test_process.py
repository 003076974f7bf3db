"""`stella serve` as a process: stopped, killed in the middle of answers, under load, with a token, in a browser."""

import json
import os
import random
import signal
import socket
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import pytest
from helpers.indexes import content
from helpers.media_files import tone, write
from helpers.processes import serving
from helpers.served import make_index

import stella


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> "stella.Index":
    return make_index(tmp_path_factory.mktemp("process"))


def ask(address: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(address, body, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


@pytest.mark.slow
def test_a_stop_ends_everything_within_seconds(index: "stella.Index", tmp_path: Path) -> None:
    sound = (index.state().sources[0] / "more/tone.wav").read_bytes()
    for number in (signal.SIGTERM, signal.SIGINT):
        with serving(index.path) as (process, address):
            assert ask(f"{address}api/search", sound)[0] == 200
            children = [int(pid) for pid in _children(process.pid)]
            long = write(tmp_path / f"{number}.flac", None, tone(3600, 8_000, level=0), rate=8_000, audio_codec="flac")
            threading.Thread(target=_quietly, args=(f"{address}api/search", long.read_bytes()), daemon=True).start()
            time.sleep(1)
            began = time.monotonic()
            process.send_signal(number)
            assert process.wait(15) == 0 and time.monotonic() - began < 10
            assert children
            for _ in range(50):  # they notice it
                left = [pid for pid in children if Path(f"/proc/{pid}").exists()]
                time.sleep(0.1 if left else 0)
            assert not left


@pytest.mark.slow
def test_a_stop_during_an_upload_is_told(index: "stella.Index") -> None:
    """As JSON, with when to come again; and without a traceback."""
    with serving(index.path) as (process, address):
        with socket.create_connection(("127.0.0.1", urlsplit(address).port or 0)) as client:
            client.sendall(b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nbegin")
            time.sleep(0.5)
            process.terminate()
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        said, _ = process.communicate(timeout=15)
        assert process.returncode == 0 and "Traceback" not in said, said
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 30" in head.lower()
    assert json.loads(body) == {"error": "the server is stopping; try again later"}


def _children(pid: int) -> list[str]:
    """Of that process and of its children."""
    found = [pid for task in Path(f"/proc/{pid}/task").iterdir() for pid in (task / "children").read_text().split()]
    return found + [child for one in found for child in _children(int(one))]


def _quietly(address: str, body: bytes | None = None) -> None:
    with suppress(URLError, OSError):  # it is stopped meanwhile
        ask(address, body)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_during_requests_leave_the_index_unharmed(
    index: "stella.Index", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # without the folders of other servers
    before = content(index.path)
    source = index.state().sources[0]
    sound, draw = (source / "more/tone.wav").read_bytes(), random.Random(1)
    answered = 0
    for _ in range(20):
        with serving(index.path) as (process, address):
            assert ask(f"{address}api/search", sound)[0] == 200  # its workers are there
            found: list[int] = []

            def search(address: str = address, found: list[int] = found) -> None:
                with suppress(URLError, OSError):  # killed
                    while True:
                        found.append(ask(f"{address}api/search", sound)[0])

            threads = [threading.Thread(target=search) for _ in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(draw.uniform(0, 1.5))
            process.kill()
            process.wait()
            for thread in threads:
                thread.join()
            assert set(found) <= {200}
            answered += len(found)
        assert content(index.path) == before
    assert answered > 20
    assert index.update(model="base-tiny").counts.added == 0 and content(index.path) == before
    left = list(tmp_path.glob("stella-serve-*"))
    for folder in left:  # what a killed server leaves is removed by the next one
        os.utime(folder, (1, 1))
    with serving(index.path):
        assert left and len(list(tmp_path.glob("stella-serve-*"))) == 1


@pytest.mark.slow
def test_an_hour_in_a_small_file_is_refused_in_time(index: "stella.Index", tmp_path: Path) -> None:
    bomb = write(tmp_path / "bomb.flac", None, tone(3600, 8_000, level=0), rate=8_000, audio_codec="flac").read_bytes()
    assert len(bomb) < 2_000_000
    with serving(index.path, "--most-seconds", "2", "--workers", "1") as (_, address):
        began = time.monotonic()
        status, answer = ask(f"{address}api/search", bomb)
        assert status == 422 and b"takes longer than 2 s" in answer and time.monotonic() - began < 60
        assert ask(f"{address}api/search", (index.state().sources[0] / "more/tone.wav").read_bytes())[0] == 200


@pytest.mark.slow
def test_another_address_needs_the_token_that_is_printed(index: "stella.Index") -> None:
    with serving(index.path, "--host", "0.0.0.0", "--name", "box.lan") as (_, printed):
        token = urlsplit(printed).query.removeprefix("token=")
        assert urlsplit(printed).hostname == "box.lan"  # 0.0.0.0 leads nowhere from another machine
        address = f"http://127.0.0.1:{urlsplit(printed).port}/api/state"
        assert len(token) >= 16 and ask(address)[0] == 401
        known = {"Authorization": f"Bearer {token}"}
        assert ask(address, headers=known)[0] == 200
        assert ask(address, headers=known | {"Host": "box.lan"})[0] == 200
        assert ask(address, headers=known | {"Host": "evil.com"})[0] == 421
        search = address.replace("state", "search")  # of no file at all: 422
        for origin, status in (("https://box.lan:8443", 422), ("http://localhost:9", 403), ("http://evil.com", 403)):
            assert ask(search, b"nothing", known | {"Origin": origin})[0] == status

"""Who may ask, whatever the routes are."""

import asyncio
import json
from typing import Any

import pytest

from stella.serve.guard import HEADERS, Access, Guard

TOKEN = "a1b2c3d4e5f6a7b8"


def ask(
    access: Access, method: str = "GET", path: str = "/", query: str = "", **headers: str
) -> tuple[int, dict, bytes]:
    """The status, the headers and the body of an answer; the app behind the guard says "inside"."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-content-type-options", b"sniff")]})
        await send({"type": "http.response.body", "body": b"inside"})

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "127.0.0.1:8000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    pairs = [(name.encode(), value.encode()) for name, value in given.items() if value]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": pairs}
    asyncio.run(Guard(app, access)(scope, None, send))  # type: ignore[arg-type]
    found = [(name.decode(), value.decode()) for name, value in sent[0]["headers"]]
    assert len(dict(found)) == len(found)
    return sent[0]["status"], dict(found), sent[1]["body"]


def test_every_answer_has_safe_headers() -> None:
    for access in (Access(), Access(token=TOKEN)):
        _, headers, _ = ask(access)
        assert headers.items() >= HEADERS.items()
    assert "default-src 'none'" in headers["content-security-policy"] and "unsafe" not in str(HEADERS)
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[
            (host, 200)
            for host in ("127.0.0.1", "localhost:9", "LOCALHOST", "[::1]:8000", "192.168.0.7:8000", "box.lan")
        ],
        *[
            (host, 421)
            for host in ("evil.com", "127.0.0.1.evil.com", "localhost.evil.com", "[::1", "", "a b", "@", "1:x")
        ],
    ],
)
def test_names_of_others_are_refused(host: str, status: int) -> None:
    """DNS rebinding: a page of evil.com whose name suddenly leads here."""
    assert ask(Access(frozenset({"localhost", "box.lan"})), host=host)[0] == status


def test_two_hosts_are_none() -> None:
    async def app(*_: Any) -> None:
        raise AssertionError

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    hosts = [(b"host", b"localhost"), (b"host", b"evil.com")]
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": hosts}
    asyncio.run(Guard(app, Access())(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 421


def test_other_sites_may_only_link_to_the_page() -> None:
    access = Access()
    for method in ("GET", "POST"):
        assert ask(access, method, "/api/search", sec_fetch_site="cross-site")[0] == 403
        assert ask(access, method, "/api/search", sec_fetch_site="same-site")[0] == 403  # another port
        assert ask(access, method, "/api/search", sec_fetch_site="same-origin")[0] == 200
    assert ask(access, path="/", sec_fetch_site="cross-site")[0] == 200
    assert ask(access, "POST", "/api/search", origin="http://evil.com")[0] == 403
    assert ask(access, "POST", "/api/search", origin="null")[0] == 403
    assert ask(access, "POST", "/api/search", origin="http://[")[0] == 403
    assert ask(access, "POST", "/api/search", origin="http://127.0.0.1:9999")[0] == 403
    assert ask(access, "POST", "/api/search", origin="http://127.0.0.1:8000")[0] == 200
    assert ask(access, "POST", "/api/search")[0] == 200  # no browser


def test_pages_behind_a_proxy_are_ours_under_the_names_that_the_owner_gave() -> None:
    """nginx with `proxy_set_header Host $host` leaves out the port, and by default it sends its own address."""
    access = Access(frozenset({"localhost", "archive.lan"}), frozenset({"archive.lan"}))
    for host in ("archive.lan", "archive.lan:8443", "127.0.0.1:8000"):
        for origin in ("https://archive.lan:8443", "http://ARCHIVE.lan"):
            assert ask(access, "POST", "/api/search", host=host, origin=origin)[0] == 200
            assert ask(access, "POST", "/api/search", host=host, origin=origin, sec_fetch_site="same-site")[0] == 403
            assert ask(access, "POST", "/api/search", host="evil.com", origin=origin)[0] == 421
        for origin in (
            *("http://evil.com", "http://archive.lan.evil.com", "http://archive.lan@evil.com", "null", "http://["),
            *("http://localhost:9999", "http://127.0.0.1:9999", "archive.lan"),  # other programs of this machine
        ):
            status, _, body = ask(access, "POST", "/api/search", host=host, origin=origin)
            assert status == 403 and b"proxy_set_header Host $http_host" in body and b"--name" in body


def cancelled(*before: dict[str, Any]) -> list[Any]:
    """What is sent if an app that has sent `before` is cancelled."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in before:
            await send(message)
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    async def stop() -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [(b"host", b"[::1]")]}
        task = asyncio.create_task(Guard(app, Access())(scope, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    asyncio.run(stop())
    return sent


def test_a_stop_is_told_to_those_who_wait() -> None:
    start, body = cancelled()
    headers = dict(start["headers"])
    assert start["status"] == 503 and headers[b"retry-after"] == b"30" and b"x-content-type-options" in headers
    assert json.loads(body["body"]) == {"error": "the server is stopping; try again later"}
    begun = {"type": "http.response.start", "status": 200, "headers": []}
    assert [message["status"] for message in cancelled(begun)] == [200]  # an answer that has begun is cut off


def test_a_token_opens_by_header_cookie_or_address() -> None:
    access = Access(token=TOKEN, cookie="stella-8000")
    for wrong in ({}, {"authorization": "Bearer nonsense"}, {"authorization": "Bearer "}, {"cookie": "stella-8000="}):
        status, _, body = ask(access, path="/api/state", **wrong)  # type: ignore[arg-type]
        assert status == 401 and b"a token is needed" in body
    assert ask(access, path="/api/state", authorization=f"Bearer {TOKEN}")[0] == 200
    assert ask(access, path="/healthz")[0] == 200
    assert ask(access, query="token=wrong")[0] == 401
    assert ask(access, path="/api/state", query=f"token={TOKEN}")[0] == 401  # it would stay in logs
    status, headers, _ = ask(access, query=f"token={TOKEN}")
    assert status == 303 and headers["location"] == "/"
    cookie, *rest = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(rest)
    assert ask(access, path="/api/state", cookie=f"other=1; {cookie}")[0] == 200
    for other in ('x={"a":1}', "a b=c", "\x01", "["):  # of another app on this host
        assert ask(access, path="/api/state", cookie=f"{other}; {cookie}; {other}")[0] == 200
    assert ask(access, path="/api/state", cookie="stella-8000=\x01; [")[0] == 401

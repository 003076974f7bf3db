"""Who may ask: host names (against DNS rebinding), a token, requests of our own page alone; and safe headers."""

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from stella.serve.answers import STOPPING

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
}
OPEN = ("/healthz",)  # needs no token
OURS = "only the page itself may ask this"
BEHIND = (
    f"{OURS}; a server in front must send the Host header that it was given (nginx: proxy_set_header Host $http_host), "
    "or stella serve needs --name with the host name of the page"
)
START = "/"  # the only address that a link elsewhere may lead to


@dataclass(frozen=True)
class Access:
    hosts: frozenset[str] = frozenset({"localhost"})  # names besides addresses
    names: frozenset[str] = frozenset()  # of them, those whose pages are ours on every port
    token: str | None = None
    cookie: str = "stella"


class Guard:
    """An app behind its rules."""

    def __init__(self, app: App, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        sending = _with_headers(send)
        if (wrong := self._wrong(scope, headers)) is not None:
            await _answer(sending, *wrong)
        elif self._welcome(scope):
            cookie = f"{self.access.cookie}={self.access.token}; HttpOnly; SameSite=Strict; Path=/"
            await _answer(sending, 303, "", {"location": START, "set-cookie": cookie})
        elif not self._known(scope, headers):
            await _answer(sending, 401, "a token is needed; open the address that stella serve has printed")
        else:
            await self._answered(scope, receive, sending)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What the app answers. A server that stops cancels what takes too long; it is told so if nothing was sent."""
        begun = False

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except asyncio.CancelledError:  # ends here: nobody waits for this task, and uvicorn would print it
            if not begun:
                await _answer(send, STOPPING.status, str(STOPPING), {"retry-after": str(STOPPING.retry)})

    def _wrong(self, scope: Scope, headers: dict[str, list[str]]) -> tuple[int, str] | None:
        host = headers.get("host", [""])
        if len(host) != 1 or not self._named(host[0]):
            return 421, "this name is not served here; use the address that stella serve has printed, or --name"
        [site] = headers.get("sec-fetch-site", ["none"])[:1]
        if site not in ("same-origin", "none") and scope["path"] != START:
            return 403, OURS
        origin = headers.get("origin")
        if origin and scope["method"] not in ("GET", "HEAD") and not self._own(origin[0], host[0]):
            return 403, BEHIND
        return None

    def _own(self, origin: str, host: str) -> bool:
        """Whether a page is ours: of the host that was asked, or of a name that the owner gave.

        Behind another server the host that was asked may lack its port.
        """
        place = origin.partition("://")[2]
        try:
            return place == host or urlsplit(f"//{place}").hostname in self.access.names
        except ValueError:
            return False

    def _named(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self.access.hosts:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _welcome(self, scope: Scope) -> bool:
        """Whether the address has the token, which a cookie then replaces."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return self.access.token is not None and scope["path"] == START and _same(given, self.access.token)

    def _known(self, scope: Scope, headers: dict[str, list[str]]) -> bool:
        if self.access.token is None or scope["path"] in OPEN:
            return True
        [bearer] = headers.get("authorization", [""])[:1]
        if bearer.startswith("Bearer ") and _same(bearer.removeprefix("Bearer "), self.access.token):
            return True
        # a host's cookies are those of all its ports, and `http.cookies` stops at one that it cannot parse
        cookies = ";".join(headers.get("cookie", [])).split(";")
        pairs = [cookie.strip().partition("=") for cookie in cookies]
        return any(name == self.access.cookie and _same(value, self.access.token) for name, _, value in pairs)


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given = [(name, value) for name, value in message.get("headers", []) if name.decode() not in HEADERS]
            ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*given, *ours]}
        await send(message)

    return sending


async def _answer(send: Send, status: int, sentence: str, more: dict[str, str] | None = None) -> None:
    data = json.dumps({"error": sentence}).encode() if sentence else b""
    headers = {"content-type": "application/json", "content-length": str(len(data)), "cache-control": "no-store"}
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in (headers | (more or {})).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})

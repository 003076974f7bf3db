"""Starts and stops the server."""

import ipaddress
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any

from stella.errors import StellaError, require
from stella.runs.stop import Stop
from stella.serve.guard import Access
from stella.serve.jobs import Log
from stella.serve.served import Served
from stella.serve.uploads import Limits

PATIENCE = 3  # seconds in which answers that are under way may end
SHORTEST = 16  # characters of a token
HOST_NAME = r"[A-Za-z0-9_.:-]+"


def serve(
    index: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    names: tuple[str, ...] = (),
    model: str | None = None,
    limits: Limits | None = None,
    log: Log = print,
) -> None:
    """Serve an index until SIGTERM or Ctrl-C. On any address but this machine's own a token is needed."""
    uvicorn = require("uvicorn", "serve")
    require("fastapi", "serve")
    from stella.serve.app import create

    if wrong := next((name for name in names if not re.fullmatch(HOST_NAME, name)), None):
        raise StellaError(f"--name {wrong} is no host name; give one as in http://NAME:{port}")
    if token is not None and (len(token) < SHORTEST or not token.isascii() or not token.isalnum()):
        raise StellaError(f"--token must be at least {SHORTEST} letters and digits; leave it out and one is made")
    if token is None and not _own(host):
        token = secrets.token_hex(16)
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    try:
        served = Served(index, model, limits or Limits(), log)
    except BaseException:
        listening.close()
        raise
    given = frozenset(name.lower() for name in names)
    access = Access(frozenset({"localhost", host.lower(), *given}), given, token, f"stella-{port}")
    config: Any = uvicorn.Config(
        create(served, access),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=PATIENCE,
    )
    public = next(iter(names), socket.gethostname()) if host in ("0.0.0.0", "::") else host  # else no address to open
    shown = f"[{public}]" if ":" in public else public
    log(f"{index}: http://{shown}:{port}/{f'?token={token}' if token else ''}")
    with Stop():  # a signal that uvicorn hands on when it has stopped changes nothing
        uvicorn.Server(config).run(sockets=[listening])


def _own(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None) or 0  # negative: of the name, not of the port
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or error
        raise StellaError(f"{host}:{port} cannot be served ({reason}); choose another --port or --host") from error

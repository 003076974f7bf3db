"""An S3 server on the loopback, which counts what is asked of it and can break off answers."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

ACCESS = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}


class Quiet(WSGIRequestHandler):
    def log(self, *args: Any) -> None: ...


class S3:
    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()  # bytes of each object by its last name, whole answers alone
        self.torn = 0  # so many of the next answers with an object end in their middle
        self.refused = False  # all requests fail
        self.delay = 0.0  # seconds before each answer about an object
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if self.refused:
            start("503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        body = b"".join(self._app(environ, start))
        name = environ["PATH_INFO"].strip("/")
        time.sleep(self.delay if "/" in name else 0)
        if environ["REQUEST_METHOD"] == "GET" and "/" in name:
            with self._lock:
                if self.torn and len(body) > 1000:
                    self.torn -= 1
                    return _torn(body)
                self.sent[name.rpartition("/")[2]] += len(body)
        return [body]

    @contextmanager
    def running(self) -> Iterator["S3"]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()


def _torn(body: bytes) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionResetError("broken off")

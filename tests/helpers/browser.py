"""Pages in a Chromium without a window."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FAKE = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as found:
        made = found.chromium.launch(executable_path=CHROMIUM, args=FAKE)
        yield made
        made.close()


@contextmanager
def opened(browser: Any, address: str) -> Iterator[Any]:
    """A page of the server. An error of its scripts, or a request of another host, is a fault."""
    made = browser.new_page(viewport={"width": 1280, "height": 820})
    faults: list[str] = []
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on("console", lambda message: faults.append(message.text) if "Security" in message.text else None)
    here = (address, "blob:", "data:")
    made.on("request", lambda one: None if one.url.startswith(here) else faults.append(one.url))
    made.goto(address)
    yield made
    made.close()
    assert not faults


def until(page: Any, condition: str, seconds: float = 30.0) -> None:
    """Wait for it. (Playwright's own way evaluates strings in the page, which the page's policy forbids.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)

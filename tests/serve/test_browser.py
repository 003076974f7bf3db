"""The page in Chromium: a sound is given, moments come, one plays at its second with a heat map over it."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.media_files import CLIPS
from helpers.processes import serving
from helpers.served import make_index

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
FAKE = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
DRAWN = (
    "(() => { const c = document.getElementById('heat'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height)"
)
DRAWN += ".data; let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 40; return n / (d.length / 4); })()"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    index = make_index(tmp_path_factory.mktemp("browser"))
    with serving(index.path) as (_, address):
        yield address, index.state().sources[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as found:
        made = found.chromium.launch(executable_path=CHROMIUM, args=FAKE)
        yield made
        made.close()


@pytest.fixture
def page(served: tuple[str, Path], browser: Any) -> Iterator[Any]:
    made = browser.new_page(viewport={"width": 1280, "height": 820})
    faults: list[str] = []
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on("console", lambda message: faults.append(message.text) if "Security" in message.text else None)
    made.on(
        "request", lambda one: faults.append(one.url) if not one.url.startswith((served[0], "blob:", "data:")) else None
    )
    made.goto(served[0])
    yield made
    made.close()
    assert not faults


def until(page: Any, condition: str, seconds: float = 30.0) -> None:
    """Wait for it. (Playwright's own way evaluates strings in the page, which the page's policy forbids.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


def give(page: Any, file: Path) -> None:
    page.set_input_files("#file", str(file))
    page.wait_for_selector(".hit", timeout=180_000)


def test_a_sound_finds_moments_that_play_with_a_heat_map(page: Any, served: tuple[str, Path]) -> None:
    scene = sorted(served[1].glob("*/*.mp4"))[0]
    give(page, scene)
    assert page.inner_text("#summary").endswith("ms") and page.locator(".hit").count() >= 3
    page.check("#to input[value=video]", force=True)
    until(page, "document.querySelector('.hit b').textContent.includes('scenes')")
    until(page, "!video.paused && video.currentTime > 0.1")
    until(page, f"{DRAWN} > 0.02")
    assert page.is_enabled("#toggle") and page.inner_text("#words") == "bars: seconds of its sound that matter"
    page.keyboard.press("h")
    until(page, "getComputedStyle(heat).opacity === '0'")
    assert page.get_attribute("#toggle", "aria-pressed") == "false"
    images = page.locator(".hit img")
    assert all(images.nth(i).get_attribute("alt") for i in range(images.count()))


def test_a_moment_plays_from_its_second_also_where_the_browser_knows_no_mpeg(
    page: Any, served: tuple[str, Path]
) -> None:
    give(page, served[1] / "more/tone.wav")
    late = page.locator(".hit", has_text="face.mpg").first
    late.click()
    until(page, "video.dataset.what === 'clip' && video.readyState > 1")
    start = page.evaluate("document.querySelector('.hit[aria-current] small').textContent").split(" ")[0]
    until(page, "video.currentTime > 0.2")
    shown = page.inner_text("#clock")
    seconds = [float(text.split(":")[1]) for text in (start, shown)]
    assert seconds[0] <= seconds[1] <= seconds[0] + 2.8
    page.evaluate("video.pause(); seek.value = 0.5; seek.dispatchEvent(new Event('input'))")
    until(page, "Math.abs(video.currentTime - 1.28) < 0.15")
    until(page, f"{DRAWN} > 0.02")
    assert page.inner_text("#words").endswith("; darker: not seen by the model")  # it sees the centre square
    page.keyboard.press("h")
    assert page.inner_text("#words") == "bars: seconds of its sound that matter"  # nothing is darker now
    page.keyboard.press("h")
    assert page.inner_text("#words").endswith("; darker: not seen by the model")


def test_keys_choose_play_and_go_back(page: Any, served: tuple[str, Path]) -> None:
    assert not page.is_visible("#keys")  # there is nothing to choose
    give(page, served[1] / "more/tone.wav")
    assert page.is_visible("#keys")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.evaluate("[...document.querySelectorAll('.hit')].findIndex((x) => x.ariaCurrent === 'true')") == 1
    name = page.inner_text("#name")
    page.keyboard.press("m")
    until(page, "document.querySelector('#query small').textContent.startsWith('more like')")
    assert page.inner_text("#query b") == name and page.is_visible("#back")
    page.keyboard.press("Escape")
    until(page, "document.querySelector('#query b').textContent === 'tone.wav'")
    page.keyboard.press("Escape")
    page.wait_for_selector("#ask:not([hidden])")
    assert not page.is_visible("#results")


def test_a_text_that_calls_itself_a_video_is_refused_in_words(page: Any, served: tuple[str, Path]) -> None:
    page.set_input_files("#file", str(served[1] / "more/text.mp4"))
    page.wait_for_selector("#error:not([hidden])")
    assert page.inner_text("#error").startswith("text.mp4: not a media file")
    give(page, CLIPS / "lbax4n.mpg")
    assert not page.is_visible("#error")
    found, asked = page.inner_text("#summary"), page.inner_text("#query b")
    page.set_input_files("#file", str(served[1] / "more/text.mp4"))
    page.wait_for_selector("#error:not([hidden])")
    assert (page.inner_text("#summary"), page.inner_text("#query b")) == (found, asked)  # what was found is still there
    page.check("#to input[value=video]", force=True)
    until(page, "document.querySelector('#summary').textContent.includes('pictures')")


def test_a_recording_is_a_query(page: Any) -> None:
    page.click("#record")
    page.wait_for_selector("#level:not([hidden])")
    page.wait_for_timeout(3000)
    page.click("#record")
    page.wait_for_selector(".hit", timeout=180_000)
    assert page.inner_text("#query b") == "Your recording" and "its sound" in page.inner_text("#query small")


def test_the_index_tells_of_itself(page: Any) -> None:
    until(page, "document.querySelector('#about').textContent === '4 files'")
    assert "base-tiny knows rendered scenes, not the world" in page.inner_text("#caveat")
    page.click("#about")
    page.wait_for_selector("#index[open]")
    until(page, "document.querySelector('#facts').textContent.includes('base-tiny')")
    page.click("#bad summary")
    assert "more/text.mp4: not a media file" in page.inner_text("#bad")
    page.keyboard.press("Escape")
    assert not page.is_visible("#index")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_narrow_screen_nothing_is_cut_off(served: tuple[str, Path], browser: Any, scheme: str) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page.goto(served[0])
    give(page, served[1] / "more/tone.wav")
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.removeprefix("rgb(").rstrip(")").split(","))) > 380) == (scheme == "light")
    page.close()

"""The page in Chromium: a sound is given, moments come, one plays at its second with a heat map over it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import chromium, needs_chromium, opened, until
from helpers.history import made, record
from helpers.media_files import CLIPS
from helpers.processes import serving
from helpers.served import make_index

from stella.serve.learner import Attached

pytestmark = [pytest.mark.slow, needs_chromium]
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
    with chromium() as found:
        yield found


@pytest.fixture
def page(served: tuple[str, Path], browser: Any) -> Iterator[Any]:
    with opened(browser, served[0]) as made:
        yield made


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


def learner(page: Any, tree: dict[str, Any] | None) -> None:
    """Open what the page tells of a learner; None: it cannot be read just now."""
    answer = {"status": 200, "json": tree} if tree else {"status": 503, "json": {"error": "try again"}}
    page.route("**/api/learner", lambda route: route.fulfill(**answer))
    page.evaluate("document.querySelector('#learns').click()")  # hidden: another model made this index
    until(page, "document.querySelector('#doing').textContent !== ''")


def line(page: Any, kind: str) -> list[tuple[float, float]]:
    points = page.get_attribute(f"#curves polyline.{kind}", "points")
    return [(float(x), float(y)) for x, _, y in (point.partition(",") for point in points.split())]


def test_the_learner_tells_where_it_stands_and_draws_its_rounds(page: Any, tmp_path: Path) -> None:
    accuracies, forgetting = [None, 40.0, 60.0, 50.0], [None, 0.0, 1.0, 12.5]
    rounds = [
        record(n) | {"old": a and {"before": a + 1, "after": a, "clips": 54, "error": None}, "F": lost}
        for n, (a, lost) in enumerate(zip(accuracies, forgetting, strict=True), 1)
    ]
    learner(page, Attached(str(made(tmp_path / "mine", rounds).root)).tree())
    assert page.inner_text("#learner-title") == "The learner mine"
    assert page.inner_text("#doing") == "Round 4 is in use; no learner is running."
    names, values = (page.locator(f"#learnt {tag}").all_inner_texts() for tag in ("dt", "dd"))
    facts = dict(zip(names, values, strict=True))
    assert facts["Learnt"] == "1,880 clips in 4 rounds; 100 more set aside to measure with"
    assert facts["Last round"].startswith("470 clips, 1 Aug 2026")
    assert facts["Old clips"] == "accuracy 51.0% before it, 50.0% after, of 54 clips"
    assert facts["Forgetting"] == "12.5 points lost from the best, on average (F)"
    assert facts["Matching"] == "59.4% of pairs told right"
    assert facts["Memory"] == "4 clips, 4 of them distinct: 4 from in"
    old, lost = line(page, "old"), line(page, "lost")  # the first round has neither
    assert [x for x, _ in old] == [x for x, _ in lost] and [x for x, _ in old] == [x for x, _ in line(page, "new")][1:]
    (_, low), (_, high), (_, middle) = old
    assert high < middle < low and low - middle == pytest.approx(middle - high)  # 40, 60, 50, upwards
    (_, none), (_, one), (_, most) = lost
    ticks = page.evaluate("[...document.querySelectorAll('#curves line.tick')].map((one) => +one.getAttribute('y1'))")
    assert ticks == pytest.approx([none, (none + high) / 2, high]) and 0 < high < none < 190  # 0, 30, 60
    assert none - most == pytest.approx(12.5 * (none - one)) and none - one == pytest.approx((low - high) / 20)
    assert page.locator("#curves text.name").all_text_contents() == ["old clips", "new clips", "chance", "forgetting"]
    assert [page.text_content(f"#curves text.{kind}") for kind in ("round", "last")] == ["round 1", "round 4"]
    assert page.inner_text("#forgetting li") == "film.mp4\nrank 1.5 → 7.5, round 1"
    assert page.get_attribute("#forgetting img", "src") == f"/api/learner/clips/{4:024x}"


def test_a_learner_without_figures_draws_nothing(page: Any, tmp_path: Path) -> None:
    none = {"old": None, "new": None, "F": None, "matching": None, "worst": [], "gallery": 0}
    learner(page, Attached(str(made(tmp_path / "mine", [record(1) | none]).root)).tree())
    assert page.inner_text("#doing") == "Round 1 is in use; no learner is running."
    assert page.locator("#learnt dt").all_inner_texts() == ["Learnt", "Last round", "Memory"]
    assert not page.is_visible("#curves") and not page.is_visible("#forgetting")


def test_a_learner_that_cannot_be_read_says_so(page: Any) -> None:
    learner(page, None)
    assert page.inner_text("#doing") == "try again"

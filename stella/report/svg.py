"""Figures as inline SVG whose colours are the page's CSS variables, so that one picture serves light and dark."""

import io
import re
from collections.abc import Callable, Iterable
from functools import wraps
from html import escape
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.figure import Figure

# matplotlib needs real colours: these stand for variables and are exchanged when the picture is written.
INK, FAINT, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = [f"#05{i:02x}05" for i in range(8)]
RAMP = [f"#06{i:02x}06" for i in range(101)]  # percent of the way from the first task's colour to the last's
STYLES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5))]  # colour is never all that tells lines apart
MARKERS = ["o", "s", "D", "^", "v", "P", "X", "h"]
SETTINGS: dict[str, Any] = {
    "font.size": 8.5,
    "text.color": INK,
    "text.parse_math": False,  # a name may hold a dollar sign
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "stella",
}
P = ParamSpec("P")
T = TypeVar("T")


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    @wraps(draw)
    def inner(*args: P.args, **kwargs: P.kwargs) -> T:
        with matplotlib.rc_context(SETTINGS):
            return draw(*args, **kwargs)

    return inner


def new_figure(width: float, height: float, columns: int = 1, **more: Any) -> tuple[Any, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False, gridspec_kw=more or None)[0]


def to_svg(figure: Any, label: str) -> str:
    """The picture without the ids and the size matplotlib gives it, colours as variables."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?:[a-z]+[A-Za-z0-9]*_\d+|patch.*?)"', "", text)
    box = re.search(r'viewBox="([^"]+)"', text)
    assert box is not None
    text = f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(label)}">{text[text.index(">") + 1 :]}'
    for colour, value in _colours():
        text = text.replace(colour, value)
    return text


def _colours() -> Iterable[tuple[str, str]]:
    yield from ((INK, "var(--ink)"), (FAINT, "var(--faint)"), (GRID, "var(--line)"), (PAPER, "var(--card)"))
    yield from ((colour, f"var(--c{i})") for i, colour in enumerate(SERIES))
    yield from ((c, f"color-mix(in oklab, var(--last) {i}%, var(--first))") for i, c in enumerate(RAMP))

"""Figures as inline SVG. Their colours are CSS variables of the page, so one figure serves light and dark."""

import io
import re
import warnings
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import matplotlib
import matplotlib.image
import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure

# Placeholders: matplotlib needs real colours, and `to_svg` replaces these with CSS variables.
INK, FAINT, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = [f"#05{i:02x}05" for i in range(16)]  # `colours.py` says whose
RAMP = [f"#06{i:02x}06" for i in range(101)]  # from the first task's colour to the last task's, in percent
VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--line)", PAPER: "var(--card)"}
VARIABLES |= {colour: f"var(--c{i})" for i, colour in enumerate(SERIES)}
VARIABLES |= {colour: f"color-mix(in oklab, var(--last) {i}%, var(--first))" for i, colour in enumerate(RAMP)}
STYLES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5))]  # lines differ in style too, not only in colour
MARKERS = ["o", "s", "D", "^", "v", "P", "X", "h"]
SETTINGS: dict[str, Any] = {
    "font.size": 8.5,
    "legend.fontsize": 8,
    "text.parse_math": False,  # a name may contain a dollar sign
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), FAINT),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.8),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size", "ytick.minor.size"), 0),
    "axes.axisbelow": True,
    "grid.color": GRID,
    "svg.fonttype": "none",
    "svg.hashsalt": "stella",
}
F = TypeVar("F", bound=Callable[..., Any])


def styled(draw: F) -> F:
    """Decorate a function that draws: it uses SETTINGS, and nothing else does."""
    decorated: F = matplotlib.rc_context(SETTINGS)(draw)
    return decorated


def new_figure(width: float, height: float, columns: int = 1, **more: Any) -> tuple[Any, Any]:
    """A figure in inches and its row of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False, gridspec_kw=more or None)[0]


def heat_png(values: Sequence[Sequence[float]]) -> str:
    """A map of values from 0 to 1 as a PNG in base64: warm and opaque where they are high. A browser smooths it."""
    buffer, heat = io.BytesIO(), np.asarray(values, dtype=np.float64)
    colours = matplotlib.colormaps["inferno"](0.25 + 0.75 * heat)  # [rows, columns, 4]
    colours[..., 3] = 0.75 * heat
    matplotlib.image.imsave(buffer, colours, format="png")
    return b64encode(buffer.getvalue()).decode()


def to_svg(figure: Any, label: str) -> Markup:
    """The figure as an `<svg>` element without matplotlib's ids and fixed size; safe to inline, texts are escaped."""
    buffer = io.StringIO()
    with warnings.catch_warnings():  # the browser draws the texts, in fonts of its own
        warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?:[a-z]+[A-Za-z0-9]*_\d+|patch.*?)"', "", text)
    box = re.search(r'viewBox="([^"]+)"', text)
    assert box is not None
    text = f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(label)}">{text[text.index(">") + 1 :]}'
    for colour, value in VARIABLES.items():
        text = text.replace(colour, value)
    return Markup(text)

"""Names in any script in pictures: drawn with whatever fonts this system has, spelt out where it has none."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from stella.errors import plain
from stella.files import whole

NO_FONTS = ("Last Resort", "cm", "STIX", "DejaVu Math")  # placeholders, and symbols under the codes of letters


def save(figure: Any, path: Path) -> None:
    """Write a figure. Names of somebody else's in its texts are neither formulas nor boxes."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if shown := text.get_text():
            lines = [drawable(line) for line in shown.split("\n")]
            text.set(text="\n".join(lines), parse_math=False, fontfamily=families("".join(lines)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as fresh:
        figure.savefig(fresh, format=path.suffix.removeprefix("."), dpi=110)


def drawable(text: str) -> str:
    """The text with every character that no font of this system has spelt out: `\\u4e2d`."""
    return "".join(c if family_of(c) else ascii(c)[1:-1] for c in plain(text))


def families(text: str) -> list[str]:
    """The fonts that have all characters of a drawable text, the usual one first."""
    return list(dict.fromkeys(["DejaVu Sans", *(found for c in sorted(set(text)) if (found := family_of(c)))]))


@cache
def family_of(character: str) -> str | None:
    """The first font that has this character; None if there is none."""
    return next((name for name, path in _fonts().items() if ord(character) in _characters(path)), None)


@cache
def _fonts() -> dict[str, str]:
    """The file of each family, upright fonts of normal weight first, DejaVu Sans before all others."""
    from matplotlib.font_manager import fontManager

    def order(font: Any) -> tuple[bool, bool, bool, str]:
        return font.name != "DejaVu Sans", font.style != "normal", font.weight not in (400, "normal"), font.name

    found: dict[str, str] = {}
    for font in sorted(_usable(fontManager.ttflist), key=order):
        found.setdefault(font.name, font.fname)
    return found


def _usable(fonts: list[Any]) -> Iterator[Any]:
    yield from (font for font in fonts if not font.name.startswith(NO_FONTS))


@cache
def _characters(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):  # coloured pictures instead of outlines, or a damaged file
        return frozenset()

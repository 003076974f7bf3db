"""The paper's own figures, from paper.toml."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import nan
from pathlib import Path
from typing import Any

from stella.config import read_toml
from stella.errors import StellaError

DATASET = "Continual-VS"
WAYS = ("a2v", "v2a")


@dataclass(frozen=True)
class Row:
    """A method in one of the paper's tables; nan for a dash or a missing column."""

    table: str  # the table's label in the paper
    figures: dict[str, dict[str, float]]  # by direction: "A", "F" and, in some tables, "1_A", "1_F", …
    gb: float = nan
    speed: float = nan  # clips per second

    def mean(self, figure: str) -> float:
        """The mean over both directions, which the paper reports separately."""
        return sum(self.figures[way][figure] for way in WAYS) / len(WAYS)

    def show(self, figure: str) -> str:
        """Both directions as the paper prints them: audio to video, video to audio."""
        values = [self.figures[way][figure] for way in WAYS]
        return ", ".join(format_figure(value, 2) for value in values) if values[0] == values[0] else "–"


@cache
def tables() -> dict[str, Any]:
    return read_toml(Path(__file__).with_name("paper.toml"))


def row(names: Sequence[str], variant: str, dataset: str = DATASET) -> Row | None:
    """The first row with this name in these tables, if any."""
    for name in names:
        if name not in tables():
            raise StellaError(f"the paper has no table {name!r}; choose from {', '.join(tables())}")
        table = tables()[name]
        if found := table.get(dataset, {}).get(variant):
            figures = {way: dict(zip(table["columns"], found[way], strict=True)) for way in WAYS}
            return Row(table["label"], figures, found.get("gb", nan), found.get("speed", nan))
    return None


def format_figure(value: float, digits: int) -> str:
    """A figure, or a dash for nan."""
    return f"{value:z.{digits}f}" if value == value else "–"

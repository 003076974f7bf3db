"""Every table and figure of the paper by its number, with what is here for it."""

from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from stella.config import build, read_toml


@dataclass(frozen=True)
class Item:
    number: str
    label: str  # in the paper's source
    what: str
    command: str = ""
    result: str = ""  # a folder of the repository
    why: str = ""  # what is missing, or where else to look


def items() -> list[Item]:
    tree = read_toml(Path(__file__).with_name("coverage.toml"))
    return [build(Item, each, f"item {number}.") for number, each in enumerate(tree["item"], 1)]


def coverage() -> Table:
    table = Table("paper", "what", "here", "result", "remark", box=box.SIMPLE_HEAD, title="The paper, one by one")
    for item in items():
        words = (item.what, item.command or "–", item.result or "–", item.why)
        table.add_row(Text(item.number, "bold"), *(Text(word) for word in words))
    return table

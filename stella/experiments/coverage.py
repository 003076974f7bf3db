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
    """A row each. Commands and folders wrap between words in a narrow terminal and are never cut."""
    table = Table("paper", "what", box=box.SIMPLE_HEAD, title="The paper, one by one", title_justify="left")
    table.add_column("here: the command, its results, a remark", overflow="fold")
    for item in items():
        here = "\n".join(filter(None, (item.command, item.result, item.why)))
        table.add_row(Text(item.number, "bold"), Text(item.what), Text(here))
    return table

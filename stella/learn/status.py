"""`stella learn HOME --status`."""

from datetime import datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from stella.errors import number_of
from stella.files import Line
from stella.learn.home import Home
from stella.learn.measure import fell, judged, matched
from stella.learn.records import learnt

SHOWN = 20  # newest rounds
MEANING = (
    "A: mean of R@1/5/10 among clips set aside, before→after the round, %",
    "F: points lost since rounds were new; gap: between sounds and pictures",
    "match: pairs that the matching module told right; bad: unusable clips",
)


def status_table(home: Home) -> Group:
    """The newest rounds, and what is in use."""
    home.check()
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)  # 80 columns are enough
    for name in (
        "round",
        f"ended, {datetime.now().astimezone():%Z}",
        "clips",
        "aside",
        "A old",
        "A new",
        "among",
        "F",
        "gap",
        "match",
        "bad",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    history = home.history()
    for record in history[-SHOWN:]:
        table.add_row(*_row(record))
    current, following = home.current, home.next
    lines = list(MEANING) if history else []
    lines.append(home.in_use if current else "nothing is learnt yet")
    if apart := following.kept_apart:
        lines.append(f"round {following.number} is kept apart: A on old clips fell by {fell(apart)} ({judged(apart)})")
        lines.append("take it with --accept, or throw it away with --drop")
    elif following.plan.exists():
        lines.append(f"round {following.number} is in progress: {number_of(home.plan(following.number).clips, 'clip')}")
    if kept := home.kept:
        lines.append(f"--rollback N goes back; kept is the state after round {', '.join(map(str, kept))}")
    return Group(table, *map(Text, lines))


def _row(record: Line) -> list[str]:
    return [
        str(record["round"]),
        datetime.fromisoformat(record["ended"]).astimezone().strftime("%d %b %H:%M"),
        f"{learnt(record):,}",
        str(record["set_aside"]),
        *(_pair(record[name]) for name in ("old", "new")),
        f"{record['gallery']:,}" if record["gallery"] else "–",
        *(_figure(record[name]) for name in ("F", "gap")),
        matched(record, 0),
        f"{sum(record['skipped'].values()):,}",
    ]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _pair(each: dict[str, Any] | None) -> str:
    return "–" if each is None else f"{each['before']:.1f}→{each['after']:.1f}"

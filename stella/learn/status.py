"""`stella learn HOME --status`."""

from collections.abc import Sequence
from datetime import datetime
from textwrap import wrap
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from stella.errors import number_of
from stella.files import Line
from stella.learn.home import Home
from stella.learn.measure import caveats, chance_of, fell, judged, matched
from stella.learn.records import learnt

SHOWN = 20  # newest rounds


def status_table(home: Home) -> Group:
    """The newest rounds, and what is in use."""
    home.check()
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)  # 80 columns are enough
    history = home.history()
    rows = [_row(record) for record in history[-SHOWN:]]
    columns = [name for name in (rows[0] if rows else ()) if any(row[name] not in ("–", "0") for row in rows)]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    current, following = home.current, home.next
    lines = _meaning(columns, history) if history else []
    lines.append(home.in_use if current else "nothing is learnt yet")
    if apart := following.kept_apart:
        lines.append(f"round {following.number} is kept apart: A on old clips fell by {fell(apart)} ({judged(apart)})")
        lines.append("take it with --accept, or throw it away with --drop")
    elif following.plan.exists():
        lines.append(f"round {following.number} is in progress: {number_of(home.plan(following.number).clips, 'clip')}")
    if kept := home.kept:
        lines.append(f"--rollback N goes back to the state after a round; kept: {', '.join(map(str, kept))}")
    return Group(table, *map(Text, lines))


def _row(record: Line) -> dict[str, str]:
    """The cells by their headings."""
    ended = datetime.fromisoformat(record["ended"]).astimezone()
    return {
        "round": str(record["round"]),
        f"ended, {datetime.now().astimezone():%Z}": ended.strftime("%d %b %H:%M"),
        "clips": f"{learnt(record):,}",
        **{f"A {name}": _pair(record[name]) for name in ("old", "new")},
        "among": f"{record['gallery']:,}" if record["gallery"] else "–",
        "chance": _figure(chance_of(record)),
        **{name: _figure(record[name]) for name in ("F", "gap")},
        "match": matched(record, 0),
        "bad": f"{sum(record['skipped'].values()):,}",
    }


def _meaning(columns: Sequence[str], history: Sequence[Line]) -> list[str]:
    """What the columns are, and what is too little in the last round."""
    last = history[-1]
    both = [number_of(each["clips"], f"{name} clip") for name in ("old", "new") if (each := last[name])]
    of = f", in round {last['round']} of {' and '.join(both)}" if both else ""
    meaning = {
        "among": f"among: clips measured, of {sum(record['set_aside'] for record in history):,} set aside",
        "chance": f"A: mean of R@1/5/10 among them, before→after the round, %{of}; chance: A of guessing",
        "F": "F: points lost since rounds were new",
        "gap": "gap: between sounds and pictures",
        "match": "match: pairs that the matching module told right (half by chance)",
        "bad": "bad: unusable clips",
    }
    said = "; ".join(words for name, words in meaning.items() if name in columns)
    return [line for each in (said, *caveats(last)) for line in wrap(each, 79)]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:z.1f}"


def _pair(each: dict[str, Any] | None) -> str:
    return "–" if each is None else f"{each['before']:.1f}→{each['after']:.1f}"

"""HOME/page.html: what the learner knows, what it keeps, and what it is forgetting. One file that loads nothing."""

import base64
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from stella.data.shards import DamagedSampleError, read_head
from stella.data.skipped import in_words
from stella.errors import number_of
from stella.files import Line, write_text
from stella.learn.home import Home
from stella.learn.measure import caveats, chance_of, fell, judged, matched
from stella.learn.records import learnt
from stella.report.page import TEMPLATES
from stella.report.svg import FAINT, MARKERS, PAPER, SERIES, STYLES, new_figure, styled, to_svg

SHOWN = 30  # newest rounds in the table
CURVES = (  # the last on top: figures are often equal
    ("new", "before", "new clips, before it", {"color": SERIES[2], "ls": STYLES[2], "marker": "D", "mfc": PAPER}),
    ("new", "after", "new clips", {"color": SERIES[1], "ls": STYLES[1], "marker": "s"}),
    ("old", "after", "old clips", {"color": SERIES[0], "ls": STYLES[0], "marker": "o"}),
)


def drawn(home: Home) -> str:
    """Write the page; returns why it cannot be, else nothing. No round fails for that."""
    try:
        write_page(home)
    except OSError as error:
        remedy = "free space, or mend its disk: it is drawn with the next round at the latest"
        return f"{home.root / 'page.html'} cannot be written ({error.strerror}); {remedy}"
    return ""


def write_page(home: Home) -> Path:
    """Write the page of all rounds in use, and of one that is kept apart."""
    path = home.root / "page.html"
    write_text(path, render(home))
    return path


def render(home: Home) -> str:
    history, apart = home.history(), home.next.kept_apart
    shown = [*history, apart] if apart else history
    last = shown[-1] if shown else None
    lost = _lost(shown) if any(record["F"] is not None for record in shown) else None
    measured = any(record["old"] or record["new"] for record in shown)
    little = [f"{line[0].upper()}{line[1:]}." for line in (caveats(last) if last else [])]
    return TEMPLATES.get_template("templates/learner.html.j2").render(
        name=home.root.absolute().name,
        story=_story(history),
        notes=[*([_apart(apart)] if apart else []), *little],
        last=f"round {last['round']}{', which is kept apart' if apart else ''}" if last else "",
        measured=f"{last['gallery']:,}" if last else "",
        curves=_curves(shown, 4.3 if lost else 7.6) if measured else None,
        lost=lost,
        memory=_memory(last["memory"], shown) if last and last["memory"] and len(shown) > 1 else None,
        sources=list((last["memory"] or {}).get("sources", {}).items()) if last else [],
        held=_held(last["memory"]) if last and last["memory"] else "",
        worst=[_picture(home, each) for each in (last["worst"] if last else [])],
        rows=[_row(record, record is apart) for record in reversed(shown[-SHOWN:])],
        more=max(0, len(shown) - SHOWN),
    )


def _story(history: Sequence[Line]) -> list[str]:
    if not history:
        return ["Nothing is learnt yet."]
    first, last = history[0], history[-1]
    clips = sum(map(learnt, history))
    aside = sum(record["set_aside"] for record in history)
    measured = f"{aside:,} set aside, {last['gallery']:,} of them measured"
    if last["gallery"] < 2:
        measured = f"too few set aside to measure with ({aside:,})"
    rounds = number_of(len(history), "round")
    story = [f"{number_of(clips, 'clip')} learnt in {rounds} since {_date(first)}; {measured}."]
    if last["old"]:
        story.append(
            f"In round {last['round']}, which is in use, on {_date(last)}, accuracy on old clips went from "
            f"{last['old']['before']:.1f}% to {last['old']['after']:.1f}%; chance is {chance_of(last):.1f}%."
        )
    if last["F"] is not None:
        story.append(f"Since each round was new, its clips have lost {last['F']:z.1f} points from their best (F).")
    return story


def _apart(record: Line) -> str:
    return (
        f"Round {record['round']} is kept apart and not in use: A on old clips fell by {fell(record)}, more than "
        f"{record['guard']:g} ({judged(record)}). Take it with --accept, or throw it away with --drop."
    )


@styled
def _curves(history: Sequence[Line], width: float) -> Markup:
    """A over time, beside chance."""
    figure, (axis,) = new_figure(width, 2.7)
    for which, when, label, look in CURVES:
        size = 8 if when == "before" else 4  # seen around the one on top of it
        _line(axis, [(_time(r), r[which][when]) for r in history if r[which]], label=label, ms=size, **look)
    guessed = [(_time(r), value) for r in history if (value := chance_of(r)) is not None]
    _line(axis, guessed, label="chance", color=FAINT, ls=STYLES[2], lw=1.1, marker="_")
    axis.set(ylabel="accuracy A, %", ylim=(0, None))
    axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, columnspacing=1.2)
    _time_axis(axis, history)
    return to_svg(figure, "accuracy over time")


@styled
def _lost(history: Sequence[Line]) -> Markup:
    """F over time."""
    figure, (axis,) = new_figure(3.3, 2.7)
    points = [(_time(r), r["F"]) for r in history if r["F"] is not None]
    _line(axis, points, color=SERIES[3], marker=MARKERS[3], ms=4)
    axis.set(ylabel="forgetting F, points", ylim=(0, max(1.0, *(f for _, f in points))))  # noise fills no axis
    _time_axis(axis, history)
    return to_svg(figure, "forgetting over time")


def _line(axis: Any, points: Sequence[tuple[datetime, float]], **look: Any) -> None:
    from matplotlib.dates import date2num

    if points:
        axis.plot(date2num([x for x, _ in points]), [y for _, y in points], **{"lw": 1.6, "clip_on": False, **look})


def _time_axis(axis: Any, history: Sequence[Line]) -> None:
    """One for all rounds, whether they were measured or not."""
    from matplotlib.dates import date2num

    first, last = _time(history[0]), _time(history[-1])
    margin = 0.1 * (last - first).total_seconds() / 86400 or 1 / 24
    axis.set_xlim(date2num(first) - margin, date2num(last) + margin)
    labels = time_labels(first, last)
    axis.set_xticks(date2num(list(labels.values())), list(labels))
    axis.grid(axis="y")


def time_labels(first: datetime, last: datetime) -> dict[str, datetime]:
    """What to write below the start, the middle and the end of a time; nothing twice."""
    days = (last - first).total_seconds() / 86400
    style = "%Y-%m-%d" if days > 364 else "%d %b" if days > 4 else "%d %b %H:%M" if days > 0.99 else "%H:%M"
    ticks = [first + (last - first) * share for share in (1, 0.5, 0)]
    return {tick.strftime(style): tick for tick in ticks}


def _held(memory: dict[str, Any]) -> str:
    held, distinct = sum(memory["rounds"]), memory.get("distinct")
    return f"{number_of(held, 'clip')}" + (f", {distinct:,} of them distinct." if distinct else ".")


def by_chance(held: int, history: Sequence[Line]) -> list[float]:
    """How many clips of each round a reservoir of `held` would have by chance: each epoch offers all its clips."""
    offered = [record["epochs"] * learnt(record) for record in history]
    return [held * clips / max(1, sum(offered)) for clips in offered]


@styled
def _memory(memory: dict[str, Any], history: Sequence[Line]) -> Markup:
    """How many clips of the memory came in each of several rounds, beside what chance would keep."""
    counts = memory["rounds"]
    expected = by_chance(sum(counts), history)
    figure, [axis] = new_figure(7.6, 2.1)
    axis.bar(range(1, len(counts) + 1), counts, color=SERIES[0], width=0.8)
    axis.step(
        [x + 0.5 for x in range(len(expected) + 1)],
        [expected[0], *expected],
        color=FAINT,
        lw=1.2,
        label="what chance would keep",
    )
    axis.set(
        xlabel="round", ylabel="clips in memory", xlim=(0.4, len(counts) + 0.6), ylim=(0, 1.05 * max([1, *counts]))
    )
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 1.0))
    axis.grid(axis="y")
    return to_svg(figure, "clips in memory by round")


def _picture(home: Home, worst: dict[str, Any]) -> dict[str, Any]:
    """The first and the last stored frame of a clip, with its ranks."""
    frames: list[str] = []
    with suppress(OSError, DamagedSampleError), (home.held / f"{worst['clip']}.tar").open("rb") as file:
        head = read_head(file, 0)
        count = len(head.offsets) - 1
        frames = [base64.b64encode(head.read(file, i)).decode() for i in sorted({0, count - 1})]
    ranks = f"rank {worst['before']:g} → {worst['after']:g}"  # means of two
    return {"id": Path(worst["id"]).name, "round": worst["round"], "ranks": ranks, "frames": frames}


def _row(record: Line, apart: bool) -> list[str]:
    old, new = record["old"], record["new"]
    return [
        str(record["round"]) + (" (kept apart)" if apart else ""),
        _date(record),
        f"{learnt(record):,}",
        *(
            "–" if each is None else f"{each['before']:.1f} → {each['after']:.1f} of {each['clips']:,}"
            for each in (old, new)
        ),
        f"{record['gallery']:,}" if record["gallery"] else "–",
        *("–" if each is None else f"{each:z.1f}" for each in (chance_of(record), record["F"], record["gap"])),
        matched(record) + (" pairs" if record.get("pairs") else ""),
        in_words(record["skipped"]) or "–",
        f"{record['seconds']['all']:.0f} s",
    ]


def _time(record: Line) -> datetime:
    return datetime.fromisoformat(record["ended"]).astimezone()


def _date(record: Line) -> str:
    return _time(record).strftime("%Y-%m-%d %H:%M %Z")

"""One self-contained HTML page about some runs. It loads nothing, so it can be mailed or archived.

This module computes what the page shows; `templates/` and `page.css` decide how it looks.
"""

import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from stella.data.config import class_names
from stella.data.skipped import in_words
from stella.errors import StellaError, number_of, plain
from stella.evaluate.forgetting import Accuracy
from stella.evaluate.retrieval import KS
from stella.files import Line, read_json, write_text
from stella.methods import METHODS
from stella.report import gap, plots
from stella.report.colours import colours
from stella.report.downstream import story
from stella.report.svg import heat_png
from stella.report.tables import DIRECTIONS, below_the_line, named_ceilings, results_table
from stella.runs.folder import RunFolder
from stella.runs.record import (
    Group,
    RunRecord,
    Spread,
    ceilings,
    flatten,
    galleries,
    group,
    mean_recall,
    read_run,
    unlike,
)

Downstream = dict[str, list[dict[str, Any]]]  # lines by task, of `report.downstream`
LISTED = 20  # skipped clips named on the page
IN_STORY = 5  # groups named in the first sentences; of more, only the best and the worst
MAIN = [(*keys, figure) for keys in ((), *((direction,) for direction in DIRECTIONS)) for figure in "AF"]
EVERY = [(direction, str(k), figure) for direction in DIRECTIONS for k in KS for figure in "AF"]
TEMPLATES = Environment(
    loader=PackageLoader("stella", "report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_page(runs: Sequence[Path | str], out: Path | str, beside: Mapping[str, str] | None = None) -> Path:
    """Read run folders and write the page to `out`. Runs that differ only in their seed are shown as one. `beside` has
    the names of files in the same folder to link to, and what each is."""
    if not runs:
        raise StellaError("there is no run to report on; name at least one run folder")
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, render([read_run(path) for path in runs], beside=beside))
    return out


def write_readable(
    runs: Sequence[Path], out: Path, downstream: Downstream | None = None
) -> tuple[list[RunRecord], list[str]]:
    """Write the page of those runs that can be shown; returns them, and a sentence for each that cannot."""
    records: list[RunRecord] = []
    left_out: list[str] = []
    for run in runs:
        try:
            records.append(read_run(run))
        except StellaError as error:
            left_out.append(str(error))
    for beside in (False, True):  # those that cannot be shown alone; then those that do not fit the ones before
        if records and _tried(records)[0] is None:
            shown: list[RunRecord] = []
            for record in records:
                found, why = _tried([*(shown if beside else ()), record])
                if found is None:
                    left_out.append(f"{record.path} is damaged ({why}); restore it or leave it out")
                else:
                    shown.append(record)
            records = shown
    page = _tried(records, downstream)[0]
    if page is None or not (records or downstream):
        raise StellaError(f"none of these runs can be shown: {'; '.join(left_out)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page)
    return records, left_out


def _tried(records: Sequence[RunRecord], downstream: Downstream | None = None) -> tuple[str | None, str]:
    """The page, or None and what is wrong: a damaged record may lead to any exception."""
    try:
        results_table(group(records), ceilings(records))
        return render(records, downstream), ""
    except KeyError as error:
        return None, f"its records lack {error}"
    except Exception as error:
        return None, f"its records do not fit together: {error}"


def render(
    records: Sequence[RunRecord], downstream: Downstream | None = None, beside: Mapping[str, str] | None = None
) -> str:
    groups, cues = group(records), ceilings(records)
    unfinished = [f"{g.label}, seed {run.seed}, is {run.status}." for g in groups for run in g.runs if not run.finished]
    own = colours([g.method for g in groups])
    matrices = [[_accuracy(version) for version in g.versions] for g in groups]
    top = max((float(acc.max()) for several in matrices for acc in several if acc.size), default=0.0) or 1.0
    return TEMPLATES.get_template("templates/page.html.j2").render(
        title="STELLA: " + ", ".join([g.label for g in groups] or ["downstream tasks"]),
        heading=_heading(groups) if groups else "What the models are good for",
        story=(_story(groups, cues) if groups else []) + story(downstream or {}),
        facts=_facts(records, groups) if groups else [],
        notes=[f"{warning}." for warning in [unlike(records)] if warning] + unfinished + _notes(records),
        results=_results(groups, cues) if any(g.finished for g in groups) else None,
        matrices=[
            _matrix(version, acc, top) | {"colour": own[i], "slow": version is not g}
            for i, g in enumerate(groups)
            for version, acc in zip(g.versions, matrices[i], strict=True)
            if acc.size
        ],
        downstream=downstream,
        beside=beside,
        methods=[_method(g, colour) for g, colour in zip(groups, own, strict=True)],
    )


def _heading(groups: Sequence[Group]) -> str:
    """What was trained, and on which data."""
    names = list(dict.fromkeys(g.runs[0].title for g in groups))
    listed = names if len(names) <= IN_STORY else [number_of(len(names), "method")]
    sources = sorted({str(_source(run)) for g in groups for run in g.runs})
    return f"Continual pre-training: {plain(', '.join(listed))} on {plain(', '.join(sources))}"


def _source(run: RunRecord) -> object:
    return run.config.get("data", {}).get("source", "unknown data")


def _notes(records: Sequence[RunRecord]) -> list[str]:
    """What the runs noted of their weights and data, each once."""
    return list(dict.fromkeys(f"{plain(note)}." for record in records for note in record.notes))


ONE_SEED = "One seed illustrates, it does not rank methods"
BELOW_CLASS = "These runs stay below what knowing the class of each clip alone would reach."


def _story(groups: Sequence[Group], cues: Mapping[str, float] | None) -> list[str]:
    """How much each method forgot, or its tasks gained, and its accuracy at the end beside chance. Best first."""
    forgot = sorted((g for g in groups if g.spread("F").values), key=lambda g: g.spread("F").mean)
    scored = sorted((g for g in groups if g.spread("A").values), key=lambda g: -g.spread("A").mean)
    if not scored:
        return ["No run has finished yet."]
    if len(sizes := galleries(run for g in groups for run in g.runs)) > 1:
        return [f"Evaluated on galleries of {' and '.join(map(str, sizes))} clips, so these runs cannot be ranked."]
    chance = f"; chance is {cues['chance']:.1f}%" if cues else ""
    gained = [g for g in forgot if g.spread("F").short.startswith("-")]
    lost = [g for g in forgot if g not in gained]
    story = [f"{_named(gained, 'F', 'forgot nothing: tasks gained {} points', -1)}."] if gained else []
    story += [f"{_named(lost, 'F', 'forgot {} points')}."] if lost else []
    story += [f"Accuracy after the last task: {_named(scored, 'A', '{}%')}{chance}."]
    if cues and max(value for g in scored for value in g.spread("A").values) < cues.get("class", 0.0):
        story.append(f"{BELOW_CLASS[:-1]} ({cues['class']:.1f}%).")
    if len(scored) > 1 and all(len(g.finished) == 1 for g in scored):
        story.append(f"{ONE_SEED}.")
    return story


def _named(ranked: Sequence[Group], figure: str, first: str, sign: int = 1) -> str:
    """`STELLA+ forgot 9.8 points (7.1 with slow weights), Finetune 23.5`; of many groups the first and the last."""
    texts: list[str] = []
    for g in ranked if len(ranked) <= IN_STORY else (ranked[0], ranked[-1]):
        value, slow = (
            f"{sign * s.mean:z.1f}" if s.values else "" for s in (g.spread(figure), g.spread("slow", figure))
        )
        beside = f" ({slow} with slow weights)" if slow else ""
        texts.append(f"{g.label} {value if texts else first.format(value)}{beside}")
    return (", " if len(texts) == len(ranked) else ", …, ").join(texts)


def _facts(records: Sequence[RunRecord], groups: Sequence[Group]) -> list[str]:
    tasks = {len(run.tasks) for run in records if run.tasks}
    gallery = {sum(clips) for run in records for line in run.evaluations if (clips := line.get("clips"))}
    places = [place for run in records for place in (*run.environment.get("earlier", ()), run.environment)]
    commits = sorted({str(place["commit"])[:10] for place in places if place.get("commit")})
    machines = {_machine(run.environment) for run in records} - {""}
    return [
        f"{number_of(len(records), 'run')} in {_folder(records)}",
        number_of(len(groups), "configuration"),
        *(number_of(n, "task") for n in tasks if len(tasks) == 1),
        *(f"gallery of {number_of(n, 'clip')}" for n in gallery if len(gallery) == 1),
        *([f"commit {', '.join(commits)}"] if commits else []),
        *(machines if len(machines) == 1 else []),
    ]


def _folder(records: Sequence[RunRecord]) -> str:
    """The name of the folder that holds all of them."""
    return plain(Path(os.path.commonpath([run.path.resolve().parent for run in records])).name or "/")


def _results(groups: Sequence[Group], cues: Mapping[str, float] | None) -> dict[str, Any]:
    versions = [(i, slow, one) for i, g in enumerate(groups) for slow, one in enumerate(g.versions)]
    own = colours([g.method for g in groups])
    main = [[one.spread(*keys) for keys in MAIN] for *_, one in versions]
    best = _best(main) if unlike([run for g in groups for run in g.runs]) is None else set()
    rows = [
        {
            "label": one.label,
            "colour": own[i],
            "slow": bool(slow),
            "runs": one.progress,
            "main": [{"text": str(s), "best": (row, column) in best} for column, s in enumerate(main[row])],
            "every": [str(one.spread(*keys)) for keys in EVERY],
        }
        for row, (i, slow, one) in enumerate(versions)
    ]
    return {
        "rows": rows,
        "headings": [(DIRECTIONS[direction], f"R@{k} {figure}") for direction, k, figure in EVERY],
        "ceilings": [(name, f"{value:.1f}") for name, value in named_ceilings(cues or {}).items()],
        "below": below_the_line(cues),
        "seeds": any(len(g.finished) > 1 for g in groups),
        "slow": len(versions) > len(groups),
        "comparison": plots.comparison(groups, cues),
        "course": plots.course(groups),
        "gaps": gap.gaps(groups) if len(groups) > 1 else None,
        "pairs": gap.pairs(groups),
    }


def _best(table: Sequence[Sequence[Spread]]) -> set[tuple[int, int]]:
    """The cells (row, column) that are best in their column. A row without F (Multitask) does not compete."""
    rivals = [row for row, spreads in enumerate(table) if spreads[1].values]
    if len(rivals) < 2:
        return set()
    best = set()
    for column, (*_, figure) in enumerate(MAIN):
        ranked = sorted(rivals, key=lambda row: table[row][column].mean)
        best.add((ranked[0] if figure == "F" else ranked[-1], column))
    return best


def _method(g: Group, colour: int) -> dict[str, Any]:
    about = METHODS[g.method].summary if g.method in METHODS else ""
    examples = _examples(g)
    return {
        "label": g.label,
        "colour": colour,
        "about": f"{about[0].upper()}{about[1:]}." if about else "",
        "examples": examples,
        "heat": any(query["heat"] for query in examples),
        "framed": any(hit["right"] for query in examples for hit in query["found"]),
        "class_names": class_names(_source(g.runs[0])),
        "fading": _fading(g),
        "held": _held(g),
        "figures": {draw.__name__: draw(g) for draw in (*plots.PANELS, gap.gap)},
        "runs": _runs(g),
        "skipped": _skipped(g),
        "settings": _settings(g),
    }


def _furthest(g: Group) -> list[RunRecord]:
    """The runs with the most evaluations."""
    most = max(len(run.evaluations) for run in g.runs)
    return [run for run in g.runs if len(run.evaluations) == most]


def _accuracy(g: Group) -> Accuracy:
    """acc(t, i), mean over the furthest runs, with the row before the first task; empty without an evaluation."""
    return np.asarray(np.mean([[mean_recall(line) for line in run.evaluations] for run in _furthest(g)], axis=0))


def _matrix(g: Group, acc: Accuracy, top: float) -> dict[str, Any]:
    """The cells of acc(t, i), coloured by their share of the highest accuracy on the page."""
    run, rows = _furthest(g)[0], []
    for line, values in zip(run.evaluations, acc, strict=True):
        after, cells = line["task"], []
        for i, value in enumerate(values):
            share = 100 * value / top
            kinds = {"hot": share > 55, "ahead": i > after, "own": i == after}
            kind = " ".join(name for name, applies in kinds.items() if applies)
            cells.append({"text": f"{value:.0f}", "share": f"{share:.1f}", "kind": kind})
        rows.append({"name": run.tasks[after] if after >= 0 else "start", "cells": cells})
    return {"label": g.label, "tasks": run.tasks, "rows": rows}


def _examples(g: Group) -> list[dict[str, Any]]:
    """The queries that the first run kept as pictures, with a sentence about each."""
    for run in g.runs:
        if run.finished and (file := RunFolder(run.path).examples).is_file():
            return [
                query | {"heat": query["heat"] and heat_png(query["heat"]), "said": _found(query["rank"], query["of"])}
                for query in read_json(file)["queries"]
            ]
    return []


def _fading(g: Group) -> str | None:
    """Where a run finds a sound after each task, as `stella reproduce fading` drew it; the first that has it."""
    for run in g.runs:
        if (file := RunFolder(run.path).fading).is_file():
            return b64encode(file.read_bytes()).decode()
    return None


def _found(rank: int, of: int) -> str:
    if rank == 1:
        return f"its own video is the first of {of:,}"
    end = "th" if rank // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"its own video comes {rank:,}{end} of {of:,}"


def _held(g: Group) -> str:
    """How many different clips the memories hold at the end."""
    ends = [run.evaluations[-1] for run in g.runs if run.evaluations and run.evaluations[-1].get("memory_distinct")]
    if not ends:
        return ""
    held, distinct = (sum(values) / len(ends) for values in zip(*_counts(ends), strict=True))
    return f" At the end it holds {number_of(round(held), 'clip')}, {distinct:,.0f} of them distinct."


def _counts(ends: Sequence[Line]) -> list[tuple[int, int]]:
    return [(sum(line["memory_by_task"]), int(line["memory_distinct"])) for line in ends]


def _runs(g: Group) -> list[dict[str, Any]]:
    """A table with a row for each run, by heading."""
    rows = []
    for run in g.runs:
        speeds = [line["clips_per_second"] for line in run.speed if "clips_per_second" in line]
        peaks = [line["peak_bytes"] for line in run.speed if "peak_bytes" in line]
        scores = {"": run.summary, **({"slow ": run.summary.get("slow", {})} if len(g.versions) > 1 else {})}
        figures = {
            f"{of}{words}": [s[f]] if s.get(f) is not None else []
            for of, s in scores.items()
            for f, words in {"A": "accuracy", "F": "forgetting"}.items()
        }
        rows.append(
            {
                "run": run.path.name,
                "seed": run.seed,
                **{heading: str(Spread(values)) for heading, values in figures.items()},
                "steps": f"{run.step:,}",
                "skipped steps": len(run.lines("skip")) or "–",
                "clips/s, with data": f"{np.median(speeds):,.0f}" if speeds else "–",
                "peak memory": f"{max(peaks) / 1e9:.2f} GB" if peaks else "–",
                "skipped clips": len(run.skipped) or "–",
                "": "" if run.finished else "unfinished",
            }
        )
    return rows


def _skipped(g: Group) -> dict[str, Any]:
    """The first skipped clips of all runs, and the counts by reason of the run with the most."""
    records = list({str(record["path"]): record for run in g.runs for record in run.skipped.records.values()}.values())
    most = max((run.skipped for run in g.runs), key=len)
    return {"clips": records[:LISTED], "more": max(0, len(records) - LISTED), "counts": in_words(most.counts)}


def _settings(g: Group) -> list[tuple[str, str]]:
    """The resolved configuration, with all values of what differs between runs, and the first run's environment."""
    flats = [flatten(run.config) for run in g.runs]
    found = {
        key: ", ".join(dict.fromkeys(str(flat.get(key)) for flat in flats))
        for key in dict.fromkeys(key for flat in flats for key in flat)
    }
    facts = dict(g.runs[0].environment)
    for number, place in enumerate(facts.pop("earlier", ()), 1):
        facts |= {f"earlier {number}: {key}": place.get(key) for key in ("commit", "gpu", "processor")}
    return [*found.items(), *((key, str(value)) for key, value in facts.items())]


def _machine(facts: Mapping[str, Any]) -> str:
    if facts.get("gpu"):
        return str(facts["gpu"])
    return f"CPU, {number_of(facts['threads'], 'thread')}" if facts.get("threads") else ""

"""One self-contained HTML file about some runs: nothing is fetched, so it can be mailed or kept."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from stella.data.skipped import in_words
from stella.errors import StellaError
from stella.evaluate.forgetting import Accuracy, mean_accuracy
from stella.evaluate.retrieval import KS
from stella.report import plots
from stella.report.style import CSS
from stella.report.svg import SERIES
from stella.report.tables import DIRECTIONS, spelt
from stella.runs.record import Group, RunRecord, Spread, ceilings, flatten, group, read_run, unlike

LISTED = 20  # skipped clips that are named
CAPTIONS = {
    "Loss": "Mean over runs, one deviation shaded; parts as weighted in the total. Upright lines are ends of tasks.",
    "What the memory holds": "Clips of each task, the earliest at the bottom and faintest.",
    "Importance on the sounding object": "Median importance of patches at least half covered by the sounding object "
    "over that of the others, in frames that hold an event; one line a task, the earliest faintest.",
    "Matching": "How many pairs the matching module judges rightly, half of them mismatched.",
    "Modality gap": "Distance between the centroids of audio and video; one line a task, the earliest faintest.",
}


def write_page(runs: Sequence[Path | str], out: Path | str) -> Path:
    """Read the run folders and write the page; runs of one experiment with several seeds are shown together."""
    if not runs:
        raise StellaError("there is no run to report on; name at least one run folder")
    records = [read_run(path) for path in runs]
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(records), encoding="utf-8")
    return out


def render(records: Sequence[RunRecord]) -> str:
    groups = group(records)
    evaluated = [g for g in groups if any(run.evaluations for run in g.runs)]
    top = max((float(_accuracy(g).max()) for g in evaluated if len(_accuracy(g))), default=1.0)
    cues = ceilings(records)
    sections = [_header(records, groups), _results(groups, cues)]
    sections += [_section(g, colour, top) for colour, g in enumerate(groups)]
    title = "STELLA: " + ", ".join(g.label for g in groups)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _header(records: Sequence[RunRecord], groups: Sequence[Group]) -> str:
    tasks = {len(run.tasks) for run in records if run.tasks}
    gallery = {sum(clips) for run in records for line in run.evaluations if (clips := line.get("clips"))}
    facts = [_count(len(records), "run"), _count(len(groups), "experiment")]
    facts += [_count(n, "task") for n in tasks if len(tasks) == 1]
    facts += [f"gallery of {n:,} clips" for n in gallery if len(gallery) == 1]
    places = [place for run in records for place in (*run.environment.get("earlier", ()), run.environment)]
    commits = sorted({str(place["commit"])[:10] for place in places if place.get("commit")})
    facts += [f"commit {', '.join(commits)}"] if commits else []
    machines = sorted({_machine(run) for run in records} - {""})
    facts += machines if len(machines) == 1 else []
    unfinished = [f"{g.label}, seed {run.seed}, is {run.status}." for g in groups for run in g.runs if not run.finished]
    differing = [f"{sentence}." for sentence in [unlike(records)] if sentence]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in [*differing, *unfinished])
    return f'<h1>Continual pre-training</h1><p class="faint">{escape(" · ".join(facts))}</p>{notes}'


def _results(groups: Sequence[Group], cues: Mapping[str, float] | None) -> str:
    if not any(g.finished for g in groups):
        return ""
    course = _figure(plots.course(groups), "Mean of R@1/5/10 in both directions on the tasks learnt so far.")
    return (
        f'<h2>Results</h2><div class="card wide scroll"><figure>{plots.comparison(groups, cues)}</figure></div>'
        f'<div class="card wide">{_table(groups, cues)}</div>'
        f'<div class="card wide"><div class="scroll">{course}</div>{_every_figure(groups)}</div>'
    )


def _table(groups: Sequence[Group], cues: Mapping[str, float] | None) -> str:
    """A and F, both directions and each, the best in bold; below, the cue audit."""
    heads = ("", "runs", "A ↑", "F ↓", *(f"{name}<br>{f}" for name in DIRECTIONS.values() for f in "AF"))
    columns = [[g.spread(*keys, f) for g in groups] for keys in ((), *((d,) for d in DIRECTIONS)) for f in "AF"]
    alike = unlike([run for g in groups for run in g.runs]) is None
    contenders = [i for i, g in enumerate(groups) if alike and g.spread("F").values]  # an upper bound wins nothing
    best = [_best(column, contenders, lowest=bool(i % 2)) for i, column in enumerate(columns)]
    rows = []
    for row, g in enumerate(groups):
        cells = (f"<td{' class=best' if row == best[i] else ''}>{c[row]}</td>" for i, c in enumerate(columns))
        rows.append(f"<tr><td>{_dot(row)}{escape(g.label)}</td><td>{_runs_done(g)}</td>{''.join(cells)}</tr>")
    audit = [
        f"<tr><td>{name}</td><td></td><td>{value:.1f}</td><td colspan=5></td></tr>"
        for name, value in spelt(cues or {}).items()
    ]
    caption = (
        "A: mean of R@1, R@5 and R@10 over all tasks after the last one, in %; F: how far each task fell from its "
        "best, on average. Every query ranks the clips of all tasks, and ties count against the model."
        + (" Mean ± deviation over seeds." if any(len(g.finished) > 1 for g in groups) else "")
        + (
            " Below the line: what chance or perfect knowledge of one cue alone would give in this gallery."
            if cues
            else ""
        )
    )
    return (
        f"<div class=scroll><table><thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead>"
        f'<tbody>{"".join(rows)}</tbody><tbody class="cues">{"".join(audit)}</tbody></table></div>'
        f'<p class="faint">{caption}</p>'
    )


def _every_figure(groups: Sequence[Group]) -> str:
    """A and F of each direction and k: the paper's table."""
    heads = "".join(
        f"<th>{'A→V' if d == 'a2v' else 'V→A'}<br>R@{k} {f}</th>" for d in DIRECTIONS for k in KS for f in "AF"
    )
    rows = "".join(
        f"<tr><td>{escape(g.label)}</td>"
        + "".join(f"<td>{g.spread(d, str(k), f)}</td>" for d in DIRECTIONS for k in KS for f in "AF")
        + "</tr>"
        for g in groups
    )
    return (
        '<details class="plain"><summary>Every figure</summary><div class="scroll"><table>'
        f"<thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _section(g: Group, colour: int, top: float) -> str:
    panels = [(name, draw(g)) for name, draw in plots.PANELS.items()]
    cards = [
        f'<div class="card"><h3>{name}</h3>{_figure(picture, CAPTIONS[name])}</div>'
        for name, picture in panels
        if picture
    ]
    heat = _heat_map(g, top)
    if heat:
        cards.insert(0, f'<div class="card"><h3>acc(t, i)</h3>{heat}</div>')
    return (
        f'<div class="bar" style="background: var(--c{colour % len(SERIES)})"></div><h2>{escape(g.label)}</h2>'
        f'<p class="faint">{escape(_about(g.method))}</p><div class="cards">{"".join(cards)}</div>'
        f'<div class="card wide">{_run_list(g)}{_skipped(g)}{_configuration(g)}</div>'
    )


def _heat_map(g: Group, top: float) -> str:
    """acc(t, i), the mean over runs, on one scale for all methods."""
    acc = _accuracy(g)
    if not len(acc):
        return ""
    run = max(g.runs, key=lambda r: len(r.evaluations))
    rows = []
    for line, values in zip(run.evaluations, acc, strict=True):
        after = line["task"]
        cells = []
        for i, value in enumerate(values):
            share = 100 * value / top
            kinds = [k for k, on in (("hot", share > 55), ("ahead", i > after), ("own", i == after)) if on]
            cells.append(f'<td class="{" ".join(kinds)}" style="--p: {share:.1f}">{value:.0f}</td>')
        name = run.tasks[after] if after >= 0 else "start"
        rows.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    heads = "".join(f"<th>{escape(name)}</th>" for name in run.tasks)
    return (
        f'<figure><div class="scroll"><table class="heat"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div><figcaption>After each task (down) on each task (across): mean "
        "of R@1/5/10 both ways, %. Outlined: the task just learnt; faded: not learnt yet.</figcaption></figure>"
    )


def _accuracy(g: Group) -> Accuracy:
    """acc(t, i) with the row before the first task, mean over the runs that have come furthest."""
    most = max(len(run.evaluations) for run in g.runs)
    runs = [run for run in g.runs if len(run.evaluations) == most]
    if not most:
        return np.zeros((0, 0))
    shifted = [[{**line, "task": i} for i, line in enumerate(run.evaluations)] for run in runs]
    return np.asarray(np.mean([mean_accuracy(lines) for lines in shifted], axis=0))


def _run_list(g: Group) -> str:
    heads = ("run", "seed", "A", "F", "steps", "left out", "clips/s", "peak memory", "skipped", "")
    rows = []
    for run in g.runs:
        speeds = [line["clips_per_second"] for line in run.speed if "clips_per_second" in line]
        peaks = [line["peak_bytes"] for line in run.speed if "peak_bytes" in line]
        left_out = len(run.lines("skip"))
        cells: list[Any] = [
            run.path.name,
            run.seed,
            *(_number(run.summary[f]) for f in "AF"),
            f"{run.step:,}",
            left_out or "–",
        ]
        cells += [f"{np.median(speeds):,.0f}" if speeds else "–", f"{max(peaks) / 1e9:.2f} GB" if peaks else "–"]
        cells += [len(run.skipped) or "–", "" if run.finished else run.status]
        rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _skipped(g: Group) -> str:
    records = {str(record["path"]): record for run in g.runs for record in run.skipped.records.values()}
    if not records:
        return '<p class="faint">No clip was skipped.</p>'
    fullest = max(g.runs, key=lambda run: len(run.skipped))
    rows = "".join(
        f'<tr><td class="left">{escape(path)}</td><td class="left">{escape(str(r["reason"]))}</td>'
        f'<td class="left">{escape(str(r["remedy"]))}</td></tr>'
        for path, r in list(records.items())[:LISTED]
    )
    more = f'<p class="faint">and {len(records) - LISTED} more in skipped.jsonl</p>' if len(records) > LISTED else ""
    return (
        f"<details><summary>Skipped clips: {escape(in_words(fullest.skipped.counts))}</summary>"
        f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>{more}</details>'
    )


def _configuration(g: Group) -> str:
    """The resolved configuration; what differs from run to run is listed with every value."""
    flats = [flatten(run.config) for run in g.runs]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    rows = []
    for key in keys:
        values = list(dict.fromkeys(str(flat.get(key)) for flat in flats))
        rows.append(f"<tr><td>{escape(key)}</td><td>{escape(', '.join(values))}</td></tr>")
    facts = dict(g.runs[0].environment)
    for number, place in enumerate(facts.pop("earlier", ()), 1):
        facts |= {f"earlier {number}: {key}": place.get(key) for key in ("commit", "gpu", "processor")}
    for key, value in facts.items():
        rows.append(f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>")
    return (
        f'<details class="config"><summary>Configuration and environment</summary><table><tbody>{"".join(rows)}'
        "</tbody></table></details>"
    )


def _about(method: str) -> str:
    from stella.methods import METHODS

    if method not in METHODS:
        return ""
    text = METHODS[method].summary
    return f"{text[0].upper()}{text[1:]}."


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _dot(row: int) -> str:
    return f'<span class="dot" style="background: var(--c{row % len(SERIES)})"></span>'


def _runs_done(g: Group) -> str:
    return str(len(g.runs)) if len(g.finished) == len(g.runs) else f"{len(g.finished)} of {len(g.runs)}"


def _best(column: Sequence[Spread], contenders: Sequence[int], lowest: bool) -> int | None:
    if len(contenders) < 2:
        return None
    return (min if lowest else max)(contenders, key=lambda i: column[i].mean)


def _machine(run: RunRecord) -> str:
    facts = run.environment
    if facts.get("gpu"):
        return str(facts["gpu"])
    return f"CPU, {facts['threads']} threads" if facts.get("threads") else ""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"

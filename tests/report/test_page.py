"""The page: what it shows, that it needs no other file, and that any run folder can be shown."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers.run_files import write_downstream, write_run
from matplotlib.figure import Figure
from typer.testing import CliRunner

from stella.cli import app
from stella.errors import StellaError
from stella.evaluate.forgetting import mean_accuracy
from stella.report import page as page_module
from stella.report import plots
from stella.report.colours import OF_METHOD
from stella.report.page import write_page
from stella.runs.record import Spread, ceilings, group, read_run

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Outline(HTMLParser):
    """Fails on tags that do not close, collects text, and what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    return outline


def headings(page: str) -> list[str]:
    """Of the cards below the results."""
    cards = page[page.index('<div class="cards">') :]
    return re.findall(r"<h3>(.*?)</h3>", cards)


def heat_map(table: str) -> list[float]:
    return [float(x) for x in re.findall(r"<td[^>]*>(\d+)</td>", table)]


def words(page: str) -> str:
    return " ".join(" ".join(parse(page).text).split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / f"{m}-{s}", m, s) for m in ("finetune", "derpp", "stella_plus", "multitask") for s in (0, 1)
    ]


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_page(runs, tmp_path_factory.mktemp("out") / "new" / "page.html").read_text()


def test_the_page_is_well_formed_and_needs_nothing_else(page: str) -> None:
    outline = parse(page)
    for tag, attributes in outline.tags:
        assert tag not in ("script", "link", "iframe", "image")
        for name in ("src", "href", "xlink:href"):
            assert re.match("#|data:image/(png|jpeg);base64,", attributes.get(name) or "#")
    assert "@import" not in page and not re.search(r"url\((?!#)", page)


def test_every_definition_a_picture_uses_is_in_the_page(page: str) -> None:
    used = set(re.findall(r'xlink:href="#(.*?)"', page)) | set(re.findall(r"url\(#(.*?)\)", page))
    assert used and used <= set(re.findall(r' id="(.*?)"', page))


def test_colours_follow_the_readers_scheme(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    body = page[page.index("<body>") :]
    assert not re.search(r"#0[1-6][0-9a-f]{2}0[1-6]\b", body)  # every placeholder was exchanged
    assert set(re.findall(r"var\((--.*?)\)", body)) <= set(re.findall(r"(--\w+):", page[: page.index("<body>")]))


def test_all_methods_show_mean_and_deviation_and_all_runs(page: str, runs: list[Path]) -> None:
    text = words(page)
    for g in group(read_run(run) for run in runs):
        assert g.label in text and str(g.spread("A")) in text and "±" in str(g.spread("A"))
        assert str(g.spread("a2v", "10", "F")) in text
    assert all(run.name in text for run in runs)
    assert "<h1>Continual pre-training: Finetune, DER++, STELLA+, Multitask on scenes</h1>" in page
    assert f"8 runs in {runs[0].parent.name} · 4 configurations · 4 tasks · gallery of 96 clips" in text


def test_the_results_show_the_ceilings(page: str, runs: list[Path]) -> None:
    cues = ceilings([read_run(runs[0])])
    assert cues is not None
    for name, key in (("timing alone", "timing"), ("class alone", "class"), ("chance", "chance")):
        assert f"<td>{name}</td><td></td><td>{cues[key]:.1f}</td>" in page


def test_the_heat_map_shows_the_mean_accuracy_of_the_runs(page: str, runs: list[Path]) -> None:
    first, second = (mean_accuracy(read_run(run).evaluations) for run in runs[:2])  # Finetune
    heat = re.search(r'<table class="heat">.*?</table>', page, re.DOTALL)
    assert heat is not None
    cells = heat_map(heat[0])
    assert cells[4:] == ((first + second) / 2).round().flatten().tolist()  # below the row before the first task
    assert len(cells) == 5 * 4


def test_panels_appear_where_there_is_something_to_show(page: str) -> None:
    sections = {section[: section.index("<")]: section for section in page.split("<h2>")}
    loss, memory, gap = "Training loss", "What the memory holds", "How far apart audio and video are"
    importance, matching = "Does it look at the sounding object?", "Does it know which sound belongs to which video?"
    finds = "What its sounds find"
    assert headings(sections["Finetune"]) == [finds, loss, gap]
    assert headings(sections["DER++"]) == [finds, loss, memory, gap]
    assert headings(sections["STELLA+"]) == [finds, loss, memory, importance, matching, gap]
    together = re.findall(r"<h3>.*</span>(.*)</h3>", sections["What each method remembers"])
    assert together == ["Finetune", "DER++", "STELLA+", "Multitask"]  # side by side


def test_what_sounds_find_is_shown_with_the_right_video_marked(page: str) -> None:
    """And with a heat map where there is a matching module."""
    sections = {section[: section.index("<")]: section for section in page.split("<h2>")}
    for name, maps in (("Finetune", 0), ("STELLA+", 2)):
        queries = re.findall(r'<figure class="find">.*?</figure>', sections[name], re.DOTALL)
        assert [len(re.findall('<span class="shot', query)) for query in queries] == [4, 4]
        assert [query.count('class="shot right"') for query in queries] == [1, 0]
        assert sections[name].count('class="over"') == maps
        assert "task1, bell: its own video comes 2nd of 96" in words(queries[0])
        assert "its own video comes 17th of 96" in words(queries[1])
    assert "its own is framed in green." in sections["Finetune"] and "own is never" not in sections["Finetune"]
    assert "look, action, timbre and link" in sections["Finetune"]  # what the names of scenes mean
    assert "in warm colours" in sections["STELLA+"] and "in warm colours" not in sections["Finetune"]
    assert "At the end it holds 2,000 clips, 1,500 of them distinct." in sections["STELLA+"]


def test_what_is_said_of_pictures_is_there(tmp_path: Path) -> None:
    """One run has no deviation, no video is framed where none was found, and other data name no links."""
    run = write_run(tmp_path / "run", "finetune")
    found = json.loads((run / "examples.json").read_text())
    for query in found["queries"]:
        query["found"] = [hit | {"right": False} for hit in query["found"]]
    (run / "examples.json").write_text(json.dumps(found))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"data": {"source": "folder"}}))
    text = write_page([run], tmp_path / "page.html").read_text()
    assert "own is not among them here." in text and "framed" not in text and "timbre and link" not in text
    assert "The total and its weighted parts. Vertical" in text and "one deviation" not in text


def test_rows_of_neighbouring_figures_are_level(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "to_svg", lambda figure, label: drawn.append(figure))
    records = [read_run(run) for run in runs]
    plots.comparison(group(records), ceilings(records))
    for figure in drawn:
        figure.draw_without_rendering()
    one, other = (figure.axes[0].get_position() for figure in drawn)
    assert (one.y0, one.y1) == pytest.approx((other.y0, other.y1), abs=0.004)  # a descender


@pytest.mark.parametrize("place", ["2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "103rd", "112th"])
def test_places_in_words(place: str) -> None:
    assert page_module._found(int(place[:-2]), 196) == f"its own video comes {place} of 196"
    assert page_module._found(1, 196) == "its own video is the first of 196"


def test_downstream_runs_are_on_the_page_and_in_the_terminal(runs: list[Path], tmp_path: Path) -> None:
    for seed, value in ((0, 40.0), (1, 44.0)):
        model = f"{tmp_path}/stella_plus/seed-{seed}"  # runs of one experiment are one line
        write_downstream(tmp_path / "d" / f"classify-{seed}", "classify", model, value, seed)
    write_downstream(tmp_path / "d" / "random", "classify", "random:tiny", 5.0)
    (tmp_path / "d" / "random" / "predictions.png").write_bytes(b"another")
    write_downstream(tmp_path / "d" / "half", "segment", "base-tiny", None)
    hurt = write_downstream(tmp_path / "d" / "hurt", "segment", "base-tiny", 1.0)
    (hurt / "metrics.jsonl").write_text('{"kind": "end"}\n')
    (tmp_path / "d" / "classify-0" / "predictions.png").write_bytes(b"picture")
    out = tmp_path / "page.html"
    for paths, method in (([tmp_path / "d"], False), ([tmp_path / "d", runs[0]], True)):
        done = CliRunner().invoke(app, ["report", *map(str, paths), "--out", str(out)])
        assert done.exit_code == 0, (done.output, done.exception)
        text, page = words(out.read_text()), out.read_text()
        assert f"Downstream, classify: {tmp_path.name}/stella_plus reaches 42.0% (chance 4.2)." in text
        assert f"{tmp_path.name}/stella_plus head, frozen backbone 2 42.0 ± 2.8 60" in text
        assert text.index("42.0 ± 2.8") < text.index("random:tiny") and ("Training loss" in text) == method
        assert page.count("data:image/png;base64,cGljdHVyZQ==") == 1 == page.count("base64,YW5vdGhlcg==")
        assert "42.0 ± 2.8" in done.output and "left out:" in done.output and "not finished" in done.output
        assert (
            f"<h1>{'Continual pre-training: Finetune on scenes' if method else 'What the models are good for'}</h1>"
            in page
        )
        assert "hurt is damaged: its records do not fit together" in " ".join(done.output.split())


def test_the_configuration_is_there_with_what_differs(page: str) -> None:
    assert "<tr><td>seed</td><td>0, 1</td></tr>" in page and "<tr><td>train.lr</td><td>0.0001</td></tr>" in page
    assert "0123456789abcdef" in page


HOSTILE = "\"><script>'</style></svg>{{ 7 * 7 }}{% include 'page.css' %}<img src=x onerror=y><!-- & \\1 $x^$ ]]>"


@pytest.mark.filterwarnings("ignore:constrained_layout")
def test_everything_from_a_runs_files_is_escaped(tmp_path: Path, page: str) -> None:
    path = write_run(tmp_path / HOSTILE.replace("/", ""), HOSTILE, tasks=(HOSTILE, "two"), slow=True)
    skipped = {"id": 1, "path": f"{HOSTILE}.mp4", "reason": f"no {HOSTILE}", "remedy": f"remove {HOSTILE}"}
    (path / "skipped.jsonl").write_text(json.dumps(skipped) + "\n")
    (path / "environment.json").write_text(json.dumps({"gpu": HOSTILE, "commit": "a<b>", HOSTILE: HOSTILE}))
    metrics = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(metrics.replace('"recon_a"', json.dumps(HOSTILE)))
    outline, usual = parse(write_page([path], tmp_path / "page.html").read_text()), parse(page)
    assert {tag for tag, _ in outline.tags} <= {tag for tag, _ in usual.tags}
    assert {key for _, some in outline.tags for key in some} <= {key for _, some in usual.tags for key in some}
    text = "".join(outline.text)
    assert text.count(HOSTILE) > 15 and "commit a<b>" in text  # title, tasks, labels, loss, folder, environment, …
    assert f"{HOSTILE}.mp4" in text and f"1 no {HOSTILE}" in text and f"remove {HOSTILE}" in text


def test_skipped_clips_are_counted_by_reason_and_the_first_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "finetune")
    records = [
        {"id": i, "path": f"v{i}.mp4", "reason": ("no audio track", "time limit")[i % 3 == 0], "remedy": "leave it out"}
        for i in range(30)
    ]
    (path / "skipped.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    page = write_page([path], tmp_path / "page.html").read_text()
    assert "Skipped clips: 20 no audio track, 10 time limit" in page
    assert "v19.mp4" in page and "v20.mp4" not in page and "and 10 more" in page


@pytest.mark.parametrize("keep", [0, 1, 30, 61, 62, 200])
def test_a_run_stopped_anywhere_makes_a_page_that_says_so(tmp_path: Path, keep: int) -> None:
    path = write_run(tmp_path / "run", "stella")
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:keep]))
    page = write_page([path], tmp_path / "page.html").read_text()
    parse(page)
    assert "STELLA, seed 0, is unfinished: step" in page and "<td>unfinished</td>" in page  # short, where it may be cut


@pytest.mark.filterwarnings("error")
def test_runs_at_different_steps_share_a_page(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / str(seed), "stella", seed) for seed in range(3)]
    for path, keep in zip(paths, (0, 62, 1000), strict=True):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line["kind"] == "evaluation":
                line["importance_ratio"][1] = None  # a task without masks
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:keep]))
    page = write_page(paths, tmp_path / "page.html").read_text()
    assert len(headings(page)) == 6 and "What its sounds find" in headings(page) and page.count('<p class="note">') == 2
    assert str(group(map(read_run, paths))[0].spread("A")) in page


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "finetune")
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[3:3] = [
        '{"kind": "skip", "step": 3}\n',
        '{"kind": "step", "step": 3, "clips": 96, "loss": null, "parts": {}}\n',
    ]
    (path / "metrics.jsonl").write_text("".join(lines))
    assert "<td>240</td><td>1</td>" in write_page([path], tmp_path / "page.html").read_text()


def test_the_same_runs_make_the_same_page(runs: list[Path], tmp_path: Path) -> None:
    pages = [write_page(runs[:1], tmp_path / f"{i}.html").read_bytes() for i in range(2)]
    assert pages[0] == pages[1]


def test_the_page_begins_with_what_happened(page: str, runs: list[Path], tmp_path: Path) -> None:
    by_label = {g.label: g for g in group(read_run(run) for run in runs)}
    forgot = [f"{name} {by_label[name].spread('F').short}" for name in ("DER++", "Finetune")]
    first = f"STELLA+ forgot {by_label['STELLA+'].spread('F').short} points, {', '.join(forgot)}."
    text = words(page)
    assert first in text and f"{by_label['Finetune'].spread('A').short}; chance is 5.6%." in text
    assert f"Accuracy after the last task: Multitask {by_label['Multitask'].spread('A').short}%" in text
    assert text.index(first) < text.index("8 runs")
    records = [read_run(run) for run in runs]
    (joint,) = page_module._story(group(records[-1:]), None)
    assert joint == f"Accuracy after the last task: Multitask {Spread([records[-1].summary['A']])}%."
    unfinished = read_run(write_run(tmp_path / "run", finished=False))
    assert page_module._story(group([unfinished]), None) == ["No run has finished yet."]


def test_of_many_methods_the_best_and_the_worst_are_named_first(tmp_path: Path) -> None:
    groups = group(
        read_run(write_run(tmp_path / str(i), "stella", keep_ratio=0.25 + i / 16))
        for i in range(page_module.IN_STORY + 1)
    )
    ranked = sorted(groups, key=lambda g: g.spread("F").mean)
    story = page_module._story(groups, None)[0]
    assert story.startswith(f"{ranked[0].label} forgot ") and f", …, {ranked[-1].label} " in story
    assert ranked[1].label not in story


def test_slow_weights_are_shown_beside_the_working_weights(page: str, tmp_path: Path) -> None:
    assert "slow" not in page[page.index("<body>") :]
    paths = [write_run(tmp_path / f"{m}-{s}", m, s, slow=m == "finetune") for m in ("finetune", "er") for s in (0, 1)]
    page = write_page(paths, tmp_path / "page.html").read_text()
    g = group(map(read_run, paths))[0]
    rows = re.findall(r'<tr><td><span class="dot( hollow)?" style="--dot: var\(--c(\d)\)"></span>(.*?)</td>(.*)', page)
    own = {name: str(OF_METHOD[name]) for name in ("finetune", "er")}
    labels = [("", own["finetune"], "Finetune"), (" hollow", own["finetune"], "Finetune, slow weights")]
    labels.append(("", own["er"], "ER"))
    assert [row[:3] for row in rows] == labels
    assert all(str(g.spread("slow", *keys)) in rows[1][3] for keys in page_module.MAIN)
    text = words(page)
    assert f"({g.spread('slow', 'F').short} with slow weights)" in text and "Slow weights: an exponential" in text
    matrices = [heat_map(heat) for heat in re.findall(r'<table class="heat">.*?</table>', page, re.DOTALL)]
    evaluations = [[{**line, **line["slow"]} for line in run.evaluations] for run in g.runs]
    expected = sum(mean_accuracy(lines) for lines in evaluations) / 2
    assert len(matrices) == 3 and matrices[1][4:] == expected.round().flatten().tolist()
    for svg in re.findall(r"<svg.*?</svg>", page[: page.index('<div class="cards">')], re.DOTALL):  # both figures
        assert "Finetune, slow weights" in svg and "ER, slow weights" not in svg


def test_the_best_of_each_column_is_marked() -> None:
    def row(a: float, f: float | None) -> list[Spread]:
        return [Spread([a]), Spread([] if f is None else [f])] * 3

    best = page_module._best([row(40, 20), row(50, 30), row(60, None)])  # the last is Multitask
    assert best == {(1, 0), (0, 1), (1, 2), (0, 3), (1, 4), (0, 5)}
    assert page_module._best([row(40, 20), row(60, None)]) == set()


def test_negative_zero_is_printed_as_zero(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "finetune")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    level = {-1: 50.0, 0: 50.0, 1: 50.0, 2: 50.0, 3: 50.02}  # F = -0.02
    for line in lines:
        if line["kind"] == "evaluation":
            line["recall"] = {d: {k: [level[line["task"]]] * 4 for k in ("1", "5", "10")} for d in ("a2v", "v2a")}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(path).summary["F"] < 0
    text = words(write_page([path], tmp_path / "page.html").read_text())
    assert "Finetune forgot 0.0 points." in text and not re.search(r"[-−]0\.0(?!\d)", text)


def test_tasks_that_gained_are_not_told_as_forgotten(tmp_path: Path) -> None:
    """F counts from the best before the last task, so it may be negative; its figure then keeps off the axis."""
    paths = [write_run(tmp_path / method, method) for method in ("finetune", "er")]
    lines = [json.loads(line) for line in (paths[1] / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "evaluation":
            level = 50.2 if line["task"] == 3 else 50.0
            line["recall"] = {d: {k: [level] * 4 for k in ("1", "5", "10")} for d in ("a2v", "v2a")}
    (paths[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = words(write_page(paths, tmp_path / "page.html").read_text())
    forgot = read_run(paths[0]).summary["F"]
    assert f"ER forgot nothing: tasks gained 0.2 points. Finetune forgot {forgot:.1f} points." in text
    assert "from its best before the last task, on average; negative where tasks still gained." in text
    assert "from its largest value before the last task; negative where it still grew" in text
    spreads = [Spread([-0.2]), Spread([0.3])]
    axis = Figure().subplots()
    axis.plot([-0.2, 0.3], [0, 1])
    low, high = plots._reach(axis, spreads)
    assert high == 1.0 and low < -0.3 and plots._reach(Figure().subplots(), [Spread([0.5]), Spread([])])[0] == 0.0


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match="at least one run folder"):
        write_page([], tmp_path / "page.html")


def test_loss_curves_of_different_lengths_share_bins(tmp_path: Path) -> None:
    whole, half = (read_run(write_run(tmp_path / str(i), seed=i, finished=not i)) for i in range(2))
    curves = [plots._losses(run, 2)["loss"] for run in (whole, half)]
    assert sorted(curves[0]) == list(range(121)) and sorted(curves[1]) == list(range(61))
    values = {line["step"]: line["loss"] for line in half.lines("step")}
    assert curves[1][7] == pytest.approx((values[14] + values[15]) / 2)

"""The page and the tables: what they must show, what they must not need, and what they must survive."""

import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from helpers.run_files import write_run
from rich.console import Console

from stella.errors import StellaError
from stella.evaluate.forgetting import mean_accuracy
from stella.report import plots
from stella.report.page import write_page
from stella.report.tables import accuracy_table, results_table
from stella.runs.record import ceilings, group, read_run

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
    return re.findall(r"<h3>(.*?)</h3>", page)


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
        assert tag not in ("script", "link", "img", "iframe", "image")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
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
    text = " ".join(parse(page).text)
    for g in group(read_run(run) for run in runs):
        assert g.label in text and str(g.spread("A")) in text and "±" in str(g.spread("A"))
        assert str(g.spread("a2v", "10", "F")) in text
    assert all(run.name in text for run in runs)
    assert "8 runs · 4 experiments · 4 tasks · gallery of 96 clips" in text


def test_ceilings_stand_beside_the_results(page: str, runs: list[Path]) -> None:
    cues = ceilings([read_run(runs[0])])
    assert cues is not None
    for name, key in (("timing alone", "timing"), ("class alone", "class"), ("chance", "chance")):
        assert f"<td>{name}</td><td></td><td>{cues[key]:.1f}</td>" in page


def test_the_heat_map_holds_the_mean_accuracy_of_the_runs(page: str, runs: list[Path]) -> None:
    first, second = (mean_accuracy(read_run(run).evaluations) for run in runs[:2])  # Finetune
    heat = re.search(r'<table class="heat">.*?</table>', page, re.DOTALL)
    assert heat is not None
    cells = [float(x) for x in re.findall(r"<td[^>]*>(\d+)</td>", heat[0])]
    assert cells[4:] == ((first + second) / 2).round().flatten().tolist()  # below the row before the first task
    assert len(cells) == 5 * 4


def test_panels_appear_where_there_is_something_to_show(runs: list[Path], tmp_path: Path) -> None:
    only = {name: write_page([run for run in runs if run.name.startswith(name)], tmp_path / f"{name}.html").read_text()
            for name in ("finetune", "derpp", "stella_plus")}  # fmt: skip
    assert headings(only["finetune"]) == ["acc(t, i)", "Loss", "Modality gap"]
    assert headings(only["derpp"]) == ["acc(t, i)", "Loss", "What the memory holds", "Modality gap"]
    assert "Importance on the sounding object" in headings(only["stella_plus"])
    assert "Matching" in headings(only["stella_plus"])


def test_the_configuration_is_there_with_what_differs(page: str) -> None:
    assert "<tr><td>seed</td><td>0, 1</td></tr>" in page and "<tr><td>train.lr</td><td>0.0001</td></tr>" in page
    assert "0123456789abcdef" in page


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a<b>&c", "<method\\1 $x^", tasks=("<i>one", "two&$^$"))
    record = {"id": 1, "path": "<script>x</script>.mp4", "reason": "no <audio>", "remedy": "leave it & go"}
    (path / "skipped.jsonl").write_text(json.dumps(record) + "\n")
    outline = parse(write_page([path], tmp_path / "page.html").read_text())
    assert not [tag for tag, _ in outline.tags if tag in ("script", "i", "b", "method")]
    text = "".join(outline.text)
    assert "a<b>&c" in text and "<script>x</script>.mp4" in text and "1 no <audio>" in text


def test_skipped_clips_are_counted_by_reason_and_the_first_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
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
    assert "STELLA, seed 0, is unfinished: step" in page


@pytest.mark.filterwarnings("error")
def test_seeds_that_have_come_to_different_places_share_a_page(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / str(seed), "stella", seed) for seed in range(3)]
    for path, keep in zip(paths, (0, 62, 1000), strict=True):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line["kind"] == "evaluation":
                line["importance_ratio"][1] = None  # a task without masks
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:keep]))
    page = write_page(paths, tmp_path / "page.html").read_text()
    assert len(headings(page)) == 6 and page.count('<p class="note">') == 2
    assert str(group(map(read_run, paths))[0].spread("A")) in page


def test_left_out_steps_are_counted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[3:3] = [
        '{"kind": "skip", "step": 3}\n',
        '{"kind": "step", "step": 3, "clips": 96, "loss": null, "parts": {}}\n',
    ]
    (path / "metrics.jsonl").write_text("".join(lines))
    assert "<td>240</td><td>1</td>" in write_page([path], tmp_path / "page.html").read_text()


def test_the_same_runs_make_the_same_page(runs: list[Path], tmp_path: Path) -> None:
    pages = [write_page(runs[:2], tmp_path / f"{i}.html").read_bytes() for i in range(2)]
    assert pages[0] == pages[1]


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match="at least one run folder"):
        write_page([], tmp_path / "page.html")


def test_runs_of_different_lengths_meet_at_their_steps(tmp_path: Path) -> None:
    whole, half = (read_run(write_run(tmp_path / str(i), seed=i, finished=not i)) for i in range(2))
    curves = [plots._losses(run, 2)["loss"] for run in (whole, half)]
    assert sorted(curves[0]) == list(range(121)) and sorted(curves[1]) == list(range(61))
    values = {line["step"]: line["loss"] for line in half.lines("step")}
    assert curves[1][7] == pytest.approx((values[14] + values[15]) / 2)


def shown(table: object) -> str:
    console = Console(width=140, file=StringIO(), color_system=None)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_terminal_table_has_methods_and_ceilings(runs: list[Path]) -> None:
    records = [read_run(run) for run in runs]
    cues = ceilings(records)
    assert cues is not None
    text = shown(results_table(group(records), cues))
    rows = {line.split("  ")[1].strip(): line for line in text.splitlines() if line.startswith("  ")}
    for g in group(records):
        assert str(g.spread("A")) in rows[g.label] and str(g.spread("v2a", "F")) in rows[g.label]
    assert f"{cues['class']:.1f}" in rows["class alone"]
    assert "class alone" not in shown(results_table(group(records)))


def test_an_unfinished_method_is_in_the_table_without_figures(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", finished=False))
    assert re.search(r"STELLA +0 of 1 +– +– ", shown(results_table(group([run]))))


def test_the_accuracy_table_has_a_row_after_each_task(runs: list[Path]) -> None:
    run = read_run(runs[0])
    rows = [line.split() for line in shown(accuracy_table(run)).splitlines() if line.startswith("  task")]
    assert [row[0] for row in rows] == run.tasks
    assert [[float(x) for x in row[1:]] for row in rows] == mean_accuracy(run.evaluations).round(1).tolist()
    empty = read_run(runs[0])
    empty.metrics.clear()
    assert "after" in shown(accuracy_table(empty))

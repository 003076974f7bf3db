"""Tables for the terminal."""

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from helpers.run_files import write_run
from rich.console import Console

from stella.evaluate.forgetting import mean_accuracy
from stella.report.page import write_page
from stella.report.tables import DIRECTIONS, accuracy_table, matching_table, recall_table, results_table
from stella.runs.record import ceilings, group, read_run, unlike

METHODS = ("finetune", "derpp", "stella_plus", "multitask")


def shown(table: object) -> str:
    console = Console(width=80, file=StringIO(), color_system=None)
    console.print(table)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "…" not in text  # nothing is cut
    return text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [write_run(root / f"{m}-{s}", m, s, slow=m == "stella_plus") for m in METHODS for s in (0, 1)]


def test_results_have_methods_their_slow_weights_and_ceilings(runs: list[Path]) -> None:
    records = [read_run(run) for run in runs]
    groups, cues = group(records), ceilings(records)
    assert cues is not None
    lines = shown(results_table(groups, cues)).splitlines()
    rows = {line.split("  ")[0].strip(): line for line in lines}
    for g in groups:
        figures = [str(g.spread("A")), str(g.spread("F")), *(g.spread(d, f).short for d in DIRECTIONS for f in "AF")]
        assert [cell.strip() for cell in re.split("  +", rows[g.label].strip())[2:]] == figures
    names = list(rows)
    assert names.index("STELLA+, slow weights") == names.index("STELLA+") + 1
    assert str(groups[2].spread("slow", "A")) in rows["STELLA+, slow weights"]
    assert sum("slow" in name for name in names) == 1
    assert f"{cues['class']:.1f}" in rows["class alone"]
    assert "class alone" not in shown(results_table(groups))


def test_a_task_named_by_a_hostile_folder_is_shown_without_its_escapes() -> None:
    measured: dict[str, Any] = {
        "avm_accuracy": 90.0,
        "avm_accuracy_by_task": [90.0],
        "tasks": ["a\x1b]0;owned\x07[red]b"],
    }
    measured |= {key: [None] for key in ("auc", "pointing", "pointing_chance", "importance_ratio")}
    text = shown(matching_table(measured))
    assert "\x1b" not in text and "\x07" not in text and "[red]b" in text


def test_a_ratio_by_next_to_nothing_is_not_written_out() -> None:
    measured = {"avm_accuracy": 90.0, "avm_accuracy_by_task": [90.0] * 3, "auc": [0.5] * 3, "pointing": [1.0] * 3}
    measured |= {"pointing_chance": [1.0] * 3, "importance_ratio": [202755.7, 12.34, None], "tasks": ["a", "b", "c"]}
    lines = shown(matching_table(measured)).splitlines()
    found = {line.split()[0]: line for line in lines if line.strip()}
    assert found["a"].endswith("> 1,000") and found["b"].endswith("12.3") and found["c"].rstrip().endswith("–")
    assert "sounding object" in shown(matching_table(measured))
    own = measured | dict.fromkeys(("auc", "pointing", "pointing_chance", "importance_ratio"), [None] * 3)  # no masks
    text = shown(matching_table(own))
    assert "pairs told apart %" in text and not any(word in text for word in ("–", "AUC", "object", "importance"))


def test_long_names_wrap_and_figures_do_not(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / f"{keep}{seed}", "stella_plus", seed, slow=True, keep_ratio=keep))
        for keep in (0.375, 0.5)
        for seed in (0, 1)
    ]
    text = shown(results_table(group(runs)))
    for g in group(runs):
        assert str(g.spread("A")) in text and str(g.spread("slow", "A")) in text
    joined = "".join(line.split("  ")[0].strip() for line in text.splitlines())
    assert "(args.keep_ratio=0.375)" in joined and "(args.keep_ratio=0.5)" in joined


def test_an_unfinished_method_is_in_the_table_without_figures(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", finished=False))
    assert re.search(r"STELLA +0 of 1 +– +– ", shown(results_table(group([run]))))


def test_the_accuracy_table_has_a_row_after_each_task(runs: list[Path]) -> None:
    run = read_run(runs[0])
    rows = [line.split() for line in shown(accuracy_table(run)).splitlines() if line.startswith("task")]
    assert [row[0] for row in rows] == run.tasks
    assert [[float(x) for x in row[1:]] for row in rows] == mean_accuracy(run.evaluations).round(1).tolist()
    empty = read_run(runs[0])
    empty.metrics.clear()
    assert "after" in shown(accuracy_table(empty))


def test_the_accuracy_table_has_the_slow_weights_below(runs: list[Path]) -> None:
    run = read_run(runs[4])
    assert run.slow is not None
    before, after = shown(accuracy_table(run)).split("slow weights")
    for text, lines in ((before, run.evaluations), (after, run.slow.evaluations)):
        rows = [[float(x) for x in line.split()[1:]] for line in text.splitlines() if re.match(r"task\d +\d+\.", line)]
        assert rows == mean_accuracy(lines).round(1).tolist()


def test_an_accuracy_table_has_the_method_and_the_seed(tmp_path: Path) -> None:
    tables = [shown(accuracy_table(read_run(write_run(tmp_path / m / "seed-4", m, 4)))) for m in ("derpp", "[red]new")]
    assert "A of each task: DER++, seed 4" in tables[0] and "A of each task: [red]new, seed 4" in tables[1]


def test_the_recall_table_has_every_task_and_the_mean(runs: list[Path]) -> None:
    line = read_run(runs[0]).evaluations[-1]
    text = shown(recall_table(line | {"skipped": {"no audio track": 3}}, {"chance": 5.6}))
    rows = [row.split() for row in text.splitlines() if re.match(r"(task\d|all) +\d", row)]
    means = mean_accuracy([line])[-1]
    *tasks, last = ([row[0], float(row[-1])] for row in rows)
    assert tasks == [[name, mean] for name, mean in zip(line["tasks"], means.round(1).tolist(), strict=True)]
    assert float(last[-1]) == pytest.approx(means.mean(), abs=0.06)
    flat = " ".join(text.split())
    assert "in a gallery of 96 clips" in flat and "skipped: 3 no audio track" in flat and "chance 5.6" in flat


def test_the_recall_of_a_single_task_stands_once() -> None:
    """The one task of a folder of videos is called all, as the mean would be."""
    recall = {direction: {k: [50.0] for k in ("1", "5", "10")} for direction in DIRECTIONS}
    text = shown(recall_table({"tasks": ["all"], "recall": recall, "clips": [9]}))
    assert len([line for line in text.splitlines() if line.startswith("all ")]) == 1


def test_runs_with_unlike_galleries_are_not_ranked(tmp_path: Path) -> None:
    """Not even runs of one method: the gallery stands beside each."""
    paths = [write_run(tmp_path / m, m) for m in ("finetune", "stella")]
    metrics = paths[1] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"clips": [24, 24, 24, 24]', '"clips": [2, 3, 1, 4]'))
    records = [read_run(path) for path in paths]
    assert "galleries of 10 and 96 clips, in which chance differs: they are not ranked" in str(unlike(records))
    text = shown(results_table(group(records), ceilings(records)))
    assert re.search(r"Finetune +1 +96 \(5\.6\)", text) and re.search(r"STELLA +1 +10 \(53\.3\)", text)
    page = write_page(paths, tmp_path / "page.html").read_text()
    assert "galleries of 10 and 96 clips" in page and 'class="best"' not in page
    same = [read_run(write_run(tmp_path / f"same{m}", m)) for m in ("finetune", "stella")]
    assert "the 96 evaluation clips" in " ".join(shown(results_table(group(same), ceilings(same))).split())

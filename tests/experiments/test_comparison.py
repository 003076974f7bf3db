"""The tables of `stella compare` in Markdown: figures of each method, and differences paired over seeds."""

from itertools import permutations
from pathlib import Path
from statistics import mean, stdev

import pytest
from helpers.run_files import write_run

from stella.experiments.comparison import comparison
from stella.experiments.tables import Sheet
from stella.runs.record import Spread, group, read_run

METHODS = {"er": "ER", "derpp": "DER++", "stella": "STELLA"}


def compared(folder: Path, seeds: int, methods: tuple[str, ...] = tuple(METHODS), slow: bool = False) -> list[Sheet]:
    runs = [
        write_run(folder / name / f"seed-{seed}", name, seed, slow=slow) for name in methods for seed in range(seeds)
    ]
    return comparison(group(map(read_run, runs)), {"chance": 2.0})


@pytest.mark.parametrize("seeds", [2, 5])
def test_differences_are_paired_and_marked_where_the_interval_excludes_0(tmp_path: Path, seeds: int) -> None:
    _, shown = compared(tmp_path, seeds)
    a = {
        label: [read_run(tmp_path / name / f"seed-{seed}").summary["A"] for seed in range(seeds)]
        for name, label in METHODS.items()
    }
    assert [row[0] for row in shown.rows] == shown.head[1:] and set(shown.head[1:]) == set(a)
    marked = 0
    for one, other in permutations(a, 2):
        less = [x - y for x, y in zip(a[one], a[other], strict=True)]
        apart = seeds > 2 and abs(mean(less)) > 2.78 * stdev(less) / 5**0.5  # Student's t for five
        cell = next(row for row in shown.rows if row[0] == one)[shown.head.index(other)]
        assert cell == f"{Spread(less)}{'*' if apart else ''}"
        marked += apart
    assert all(row[1 + at] == "" for at, row in enumerate(shown.rows))
    assert ("*" in " ".join(shown.notes)) == (seeds > 2) and (marked > 0) == (seeds > 2)


def test_seeds_that_not_all_have_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "more" / "seed-7", "er", 7)
    unfinished = write_run(tmp_path / "unfinished" / "seed-2", "derpp", 2, finished=False)
    compared(tmp_path, 2)
    write_run(tmp_path / "er" / "seed-2", "er", 2)
    runs = [path.parent for path in tmp_path.rglob("config.json")]
    assert unfinished in runs
    _, shown = comparison(group(map(read_run, sorted(runs))), None)
    assert "(0, 1)" in shown.notes[0]


@pytest.mark.parametrize(("seeds", "methods"), [(1, ("er", "derpp")), (3, ("er",))])
def test_one_method_or_one_seed_has_figures_alone(tmp_path: Path, seeds: int, methods: tuple[str, ...]) -> None:
    (shown,) = compared(tmp_path, seeds, methods, slow=True)
    assert len(shown.rows) == 2 * len(methods) and "slow weights" in shown.rows[1][0]
    assert shown.below == [["chance", "", "2.0", ""]]

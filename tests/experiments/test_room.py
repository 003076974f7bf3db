"""Room: the four criteria, each on both sides of its limit, and the share of room that a method wins."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from stella.cli import app
from stella.experiments import reproduce
from stella.experiments.results import Rows, to_csv
from stella.experiments.room import Room, room

MEANS = {"finetune": 4.0, "er": 12.0, "derpp": 12.0, "derpp-unlimited": 22.0, "multitask": 25.0}


def rows(means: dict[str, float], apart: float = 0.5, figure: str = "A") -> dict[str, Rows]:
    """Two runs of each variant around its mean, with this sample deviation."""
    half = apart / 2**0.5
    return {
        name: [{figure: str(mean - half), "seed": "100"}, {figure: str(mean + half), "seed": "101"}]
        for name, mean in means.items()
    }


def found(means: dict[str, float], apart: float = 0.5) -> Room:
    judged = room(rows(means, apart))
    assert judged is not None
    return judged


@pytest.mark.parametrize(
    ("change", "apart", "missed"),
    [
        ({}, 0.5, []),
        ({"finetune": 8.3}, 0.5, []),
        ({"finetune": 8.4}, 0.5, [0]),
        ({"derpp-unlimited": 17.1}, 0.5, []),
        ({"derpp-unlimited": 16.9}, 0.5, [1]),
        ({"derpp": 17.8, "derpp-unlimited": 24.0}, 0.5, []),
        ({"derpp": 17.9, "derpp-unlimited": 24.0}, 0.5, [2]),
        ({}, 0.69, []),
        ({}, 0.71, [3]),
    ],
)
def test_each_criterion_is_met_or_missed_at_its_limit(
    change: dict[str, float], apart: float, missed: list[int]
) -> None:
    met = [met for _, met in found(MEANS | change, apart).criteria()]
    assert [number for number, each in enumerate(met) if not each] == missed
    assert str(found(MEANS | change, apart)).count("missed") == len(missed)


def test_the_largest_deviation_counts_also_that_of_er_but_of_no_other_method() -> None:
    results = rows(MEANS) | rows({"er": 12.0}, 0.9)
    judged, without = room(results), room({**results, "er": []})
    assert judged and "largest deviation 0.90 ≤ 0.7: missed" in str(judged)
    assert without and "largest deviation 0.50 ≤ 0.7: met" in str(without)
    other = room(rows(MEANS) | rows({"stella": 12.0}, 5.0))
    assert other == found(MEANS)


def test_the_share_of_room_is_linear_between_derpp_and_unlimited_memory() -> None:
    assert [found(MEANS).share(mean) for mean in (12.0, 17.0, 22.0, 11.0)] == pytest.approx([0, 50, 100, -10])


@pytest.mark.parametrize("missing", ["finetune", "derpp", "derpp-unlimited", "multitask"])
def test_without_one_that_is_needed_nothing_is_judged(missing: str) -> None:
    assert room({name: each for name, each in rows(MEANS).items() if name != missing}) is None


def test_a_table_of_the_recipe_states_its_room(tmp_path: Path) -> None:
    """Of working and slow weights; a table without the four has no such column."""
    slow = {name: mean + 1 for name, mean in MEANS.items()}
    lines = [
        {"name": name, "seed": line["seed"], "A": line["A"], "F": 1.0, "slow_A": other["slow_A"], "slow_F": 1.0}
        for name in MEANS
        for line, other in zip(rows(MEANS)[name], rows(slow, 0.9, "slow_A")[name], strict=True)
    ]
    (tmp_path / "results.csv").write_text(to_csv(lines))
    reproduce.show("room", tmp_path / "results.csv", Console(file=io.StringIO(), width=160))
    page = (tmp_path / "reproduce.md").read_text()
    assert "| ours A ↑ | ours F ↓ | slow weights A ↑ | F ↓ | room won, working | room won, slow |" in page
    assert "| DER++, unlimited memory | 2 | 22.0 ± 0.5 | 1.0 ± 0.0 | 23.0 ± 0.9 | 1.0 ± 0.0 | 100% | 100% |" in page
    assert "| Finetune | 2 | 4.0 ± 0.5 | 1.0 ± 0.0 | 5.0 ± 0.9 | 1.0 ± 0.0 | -80% | -80% |" in page
    assert "| ER, unlimited memory | 0 | – | – | – | – | – | – |" in page
    assert "Room by working weights: Finetune 4.0 ≤ Multitask / 3 = 8.3: met; " in page
    assert "Room by slow weights: " in page and "largest deviation 0.90 ≤ 0.7: missed." in page
    (tmp_path / "results.csv").write_text(to_csv([line for line in lines if line["name"] != "multitask"]))
    reproduce.show("room", tmp_path / "results.csv", Console(file=io.StringIO(), width=160))
    assert "oom won" not in (tmp_path / "reproduce.md").read_text()


def test_a_reproduction_of_development_runs_its_own_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[int]] = {}
    monkeypatch.setattr(reproduce, "reproduce", lambda name, seeds, *_: asked.update({name: list(seeds)}))
    for args in (["room", "--seeds", "2"], ["table1", "--seeds", "2"]):
        assert CliRunner().invoke(app, ["reproduce", *args]).exit_code == 0
    assert asked == {"room": [100, 101], "table1": [0, 1]}

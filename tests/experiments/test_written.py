"""Figures in prose are those of the CSV beside them."""

import pytest
from helpers.tables import ROOT, cells, grouped, read, results, table

from stella.experiments import paper
from stella.experiments.ranks import kendall
from stella.experiments.recipe import load
from stella.experiments.results import Rows, spread
from stella.experiments.room import room
from stella.experiments.tables import BOUNDS
from stella.runs.record import Spread

VARIANTS = load("table1").variants
LABELS = {name: each.label for name, each in VARIANTS.items()}
CELLS = {"A": 2, "F": 3, "slow_A": 4, "slow_F": 5}


def written(rows: Rows, figure: str) -> str:
    """As the page writes it: F without its deviation."""
    found = spread(rows, figure)
    return (str(found) if figure.endswith("A") else f"{found.mean:.1f}".replace("-0.0", "0.0")) if found.values else "–"


@pytest.mark.parametrize(
    ("page", "order", "heading"),
    [
        ("table1", "original", "## Original order"),
        ("table1", "shuffled", "## Shuffled order"),
        ("table1-small", "original", "## Original order"),
        ("table1-small", "shuffled", "## Shuffled order"),
        ("table1-full", "original", "Why was not tested"),
    ],
)
def test_the_page_has_every_row_of_the_results(page: str, order: str, heading: str) -> None:
    text = (ROOT / "results" / page / "README.md").read_text(encoding="utf-8").split(heading)[1]
    table = text[text.index("| | seeds") :].split("\n\n")[0].splitlines()[2:]
    named = {name: rows for name, rows in results(page).items() if name.startswith(order)}
    shown = {cells(line)[0]: cells(line)[1:] for line in table}
    assert set(shown) == {LABELS[name.split("/")[1]] for name in named}
    rooms = [room({name.split("/")[1]: rows for name, rows in named.items()}, figure) for figure in ("A", "slow_A")]
    for name, rows in named.items():
        row = shown[LABELS[name.split("/")[1]]]
        shares = [each.share(spread(rows, of).mean) for each, of in zip(rooms, ("A", "slow_A"), strict=True) if each]
        won = list(dict.fromkeys(f"{share:.0f}%".replace("-0%", "0%").replace("-", "−") for share in shares))
        assert row[6:] == ([", ".join(won)] if won else []), name  # one figure if both are the same
        capacity = int(rows[0]["capacity"])
        assert row[:2] == [str(len(rows)), f"{capacity:,}" if capacity else "–"], name
        assert {figure: row[at] for figure, at in CELLS.items()} == {f: written(rows, f) for f in CELLS}, name


PLAIN = {"Finetune": "finetune", "ER": "er", "CLS-ER": "cls_er", "MIR": "mir", "DER++": "derpp", "STELLA": "stella"}
PLAIN |= {"STELLA+": "stella_plus", "DER++ with unlimited memory": "derpp-unlimited"}
PLAIN |= {"Multitask (all tasks at once)": "multitask"}
CODED = {"ER with three past clips for each current one": "er-dct-3", "Chorus** (three too)": "chorus"}


def test_the_readme_has_the_same_figures() -> None:
    found = results()
    rows: dict[str, list[str]] = {}
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        rows.setdefault(cells(line)[0], cells(line)[1:])  # the first table that has it
    for label, name in PLAIN.items():
        plain, coded = found[f"original/{name}"], found.get(f"original/{name}-dct", [])
        expected = [written(plain, "A"), written(plain, "F")]
        expected += [written(coded, "A"), written(coded, "F")] if coded else ["", ""]
        assert rows[label] == expected, label
    for label, name in CODED.items():
        assert rows[label] == ["", "", *(written(found[f"original/{name}"], figure) for figure in "AF")], label


SETTINGS = [("table1", "original"), ("table1", "shuffled"), ("table1-small", "original"), ("table1-full", "original")]
NAMES = PLAIN | {"Multitask": "multitask", "ER, codec": "er-dct", "ER, codec, three past clips": "er-dct-3"}
NAMES |= {"Chorus**, codec": "chorus", "MIR, codec": "mir-dct"}
NAMES |= {"DER++, codec": "derpp-dct", "STELLA+, codec": "stella_plus-dct", "STELLA, codec": "stella-dct"}


def test_the_readme_has_the_figures_of_every_setting() -> None:
    shown = table("../README.md", "| | as above |")
    for label, row in shown.items():
        expected = [written(results(page).get(f"{order}/{NAMES[label]}", []), "A") for page, order in SETTINGS]
        assert row == [cell.replace("–", "not run") for cell in expected], label
    assert len(shown) == 14


def test_slow_weights_change_what_is_written() -> None:
    with_memory = [
        rows for name, rows in results().items() if name.startswith("original") and rows[0]["capacity"] != "0"
    ]
    gains = {f: [spread(rows, f"slow_{f}").mean - spread(rows, f).mean for rows in with_memory] for f in "AF"}
    rows, up = len(with_memory), sum(gain > 0 for gain in gains["A"])
    more, less = (
        f"{min(gains['A']):.1f} to {max(gains['A']):.1f}",
        f"{-max(gains['F']):.1f} to {-min(gains['F']):.1f}",
    )
    for page in ("README.md", "results/README.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert f"change A by {more}".replace("-", "−") in text, page
        assert f"lower F by {less}" in text, page
    assert f"({up} of {rows} rows gain)" in text


def test_the_codecs_worth_is_that_of_table1() -> None:
    found, shown = results(), table("codec/README.md", "| | clips | plain | clips |")
    names = {each.label: name for name, each in VARIANTS.items()}
    assert {name for name in VARIANTS if f"{name}-dct" in VARIANTS} == {names[label] for label in shown}
    for label, row in shown.items():
        expected = []
        for name in (names[label], f"{names[label]}-dct"):
            rows = found[f"original/{name}"]
            figures = ", ".join(f"{spread(rows, figure).mean:.1f}" for figure in ("A", "slow_A"))
            expected += [f"{int(rows[0]['capacity']):,}", figures]
        assert row == expected, label


PARTS = {
    "Chorus": ("chorus", "", "dct"),
    "without the codec": ("chorus", "", ""),
    "one past clip for each current one": ("chorus", "draws=1", "dct"),
    "whole clips instead of random halves": ("chorus", "keep_ratio=1.0", "dct"),
    "past clips reconstructed too (a draft)": ("draft", "draws=3", "dct"),
    "ER, codec, 3 past clips (a draft)": ("draft", "draws=3 keep=1.0", "dct"),
    "ER with the codec": ("er", "", "dct"),
}


def test_the_parts_of_chorus_are_written_as_they_are() -> None:
    found = grouped("chorus/development.csv", "method", "changed", "codec")
    shown, own = table("../docs/chorus.md", "| | clips in memory |"), found[PARTS["Chorus"]]
    assert shown.keys() == PARTS.keys()
    for label, row in shown.items():
        rows = found[PARTS[label]]
        assert [line["seed"] for line in rows] == ["100", "101", "102", "103", "104"], label
        more = str(Spread([float(line["A"]) - float(base["A"]) for line, base in zip(rows, own, strict=True)]))
        less = "" if rows is own else more.replace("-", "−").replace("0.2 ±", "+0.2 ±")
        expected = [
            f"{int(rows[0]['capacity']):,}",
            written(rows, "A"),
            written(rows, "slow_A"),
            written(rows, "F"),
            less,
        ]
        assert row == expected, label


def test_ablations_are_written_as_they_are() -> None:
    shown = table("ablations/README.md", "| | A | F | paper")
    for name, rows in read("ablations/sampling.csv").items():
        assert shown[load("sampling").variants[name].label][:2] == [written(rows, "A"), written(rows, "F")], name
    sizes = table("ablations/README.md", "| A (F) |")
    for name, rows in read("ablations/memory_size.csv").items():
        label, size = load("memory_size").variants[name].label.split(", ")
        cell = sizes[label][["9 MB", "18 MB", "36 MB", "72 MB"].index(size)].replace("*", "")
        assert cell == f"{spread(rows, 'A').mean:.1f} ({spread(rows, 'F').mean:.1f})", name


def test_settings_of_stella_are_written_as_they_are() -> None:
    shown = table("ablations/README.md", "| STELLA with |")
    for recipe in ("audio_selection", "ratios", "temperature"):
        found = read(f"ablations/{recipe}.csv")
        own = next(rows for rows in found.values() if all("table1 --only stella " in row["command"] for row in rows))
        assert found.keys() == load(recipe).variants.keys()
        for name, rows in found.items():
            label = "its own settings" if rows is own else load(recipe).variants[name].label
            more = Spread([float(row["A"]) - float(base["A"]) for row, base in zip(rows, own, strict=True)])
            expected = [written(rows, "A"), written(rows, "F"), "" if rows is own else str(more)]
            assert [cell.strip("*") for cell in shown[label][:3]] == expected, name


def test_the_gap_is_written_as_it_is() -> None:
    shown, variants = table("modality_gap/README.md", "| | A | F | gap"), load("modality_gap").variants
    found = read("modality_gap/results.csv")
    assert set(shown) == {variants[name].label for name in found} == {each.label for each in variants.values()}
    for name, rows in found.items():
        figures = [spread(rows, figure) for figure in ("gap", "gap_decline")]
        expected = [f"{each.mean:.3f} ± {each.deviation:.3f}" for each in figures]
        expected = [f"{spread(rows, figure).mean:.1f}" for figure in "AF"] + expected
        assert [cell.strip("*") for cell in shown[variants[name].label]] == expected, name


def test_downstream_results_are_written_as_they_are() -> None:
    shown, variants = table("downstream/README.md", "| | A of"), load("downstream").variants
    tests, before = read("downstream/downstream.csv"), read("downstream/pretraining.csv")
    assert tests.keys() == before.keys() == variants.keys()
    for name, rows in tests.items():
        row = shown[variants[name].label]
        assert row[0].strip("*") == f"{spread(before[name], 'A').mean:.1f}", name
        for task, cell in zip(("classify", "segment", "events", "retrieval", "localise"), row[1:], strict=True):
            of_task = [line for line in rows if line["task"] == task]
            ours = str(spread(of_task, "value"))
            assert cell.partition(" (")[0].strip("*") == ours, (name, task)
            assert len(of_task) == 3
    for label, row in table("../README.md", "| | classification").items():
        name = next((name for name, variant in variants.items() if variant.label == label), None)
        for task, cell in zip(("classify", "events", "retrieval", "segment"), row, strict=True):
            assert not name or cell == str(spread([line for line in tests[name] if line["task"] == task], "value"))


def agreement(page: str, order: str, names: list[str], figure: str = "A") -> tuple[str, str]:
    """Kendall's τ of A with the paper's, and without the two ends."""
    recipe, found = load(page), results(page)
    theirs = {name: paper.row(recipe.orders[order].paper, name, recipe.dataset) for name in names}
    both = {
        name: (spread(found[f"{order}/{name}"], figure).mean, each.mean("A"))
        for name, each in theirs.items()
        if each and f"{order}/{name}" in found
    }
    inner = [pair for name, pair in both.items() if name not in BOUNDS]
    return f"{kendall(list(both.values())):.2f}", f"{kendall(inner):.2f}".replace("-", "−")


def test_the_readme_tells_how_far_the_papers_order_holds() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    six = [name for name in load("table1-full").variants if f"original/{name}" in results("table1-full")]
    whole, inner = zip(*(agreement(page, order, six) for page, order in SETTINGS), strict=True)
    for said, each in (("Kendall's τ is {} in this order", whole), ("as in the paper, {}. At", inner)):
        assert said.format(f"{', '.join(each[:3])} and {each[3]}") in text
    slow = [agreement(page, order, six, "slow_A")[0] for page, order in SETTINGS]
    assert f"with slow weights the six have τ {', '.join(slow[:3])} and {slow[3]}" in text
    (first, inner), (shuffled, ends) = (agreement("table1", order, list(VARIANTS)) for _, order in SETTINGS[:2])
    assert f"τ is {first}, shuffled {shuffled}; without the two ends {inner} and {ends}" in text


def test_pages_say_what_a_point_is_of_the_room() -> None:
    """The studies in table 1's setting, and those of development."""
    of_table = {name.removeprefix("original/"): spread(rows, "A") for name, rows in results().items()}
    of_seeds = {name: Spread(each.values[:3]) for name, each in of_table.items()}
    of_development = {name: spread(rows, "A") for name, rows in read("room/results.csv").items()}
    pages = {"ablations": of_table, "codec": of_table, "downstream": of_seeds, "chorus": of_development}
    for page, found in pages.items():
        text = " ".join((ROOT / "results" / page / "README.md").read_text(encoding="utf-8").split())
        derpp, unlimited = found["derpp"], found["derpp-unlimited"]
        said = (
            f"Finetune {found['finetune'].short}, DER++ {derpp.short}, DER++ with unlimited memory {unlimited.short}, "
            f"Multitask {found['multitask'].short}"
        )
        assert said in text, page
        assert f"a point of A above DER++ is {100 / (unlimited.mean - derpp.mean):.0f}% of" in text, page

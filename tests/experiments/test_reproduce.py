"""The paper's comparisons: runs that can be split up, and tables that say whose a figure is."""

import csv
import io
import json
import re
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from stella.cli import app
from stella.errors import StellaError
from stella.experiments.paper import WAYS, row
from stella.experiments.recipe import load, names, runs
from stella.experiments.reproduce import reproduce, show
from stella.experiments.results import collect, read_results, to_csv
from stella.files import read_json

RESULTS = Path(__file__).parents[2] / "results"
MINIATURE = (
    *("model.preset=tiny", "model.weights=base-tiny", "train.device=cpu", "train.warmup_steps=0"),
    *("memory.bytes=2000000", "data.clips=4", "data.eval_clips=4", "stream.epochs=1", "stream.batch_size=4"),
    "evaluate.batch=4",
)
stella = CliRunner()

# ---- recipes


def test_a_variant_is_its_own_whatever_is_overridden() -> None:
    config = runs("table1", ["stream.batch_size=8", "train.lr=1e-2"])["original/stella++"]
    assert (config.stream.batch_size, config.train.lr, config.method) == (106, 1e-2, "stella_plus")
    assert runs("table1", ["stream.batch_size=8"])["original/er"].stream.batch_size == 8


def test_overrides_that_do_not_apply_to_a_variant_are_named(tmp_path: Path) -> None:
    said = load("table1").shadowed(["memory.bytes=1", "train.lr=1", "stream.batch_size=8"])
    assert said == [
        "memory.bytes=1 does not apply to gmed, derpp-unlimited: a variant's own value wins.",
        "stream.batch_size=8 does not apply to stella++, stella++-steps, stella++-dct: a variant's own value wins.",
    ]
    assert load("table1").shadowed(["memory.bytes=1"], only=["er"]) == []
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(StellaError):  # after it is said, before anything is run
        reproduce("table1", [0], tmp_path, console, ["gmed"], overrides=["memory.bytes=1", "train.lrr=1"])
    assert "memory.bytes=1 does not apply to gmed" in console.file.getvalue()  # type: ignore[attr-defined]
    (tmp_path / "results.csv").write_text(lines(("gmed", 0, 1.0)))
    show("table1", tmp_path / "results.csv", console, ["memory.bytes=1"])
    assert "- memory.bytes=1 does not apply to gmed" in (tmp_path / "reproduce.md").read_text()


def test_runs_can_be_chosen() -> None:
    assert list(runs("table1", only=["er", "mir"], orders=["shuffled"])) == ["shuffled/er", "shuffled/mir"]
    assert runs("table1", only=["er"])["shuffled/er"].data.tasks == load("table1").orders["shuffled"].tasks


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["tabel1"], "did you mean table1? (known: audio_selection, codec, codec_size, continual-as"),
        (["table1", "--only", "er,lore"], "no variant is called 'lore'; choose from finetune, er"),
        (["table1", "--orders", "random"], "choose from original, shuffled"),
        (["table1", "--seeds-list", "3,x"], "whole numbers"),
        (["table1", "--from", "no.csv"], "no.csv cannot be read (No such file or directory); check the path"),
        (["table1", "train.lrr=1"], "did you mean train.lr?"),
        (["continual-as"], "data.source=continual-as needs your copy of it: set data.path=FOLDER"),
    ],
)
def test_wrong_names_are_answered_with_the_right_ones(args: list[str], said: str, tmp_path: Path) -> None:
    failed = stella.invoke(app, ["reproduce", *args, *([] if "--from" in args else ["--out", str(tmp_path)])])
    assert isinstance(failed.exception, StellaError) and said in str(failed.exception)


def test_the_list_names_all_with_their_cost() -> None:
    shown = " ".join(stella.invoke(app, ["reproduce"]).output.split())
    assert all(name in shown and load(name).title in shown and load(name).cost in shown for name in names())


# ---- results


def lines(*figures: tuple[str, int, float]) -> str:
    return to_csv(
        [{"name": name, "seed": seed, "A": a, "F": "" if "multi" in name else 1.0} for name, seed, a in figures]
    )


def shown(name: str, text: str, folder: Path) -> str:
    (folder / "results.csv").write_text(text)
    console = Console(width=160, record=True, file=io.StringIO())
    show(name, folder / "results.csv", console)
    return console.export_text()


def test_slow_weights_have_columns_of_their_own_where_a_run_has_them(tmp_path: Path) -> None:
    rows = [{"name": "er", "seed": 0, "A": 10.0, "F": 5.0, "slow_A": 11.5, "slow_F": 0.5}]
    table = shown("table1", to_csv([*rows, {**rows[0], "name": "derpp", "slow_A": "", "slow_F": ""}]), tmp_path)
    (er,) = [line.split() for line in table.splitlines() if line.strip().startswith("ER ")]
    assert er[1:6] == ["1", "10.0", "5.0", "11.5", "0.5"] and re.search(
        r"^ +slow\b.*^ .* weights\b", table, re.M | re.S
    )
    assert "slow" not in shown("table1", lines(("er", 0, 10.0)), tmp_path).replace(str(tmp_path), "")


@pytest.mark.parametrize("width", [80, 100, 120, 160])
@pytest.mark.parametrize("name", ["table1", "modality_gap", "downstream"])
def test_no_name_and_no_figure_is_cut(name: str, width: int, tmp_path: Path) -> None:
    csv = "downstream.csv" if name == "downstream" else "results.csv"
    (tmp_path / csv).write_text((RESULTS / name / csv).read_text())
    console = Console(width=width, record=True, file=io.StringIO())
    show(name, tmp_path / csv, console)
    text = console.export_text()
    page = next(tmp_path.glob("*.md")).read_text()
    rows = [line.replace("*", "").strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    figures = Counter(cell for row in rows for cell in row[1:] if re.match(r"-?\d", cell))
    for figure, count in figures.items():
        assert len(re.findall(rf"(?<!\S){re.escape(figure)}(?!\S)", text)) >= count, figure
    words = {word for row in rows for cell in row for word in cell.split() if set(word) - set("-:|")}
    assert words <= set(text.split()) and "…" not in text
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= width


def test_a_csv_alone_becomes_the_table(tmp_path: Path) -> None:
    """Names with folders before them are that run, names without an order belong to the first one."""
    text = lines(("er", 0, 10.0), ("p1/original/er", 1, 14.0), ("original/multitask", 0, 20.0), ("shuffled/er", 0, 3.0))
    table = shown("table1", text, tmp_path)
    original, shuffled = table.split("Tasks in shuffled order")
    assert re.search(r"^ +paper +paper$.*^ +runs +ours A ↑ +ours F ↓ ", original, re.M | re.S)
    assert "compare the order of the methods, not the figures" in original
    assert re.search(r"ER +2 +12\.0 ± 2\.8 +1\.0 ± 0\.0 +11\.18, 10\.33 +7\.68, 8\.06", original)
    assert re.search(r"Multitask +1 +20\.0 +– +18\.55, 19\.80 +–", original)
    assert re.search(r"STELLA\+\+ +0 +– +– +17\.01, 16\.62 +3\.20, 3\.27", original)
    assert re.search(r"class alone +2\.2", original)
    assert re.search(r"ER +1 +3\.0 +1\.0 +11\.43, 10\.66 +5\.78, 7\.06", shuffled)
    page = (tmp_path / "reproduce.md").read_text()
    assert "| ER | 2 | 12.0 ± 2.8 | 1.0 ± 0.0 | 11.18, 10.33 | 7.68, 8.06 |" in page
    assert page.count("paper (Continual-VS) A ↑") == 2 and "*class alone*" in page


def test_the_papers_other_dataset_stands_beside_its_own_recipe(tmp_path: Path) -> None:
    """And a CSV is shown without the clips."""
    table = shown("continual-as", lines(("er", 0, 10.0), ("shuffled/er", 0, 3.0)), tmp_path)
    assert "Continual-VS" not in table and "other clips of AudioSet" in table and "Scenes" not in table
    for order, part in zip(("retrieval_table", "shuffle_retrieval_table"), table.split("shuffled order"), strict=True):
        printed = row([order], "er", "Continual-AS")
        assert printed is not None and re.search(r"^ +paper +paper$.*^ +\(Continual-AS\) ", part, re.M | re.S)
        assert re.search(rf"ER +1 +[\d.]+ +1\.0 +{printed.show('A')} +{printed.show('F')}", part)


@pytest.mark.parametrize(
    ("name", "overrides", "about"),
    [
        ("table1", [], "Recipe: model tiny from base-wide, learning rate 0.0005, memory 36 MB."),
        ("table1", ["train.lr=1e-3", "memory.bytes=2000000"], "learning rate 0.001, memory 2 MB."),
        ("continual-as", [], "Recipe: model base, learning rate 0.0001, memory 5,000 clips."),
        ("codec_size", [], "Recipe: model tiny from base-wide, learning rate 0.0005."),  # each has its own memory
    ],
)
def test_a_table_says_what_was_trained(name: str, overrides: list[str], about: str, tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(lines((next(iter(load(name).variants)), 0, 1.0)))
    console = Console(width=160, record=True, file=io.StringIO())
    show(name, tmp_path / "results.csv", console, overrides)
    assert (
        about in " ".join(console.export_text().split()) and f"{about}\n\n| " in (tmp_path / "reproduce.md").read_text()
    )


def test_orders_are_compared_by_rank(tmp_path: Path) -> None:
    as_printed = [("finetune", 0, 1.0), ("er", 0, 2.0), ("derpp", 0, 3.0), ("stella", 0, 4.0), ("stella_plus", 0, 50.0)]
    reversed_ = [(name, seed, -a) for name, seed, a in as_printed]
    for printed, sign in ((as_printed, ""), (reversed_, "-")):
        said = " ".join(shown("table1", lines(*printed), tmp_path).split())
        assert f"with the paper's: {sign}1.00. Kendall's τ: {sign}1.00 over 5 rows, {sign}1.00 without Finetune" in said


def test_methods_with_most_runs_are_ranked_over_their_seeds(tmp_path: Path) -> None:
    three = [(name, seed, a + seed) for name, a in (("er", 2.0), ("derpp", 3.0), ("mir", 1.0)) for seed in range(3)]
    shown("table1", lines(*three, ("gmed", 0, 9.0)), tmp_path)
    assert ranks(tmp_path) == ["|  | working |", "| DER++ | 1.0 ± 0.0 |", "| ER | 2.0 ± 0.0 |", "| MIR | 3.0 ± 0.0 |"]
    notes = (tmp_path / "reproduce.md").read_text().split("Mean ranks of A in original order")[1]
    assert "over seeds 0, 1, 2." in notes and "Not ranked, with fewer runs: GMED." in notes
    assert "Mean rank" not in shown("table1", lines(*three[:8]), tmp_path)
    ours = [("chorus", seed, 2.5 + seed) for seed in range(3)]
    shown("table1", lines(*three, *ours), tmp_path)
    assert ranks(tmp_path) == [
        "|  | working | the paper's rows, working |",
        "| DER++ | 1.0 ± 0.0 | 1.0 ± 0.0 |",
        "| Chorus, codec | 2.0 ± 0.0 | – |",
        "| ER | 3.0 ± 0.0 | 2.0 ± 0.0 |",
        "| MIR | 4.0 ± 0.0 | 3.0 ± 0.0 |",
    ]


def ranks(folder: Path) -> list[str]:
    """The table of mean ranks, without the line below its heading."""
    table = (folder / "reproduce.md").read_text().split("Mean ranks of A in original order\n")[1].splitlines()
    return [line for line in table if line.startswith("|") and "---" not in line]


def test_lines_of_other_runs_are_named(tmp_path: Path) -> None:
    assert "Not in this table: other" in shown("temperature", lines(("beta-0.1", 0, 1.0), ("other", 0, 1.0)), tmp_path)
    with pytest.raises(StellaError, match="is not of temperature: it has other; give another file or name"):
        shown("temperature", lines(("other", 0, 1.0)), tmp_path)
    with pytest.raises(StellaError, match="it has a, b, c and 2 more; give another file or name"):
        shown("temperature", lines(*((name, 0, 1.0) for name in "abcde")), tmp_path)
    with pytest.raises(StellaError, match="original/er with seed 0 twice"):
        shown("table1", lines(("p1/original/er", 0, 1.0), ("p2/original/er", 0, 1.0)), tmp_path)
    (tmp_path / "reproduce.md").unlink()  # of temperature
    text = shown("memory_size", lines(("er-18", 0, 1.0)), tmp_path)
    assert "The paper prints no numbers for this." in text and "paper (" not in text


@pytest.mark.parametrize("like", ["table1-small", "table1-full"])
def test_a_csv_beside_the_table_of_a_like_comparison_is_refused(like: str, tmp_path: Path) -> None:
    """Their names are all of table1's too: the table beside the CSV tells them apart."""
    for name in ("results.csv", "reproduce.md"):
        (tmp_path / name).write_bytes((RESULTS / like / name).read_bytes())
    with pytest.raises(StellaError, match=rf"reproduce\.md is of {like}, not of table1; give that name, or move"):
        show("table1", tmp_path / "results.csv", Console(file=io.StringIO()))
    assert (tmp_path / "reproduce.md").read_bytes() == (RESULTS / like / "reproduce.md").read_bytes()


@pytest.mark.parametrize(
    ("name", "csv", "column"),
    [
        ("efficiency", "table1-full/results.csv", "clips_per_second"),
        ("downstream", "table1-full/some.csv", "task"),
        ("table1", "speed.csv", "A"),
    ],
)
def test_a_csv_of_another_kind_is_refused(name: str, csv: str, column: str, tmp_path: Path) -> None:
    text = "name,batch,clips_per_second\noriginal/er,9,100\n"
    if csv != "speed.csv":
        lines = (RESULTS / "table1-full" / "results.csv").read_text().splitlines()
        text = "\n".join([lines[0], *(line for line in lines if line.startswith("original/er,"))])
    (file := tmp_path / Path(csv).name).write_text(text)
    with pytest.raises(StellaError, match=f"is not of {name}: it has no column {column}; give another"):
        show(name, file, Console(file=io.StringIO()))
    assert list(tmp_path.iterdir()) == [file]


def test_a_csv_without_a_name_is_refused() -> None:
    failed = stella.invoke(app, ["reproduce", "--from", "x.csv"])
    assert str(failed.exception) == "say what x.csv is of: stella reproduce NAME --from x.csv"


def test_a_table_of_another_comparison_is_left_alone(tmp_path: Path) -> None:
    """Some variants of `why` have the names of some of table1's."""
    results, quiet = RESULTS, Console(file=io.StringIO())
    for name in ("results.csv", "reproduce.md"):
        (tmp_path / name).write_bytes((results / "table1" / name).read_bytes())
    with pytest.raises(StellaError, match=r"is not of why: it has .*original/cls_er"):
        show("why", tmp_path / "results.csv", quiet)
    (tmp_path / "some.csv").write_bytes((results / "why" / "results.csv").read_bytes())
    show("why", tmp_path / "some.csv", quiet)
    assert (tmp_path / "reproduce.md").read_bytes() == (results / "table1" / "reproduce.md").read_bytes()
    assert (tmp_path / "some.md").read_text().startswith("# why")


def test_no_figure_is_a_negative_zero(tmp_path: Path) -> None:
    means = {"finetune": 2.0, "derpp": 7.0, "derpp-unlimited": 13.0, "multitask": 15.0, "mir": 6.99}
    rows = [{"name": name, "seed": 0, "A": a, "F": -0.04} for name, a in means.items()]
    table = shown("table1", to_csv(rows), tmp_path)
    assert re.search(r"MIR +1 +7\.0 +0\.0 +0% ", table)
    assert not re.search(r"-0(\.0+)?(?![.\d])", (RESULTS / "table1" / "reproduce.md").read_text())


def test_committed_results_can_be_shown(tmp_path: Path) -> None:
    table = shown("table1", (RESULTS / "scenes/results.csv").read_text(), tmp_path)
    assert re.search(r"Finetune +5 +3\.8 ± 0\.2 +22\.1 ± 0\.8 +3\.63, 4\.11", table)


# ---- end to end


@pytest.mark.slow
def test_a_miniature_runs_apart_and_is_put_together(tmp_path: Path) -> None:
    """Two variants with other commands into one folder, in the shuffled order; a second time nothing is done again."""
    for variant in ("finetune", "er"):
        args = ["--only", variant, "--orders", "shuffled", "--seeds-list", "3", "--out", str(tmp_path)]
        done = stella.invoke(app, ["reproduce", "table1", *args, *MINIATURE])
        assert done.exit_code == 0, (done.output, done.exception)
    folder = tmp_path / "table1"
    run = folder / "shuffled" / "er" / "seed-3"
    assert read_json(run / "config.json")["data"]["tasks"] == list(load("table1").orders["shuffled"].tasks)
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert [(line["name"], line["seed"]) for line in rows] == [("shuffled/er", "3"), ("shuffled/finetune", "3")]
    parts = [float(rows[0][f"{way}_{k}_A"]) for way in WAYS for k in (1, 5, 10)]
    assert float(rows[0]["A"]) == pytest.approx(sum(parts) / 6)
    assert "paper (Continual-VS)" in done.output and "shuffled order" in done.output

    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "lock"}
    again = stella.invoke(app, ["reproduce", "table1", *args, *MINIATURE])
    assert again.exit_code == 0 and before == {path: path.stat().st_mtime_ns for path in before}
    (folder / "shuffled" / "mir" / "seed-3").mkdir(parents=True)
    (folder / "shuffled" / "mir" / "seed-3" / "config.json").write_text("{}")  # begun elsewhere, not finished
    assert collect(tmp_path).read_text() == (folder / "results.csv").read_text().replace(
        "shuffled/", "table1/shuffled/"
    )
    assert len(read_results(tmp_path / "results.csv", runs("table1"))[0]["shuffled/er"]) == 1


def test_processes_side_by_side_share_a_folder(tmp_path: Path) -> None:
    """Each collects and shows when it ends, at the same moment."""
    run = tmp_path / "original" / "er" / "seed-0"
    run.mkdir(parents=True)
    figures = {way: {k: {"A": 1.0, "F": None} for k in ("1", "5", "10")} for way in WAYS}
    (run / "config.json").write_text('{"method": "er", "seed": 0}')
    (run / "environment.json").write_text('{"gpu": "G", "commit": "c", "changed_files": 0}')
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "end", "A": 1.0, "F": None, "clips": 1, **figures}) + "\n")

    def again_and_again() -> None:
        for _ in range(20):
            show("table1", collect(tmp_path), Console(file=io.StringIO()))

    several = [get_context("fork").Process(target=again_and_again) for _ in range(3)]
    for process in several:
        process.start()
    for process in several:
        process.join()
    assert [process.exitcode for process in several] == [0, 0, 0]
    assert (tmp_path / "results.csv").read_text().splitlines()[1].startswith("original/er,er,0,1.0,,,,1.0,,")


@pytest.mark.slow
def test_speed_is_measured_in_fresh_processes(tmp_path: Path) -> None:
    recipe = tmp_path / "quick.toml"
    recipe.write_text(
        'title = "Quick"\ncost = "none"\nlike = "efficiency"\n[orders.original]\npaper = ["efficiency"]\n'
        '[speed]\nsteps = 2\ngpu = ["model.preset=vast"]\n[variants]\n'
        'finetune = { label = "Finetune", set = ["method=finetune"] }\n'
        'lump = { label = "LUMP", set = ["method=lump"] }\n'
    )
    done = stella.invoke(app, ["reproduce", str(recipe), "--out", str(tmp_path), "train.device=cpu"])
    assert done.exit_code == 0, (done.output, done.exception)
    table = list(csv.DictReader((tmp_path / "quick" / "results.csv").open()))
    assert [line["name"] for line in table] == ["original/finetune", "original/lump"]
    assert all(float(line["clips_per_second"]) > 0 and float(line["peak_gib"]) > 0.1 for line in table)
    assert re.search(r"Finetune +[\d.]+ +1\.00 +[\d.]+ +1\.00 +29\.46 +1\.00 +18\.34 +1\.00", done.output)
    assert re.search(r"LUMP .* 26\.67 +0\.91 +18\.36 +1\.00", done.output)
    args = ["--only", "lump", "--out", str(tmp_path), "train.device=cpu", "stream.batch_size=5"]
    again = stella.invoke(app, ["reproduce", str(recipe), *args])
    assert again.exit_code == 0, (again.output, again.exception)
    both = {line["name"]: line for line in csv.DictReader((tmp_path / "quick" / "results.csv").open())}
    assert both["original/finetune"] == table[0] and both["original/lump"]["batch"] == "5"  # one is measured anew
    assert re.search(r"Finetune +[\d.]+ +1\.00", again.output)

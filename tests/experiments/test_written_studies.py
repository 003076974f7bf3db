"""Figures on the pages of single studies are those of the CSV beside them."""

import itertools
import re
from collections.abc import Iterator

import pytest
from helpers.tables import ROOT, grouped, lines, numbers, read, table

from stella.experiments.ranks import half_interval
from stella.experiments.results import Rows, spread
from stella.runs.record import Spread


def signed(text: str) -> str:
    return text.replace("-0.0 ", "0.0 ").replace("-", "−")


def less(rows: Rows, base: Rows, figure: str) -> Spread:
    """Paired over seeds."""
    other = {line["seed"]: float(line[figure]) for line in base}
    return Spread([float(line[figure]) - other[line["seed"]] for line in rows if line["seed"] in other])


def within(found: Spread) -> float:
    """Half of the mean's 95% interval."""
    return half_interval(found.deviation or 0.0, len(found.values))


def prose(page: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / "results" / page).read_text(encoding="utf-8"))


def read_by(file: str, column: str) -> dict[str, Rows]:
    return {key: rows for (key,), rows in grouped(file, column).items()}


def close(text: str, values: list[float], within: float) -> None:
    assert numbers(text.replace(", ", " ")) == pytest.approx(values, abs=within), text


def spreads(rows: Rows, *columns: str) -> Iterator[str]:
    return (str(spread(rows, column)) for column in columns)


# In these sentences of codec/README.md: the row of sizes.csv, and which figure of it.
STORED = [
    ("DER++ has {} with it in 1% and {} plain in 8% (plain in 1%: {})", "derpp-dct-1 derpp-8 derpp-1:"),
    ("STELLA {} and {}, STELLA+ {} and {}", "stella-dct-1 stella-8 stella_plus-dct-1 stella_plus-8"),
    ("(DER++ {}, {}, {}, {}, {} in 1, 2, 4, 8 and 16%)", "".join(f"derpp-dct-{n}: " for n in (1, 2, 4, 8, 16))),
    ("({}, {}, {} in 16, 32 and 64%)", "derpp-16: derpp-32: derpp-64:"),
    ("DER++ has {} and {}, STELLA {} and {}", "derpp-dct-16 derpp-64 stella-dct-16 stella-64"),
    ("STELLA+ {} and {}.", "stella_plus-dct-16 stella_plus-64"),
]


@pytest.mark.parametrize(("text", "of"), STORED)
def test_stored_bytes_are_written_as_they_are(text: str, of: str) -> None:
    """`NAME` is A with its deviation, `NAME:` A alone."""
    found = read("codec/sizes.csv")
    values = []
    for name, colon, _ in (words.partition(":") for words in of.split()):
        value = spread(found[name], "A")
        values.append(value.short if colon else str(value))
    assert text.format(*values) in prose("codec/README.md")


METHODS = ("derpp", "stella", "stella_plus")


def test_what_is_said_of_all_sizes_holds() -> None:
    found, text = read("codec/sizes.csv"), prose("codec/README.md")
    fewer: dict[str, list[float]] = {"": [], "-dct": []}  # points of F
    behind: dict[str, list[float]] = {}  # points of A
    surely = {"": 0, "-dct": 0}  # F is lower on every seed
    for name, rows in found.items():
        assert len(rows) == 5
        method, codec, size = re.fullmatch(r"(\w+?)(-dct)?-(\d+)", name).groups("")  # type: ignore[union-attr]
        if method == "derpp":
            continue
        more, forgets = (less(rows, found[f"derpp{codec}-{size}"], figure) for figure in "AF")
        fewer[codec].append(-forgets.mean)
        surely[codec] += max(forgets.values) < 0
        if method + codec == "stella_plus" and int(size) < 8:
            assert abs(more.mean) < within(more), name
            continue
        assert max(more.values) < 0, name
        behind.setdefault(method + codec, []).append(-more.mean)
    ranges = {key: f"{min(some):.1f} to {max(some):.1f}" for key, some in (fewer | behind).items()}
    assert surely == {"": 13, "-dct": 5} and {key: len(some) for key, some in fewer.items()} == {"": 14, "-dct": 10}
    assert max(less(found["stella-4"], found["derpp-4"], "F").values) >= 0
    for said in (
        f"by {ranges['']} without the codec and {ranges['-dct']} with it",
        f"with the codec ({ranges['stella-dct']}) and without ({ranges['stella']})",
        f"is {ranges['stella_plus']} below from 8% on; with the codec it is {ranges['stella_plus-dct']} below",
        f"{len(lines('codec/sizes.csv'))} runs",
    ):
        assert said in text


def test_what_coding_costs_is_written_as_it_is() -> None:
    """At about as many clips, the mean over four sizes within a seed."""
    found, text = read("codec/sizes.csv"), prose("codec/README.md")
    pairs = [(f"-dct-{size}", f"-{8 * size}") for size in (1, 2, 4, 8)]

    def cost(method: str, figure: str) -> Spread:
        sizes = [less(found[method + plain], found[method + coded], figure).values for coded, plain in pairs]
        return Spread([sum(seed) / len(seed) for seed in zip(*sizes, strict=True)])

    costs = {figure: [cost(method, figure) for method in METHODS] for figure in ("A", "slow_A")}
    assert "by {} for DER++, {} for STELLA and {} for STELLA+;".format(*costs["A"]) in text
    assert "with slow weights by {}, {} and {}.".format(*costs["slow_A"]) in text
    known = {figure: [each.mean > within(each) for each in some] for figure, some in costs.items()}
    assert known == {"A": [False, False, True], "slow_A": [True, False, True]}
    assert 0.2 < max(each.mean for some in costs.values() for each in some) < 0.255
    held = [
        float(found[method + coded][0]["capacity"]) / float(found[method + plain][0]["capacity"])
        for method, (coded, plain) in itertools.product(METHODS, pairs)
    ]
    assert f"holds {100 * min(held):.0f} to {100 * max(held):.0f}% of the clips" in text
    for method in METHODS:
        whole = less(found[f"{method}-dct-16"], found[f"{method}-64"], "A")
        assert abs(whole.mean) < within(whole), method


def test_quality_and_cost_of_the_codec_are_written_as_they_are() -> None:
    shown = table("codec/README.md", "| clips | | PSNR")
    sets = {
        "real clips, talking heads (GRID), 10.24 s (the paper's size, padded)": "real clips, 10.24 s",
        "real clips, 2.56 s (no padding)": "real clips, 2.56 s",
        "`scenes` (96 px)": "scenes",
        "`scenes-hard`": "scenes-hard",
        "`scenes-full` (224 px)": "scenes-full",
    }
    found = read_by("codec/quality.csv", "clips")
    for label, name in sets.items():
        psnr, error = ([float(row[column]) for row in found[name]] for column in ("psnr_db", "spectrogram_error"))
        assert shown[label][0] == str(len(psnr))
        close(shown[label][1], [sum(psnr) / len(psnr), min(psnr)], 0.051)
        close(shown[label][2], [sum(error) / len(error), max(error)], 0.00051)
    for row, (label, (plain, coded, cost)) in zip(
        lines("codec/steps.csv"), table("codec/README.md", "| | plain, ms").items(), strict=True
    ):
        assert row["method"] == label.lower().replace("der++", "derpp").replace("+", "_plus")
        close(f"{plain} {coded}", [float(row["plain_ms"]), float(row["codec_ms"])], 0.051)
        close(cost, [float(row["cost_percent"])], 0.051)


OTHERS = {"STELLA": "stella", "STELLA+": "stella_plus", "Random": "random", "DER++": "derpp", "CLS-ER": "cls_er"}
DRAFTS = {
    "half, one past clip": "",
    "half, two": "draws=2",
    "half, three": "draws=3",
    "30%, two": "draws=2 keep=0.3",
    "30%, three": "draws=3 keep=0.3",
    "whole clips, three (ER, codec, 3 past clips)": "draws=3 keep=1.0",
    "half, three, past clips contrasted alone": "past=contrast draws=3",
    "30%, three, contrasted alone": "past=contrast draws=3 keep=0.3",
    "30%, four, contrasted alone": "past=contrast draws=4 keep=0.3",
    "30%, six, contrasted alone": "past=contrast draws=6 keep=0.3",
    "25%, three, contrasted alone": "past=contrast draws=3 keep=0.25",
    "30%, one, contrasted alone": "past=contrast draws=1 keep=0.3",
}
FAILED = [
    "bank=true",
    "draws=2 bank=true",
    "draws=2 near=20 anchors=4 bank=true",
    "draws=2 near=20 anchors=2",
    "draws=2 near=10 anchors=4",
    "draws=2 teach=1",
    "past=contrast draws=3 keep=0.3 teach=0.3",
    "draws=2 mse=0.1 decay=0.999",
    "past=contrast draws=4 keep=0.3 seen=0.1",
]


def test_the_search_for_chorus_is_written_as_it_was() -> None:
    found = grouped("chorus/development.csv", "method", "changed", "codec")
    shown = table("chorus/README.md", "| | clips | seeds | A |")
    for label, method in (OTHERS | {"ER": "er"}).items():
        rows = next(rows for (of, _, codec), rows in found.items() if (of, codec) == (method, "dct"))
        assert shown[label][:2] == [f"{int(rows[0]['capacity']):,}", str(len(rows))], label
        close(" ".join(shown[label][2:]), [spread(rows, column).mean for column in ("A", "F", "slow_A")], 0.051)
    shown = table("chorus/README.md", "| | seeds | A | F | slow A |")
    assert len(shown) == len(DRAFTS) + 1  # and Chorus
    for label, row in shown.items():
        rows = found[("chorus", "", "dct") if label.startswith("Chorus") else ("draft", DRAFTS[label], "dct")]
        assert row[0] == str(len(rows)), label
        close(" ".join(row[1:]).replace("*", ""), [spread(rows, of).mean for of in ("A", "F", "slow_A")], 0.051)
    kinds = [("draft", changed, "dct") for changed in FAILED]
    kinds += [("chorus", "", ""), ("draft", "past=contrast draws=3 keep=0.3", "")]
    tried = table("chorus/README.md", "| | seeds | A | slow A | against")
    for kind, row in zip(kinds, tried.values(), strict=True):
        rows = found[kind]
        close(
            " ".join(row[:3]).replace("*", ""), [len(rows), *(spread(rows, of).mean for of in ("A", "slow_A"))], 0.051
        )


TESTS = {
    "Random: half of the patches, no module": "Random",
    "module frozen after the initial stage": "module frozen",
    "neighbours together: blocks of 2 × 2 patches": "blocks of 2x2 patches",
    "whole clips in every fourth step": "whole clips every 4th step",
    "contrast on chosen patches, reconstruction on all": "contrast on chosen, reconstruction on all",
    "visible patches chosen, all others reconstructed": "visible patches chosen",
    "visible patches at random, chosen ones reconstructed": "targets chosen",
    "no pruning** (LPIS only)": "no pruning (LPIS only)",
}


def test_why_stella_is_below_derpp_is_written_as_it_was_found() -> None:
    found, shown = read("room/tests.csv"), table("room/README.md", "| | A | F | slow A | − STELLA")
    derpp = read("room/results.csv")["derpp"]
    assert {TESTS.get(label, label) for label in shown} == set(found)
    for label, row in shown.items():
        rows = found[TESTS.get(label, label)]
        own = [f"{spread(rows, of).mean:.2f} ± {spread(rows, of).deviation:.2f}" for of in ("A", "slow_A")]
        assert [row[0].replace("*", ""), row[2].replace("*", "")] == own, label
        assert row[1] == spread(rows, "F").short, label
        for cell, base in zip(row[3:], (found["STELLA"], derpp), strict=True):
            differences = ", ".join(signed(str(less(rows, base, of))) for of in ("A", "slow_A"))
            assert not cell or cell.replace("+", "") == differences, label


PRUNED = {
    "any patches of the more important half pruned, as many": "any of the important patches pruned",
    "sharper C: its logits times 10": "sharper C: logits times 10",
    "pruned in past clips alone": "pruned in drawn clips alone",
    "no pruning, a quarter drawn by importance, the rest uniformly": (
        "no pruning, a quarter by importance, the rest drawn uniformly"
    ),
    "no penalty": "STELLA, no penalty",
    "Random: a random half": "neither: a random half",
}


def test_what_in_pruning_costs_a_is_written_as_it_was_found() -> None:
    found = read("room/chosen.csv")
    shown = table("room/README.md", "| | A | F | slow A | − STELLA: working, slow | − no pruning")
    assert {PRUNED.get(label, label) for label in shown} == set(found)
    bases = found["STELLA"], found["no pruning (LPIS only)"]
    for label, row in shown.items():
        rows = found[PRUNED.get(label, label)]
        own = [f"{spread(rows, of).mean:.2f} ± {spread(rows, of).deviation:.2f}" for of in ("A", "slow_A")]
        assert len(rows) == 5 and [row[0], row[1], row[2]] == [own[0], spread(rows, "F").short, own[1]], label
        for cell, base in zip(row[3:], bases, strict=True):
            differences = ", ".join(signed(str(less(rows, base, of))) for of in ("A", "slow_A"))
            assert (not cell and rows is base) or cell.replace("+", "") == differences, label
    text, (stella, unpruned) = prose("room/README.md"), bases
    video, audio = found["pruned in video alone"], found["pruned in audio alone"]
    assert f"and F is {less(unpruned, video, 'F')} lower" in text
    assert f"Pruned in audio alone F is {less(unpruned, audio, 'F')} lower" in text
    assert f"F is a little higher ({less(found['any of the important patches pruned'], stella, 'F')}" in text
    assert min(less(found["any of the important patches pruned"], stella, "F").values) > 0
    assert min(less(video, stella, "A").values) > 0


SEEN_BY = ("A", "A on 0.5", "A by STELLA", "A by no pruning", "A by uniform importance")


def test_a_on_selected_patches_is_written_as_it_was_found() -> None:
    found, shown = read("room/chosen.csv"), table("room/README.md", "| A, evaluated on | all patches | a random half |")
    assert len(shown) == 7
    for label, row in shown.items():
        assert row == list(spreads(found[PRUNED.get(label, label)], *SEEN_BY)), label


def test_what_pruning_takes_is_written_as_it_is() -> None:
    shown = table("room/README.md", "| share of patches kept")
    found = grouped("room/pruned.csv", "patches", "rule")
    for label, rule in zip(shown, ("STELLA", "no pruning", "uniform importance", "random", "pruned"), strict=True):
        for at, patches in enumerate(("video", "audio")):
            kept = [100 * float(row["object"]) for row in found[patches, rule]]
            said, figures = numbers(shown[label][2 * at]), [sum(kept) / 15, min(kept), max(kept)]
            assert len(kept) == 15 and said == pytest.approx(figures[: len(said)], abs=0.51)
            close(shown[label][2 * at + 1], [100 * spread(found[patches, rule], "rest").mean], 0.51)


SCORED = {
    "`tiny`": ("tiny", True),
    "`tiny`, after each of five tasks": ("tiny", False),
    "`small`": ("small", True),
    "`small`, the paper's shapes": ("small, the paper's shapes", True),
}


def test_what_scores_tell_is_written_as_it_is() -> None:
    shown, found = table("room/README.md", "| what STELLA's scores tell"), grouped("room/correlation.csv", "model")
    assert len(shown) == 2 * len(SCORED)
    for label, (model, first) in SCORED.items():
        for patches in ("video", "audio"):
            rows = [row for row in found[(model,)] if row["patches"] == patches and (row["after"] == "0") == first]
            assert len(rows) % 5 == 0
            columns = ("mean", "within_clip", "low", "high", "importance_1", "kept_1", "kept_2", "kept_3", "kept_4")
            means = [spread(rows, column).mean for column in columns]
            said = [number for cell in shown[f"{label}: {patches}"] for number in numbers(cell)]
            assert said[:4] == pytest.approx(means[:4], abs=0.0051)
            assert said[4:] == pytest.approx([100 * mean for mean in means[4:]], abs=0.51)


STORES = ["rule=random", "rule=random keep_ratio=0.3", "rule=random keep_ratio=0.25", "rule=importance", "rule=block"]


def test_what_a_memory_wants_is_written_as_it_is() -> None:
    found = grouped("room/room.csv", "method", "memory", "changed", "precision")
    derpp, unlimited = (found["derpp", size, "alpha=0.1", "bfloat16"] for size in ("36 MB", "unlimited"))
    low, high = (spread(rows, "A_480").mean for rows in (derpp, unlimited))
    er = [row for row in found["er", "36 MB", "", "bfloat16"] if int(row["seed"]) < 103]
    kinds = [er, *(found["patch_memory", "36 MB", rule, "bfloat16"] for rule in STORES)]
    kinds.append(found["er", "324 MB", "", "bfloat16"])
    shown = table("room/README.md", "| 36 MB, no penalty")
    for rows, (label, row) in zip(kinds, shown.items(), strict=True):
        assert row[:2] == [f"{int(rows[0]['capacity']):,}", str(len(rows))], label
        for cell, column in ((row[2], "A_480"), (row[4], "slow_A_480")):
            value = spread(rows, column)
            assert cell.replace("*", "") == f"{value.mean:.2f} ± {value.deviation:.2f}", label
        won = 100 * (spread(rows, "A_480").mean - low) / (high - low)
        assert not row[5] or row[5] == signed(f"{won:.0f}%"), label


def test_bases_are_written_as_they_are() -> None:
    last = {row["name"]: row for row in lines("bases/bases.csv") if row["final"] == "True"}
    columns = ["step", "seconds", "A_base", "A", "x_chance", "avm", "ratio_min", "pointing", "auc", "near_same_timing"]
    near = [0.5, 0.5, 0.051, 0.0051, 0.051, 0.051, 0.5, 0.5, 0.0051, 0.0051]
    shown = {label.split("*")[0].split(" ")[0]: row for label, row in table("bases/README.md", "| run | start").items()}
    assert last.keys() == shown.keys() - {"shipped"}
    for name, row in last.items():
        for cell, column, within in zip(shown[name][2:], columns, near, strict=True):
            assert float(cell.replace(",", "")) == pytest.approx(float(row[column]), abs=within), (name, column)
    sets = {
        label.strip("*`").split("*")[0].strip("`"): row
        for label, row in table("bases/README.md", "| weights | 1").items()
    }
    for name, rows in read_by("bases/clip_sets.csv", "weights").items():
        values = [float(row["A"]) for row in rows]
        assert [float(cell) for cell in sets[name][:5]] == pytest.approx(values, abs=0.0051), name
        assert float(sets[name][5]) == pytest.approx(sum(values) / 5, abs=0.041), name


def test_earlier_tables_are_written_as_they_are() -> None:
    names = {"Finetune": "finetune", "ER": "er", "DER++": "derpp", "STELLA": "stella", "STELLA+": "stella_plus"}
    found = read("scenes/results.csv")
    for label, row in table("README.md", "| method | A").items():
        if label in names:
            assert [cell.replace("*", "") for cell in row] == list(spreads(found[names[label]], "A", "F")), label
    found = read("why/results.csv")
    for name, row in zip(
        ("derpp", "stella", "free", "chunk-1", "keep-75"), table("README.md", "| five seeds").values(), strict=True
    ):
        assert [cell.replace("*", "") for cell in row] == list(spreads(found[name], "A", "F")), name
    found = read("scoring/results.csv") | read("scoring/fast.csv")
    order = ["full", "every", "every-3", "depth", "frames", "full-fast", "fp8-fast", "every-fast", "every-4-fast"]
    for name, row in zip(order, table("README.md", "| scoring |").values(), strict=True):
        by_seed = ", ".join(f"{float(line['A']):.1f}" for line in sorted(found[name], key=lambda line: line["seed"]))
        assert row[1:] == [*spreads(found[name], "A", "F"), by_seed], name


def test_attention_is_written_as_it_fades() -> None:
    for name, row in zip(("derpp", "stella"), table("fading/README.md", "| mean over tasks").values(), strict=True):
        said = [numbers(cell.replace(", ", " ")) for cell in row]
        for seed in range(3):
            rows = [line for line in read("fading/fading.csv")[name] if line["seed"] == str(seed)]
            at = [[float(line[f"task{task}_ciou"]) for task in range(1, 7)] for line in rows]  # [after, task]
            after = [sum(at[t][t] for t in range(5)) / 5, sum(at[t + 2][t] for t in range(4)) / 4, sum(at[5][:5]) / 5]
            assert [column[seed] for column in said] == pytest.approx(after, abs=0.051), (name, seed)


def test_shipped_weights_meet_the_criteria_that_are_written() -> None:
    """On each of five sets of clips; at the paper's shapes A does not."""
    found, text = read_by("bases/criteria.csv", "weights"), prose("bases/README.md")

    def least(name: str, figure: str) -> float:
        return min(float(row[figure]) for row in found[name])

    for name in ("base-wide", "base-wide-small"):
        assert len(found[name]) == 5 and least(name, "times_chance") >= 10
        assert least(name, "pairs") >= 75 and least(name, "least_importance_ratio") >= 5
    pairs = [float(row["pairs"]) for row in found["base-wide"]]
    assert f"{min(pairs):.0f} to {max(pairs):.0f}% of pairs" in text
    assert f"ratio ≥ {least('base-wide', 'least_importance_ratio'):.0f})" in text
    small = "base-wide-small"
    assert f"{least(small, 'least_pairs_of_a_task'):.0f}% or more of every task's pairs" in text
    assert f"lowest ratio {least(small, 'least_importance_ratio'):.0f}: all three criteria" in text
    [full] = found["base-wide-small, 224 px"]
    assert f"**{float(full['times_chance']):.1f} times chance, below the criterion of 10**" in text
    assert f"a lowest ratio of {float(full['least_importance_ratio']):.0f}" in text

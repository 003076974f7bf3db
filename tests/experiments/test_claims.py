"""Differences in the prose of results, paired over seeds, are those of the CSV beside it."""

import re

import pytest
from helpers.tables import ROOT, results

from stella.runs.record import Spread

# Page, what it says, and the differences in it: the first row minus the second, in this figure.
T, S, F = "table1", "table1-small", "table1-full"
WITH_CODEC = "stella_plus-dct derpp-dct A|stella_plus-dct derpp-dct slow_A"
CLAIMS = [
    (T, "Chorus is {} and {} above MIR (shuffled {} and {})", "chorus mir-dct A|chorus mir-dct slow_A|*"),
    (T, "{} and {} above ER (shuffled {} and {})", "chorus er-dct A|chorus er-dct slow_A|*"),
    (T, "Chorus is {} above it, shuffled {}, ahead on four of five seeds in each", "chorus er-dct-3 A|*"),
    (T, "Its F is lower too ({}; shuffled {}, whose 95% interval", "er-dct-3 chorus F|*"),
    (T, "None is above ER: DER++ is {} below it, shuffled {}, on every seed", "er-dct-3 derpp-dct-3 A|*"),
    (T, "CLS-ER is {} below it, shuffled {}, of which the first", "er-dct-3 cls_er-dct-3 A|*"),
    (T, "{} above DER++, shuffled {};", "chorus derpp-dct-3 A|*"),
    (T, "{} above CLS-ER, shuffled {};", "chorus cls_er-dct-3 A|*"),
    (T, "{} above STELLA+, shuffled {}.", "chorus stella_plus-dct-3 A|*"),
    (T, "(by {} and {}); five seeds separate no other", "derpp-dct-3 chorus F|cls_er-dct-3 chorus F"),
    (T, "below DER++ on every seed and in both orders**: {}, shuffled {}.", "stella derpp A|*"),
    (T, "STELLA+ is {} above STELLA (shuffled {})", "stella_plus stella A|*"),
    (T, "cannot be told from DER++ in A (+{}; shuffled {})", "stella_plus derpp A|*"),
    (T, "on every seed of both orders (F {}; shuffled {})", "stella_plus derpp F|*"),
    (T, "(shuffled it is {} below on all five seeds)", "@derpp stella++ A"),
    (T, "(+{} over DER++, +{} over CLS-ER", "stella++-steps derpp A|stella++-steps cls_er A"),
    (T, "MIR equals ER with 204 clips ({}, shuffled {})", "mir er A|*"),
    (S, "it is {} and {} above ER with the codec", "chorus er-dct A|chorus er-dct slow_A"),
    (S, "{} and {} above DER++ with the codec", "chorus derpp-dct A|chorus derpp-dct slow_A"),
    (S, "{} and {} above DER++ with unlimited memory", "chorus derpp-unlimited A|chorus derpp-unlimited slow_A"),
    (S, "Chorus is {} and {} above it and forgets less", "chorus er-dct-3 A|chorus er-dct-3 slow_A"),
    (S, "{} and {} above ER with 3 past clips", "@chorus er-dct-3 A|@chorus er-dct-3 slow_A"),
    (S, "past clips, {} and {} above ER with the codec,", "@chorus er-dct A|@chorus er-dct slow_A"),
    (S, "Chorus is {} and {} above it with the codec", "chorus mir-dct A|chorus mir-dct slow_A"),
    (S, "{} and {} above MIR with it.", "@chorus mir-dct A|@chorus mir-dct slow_A"),
    (S, "With it STELLA+ is {} below DER++", "derpp-dct stella_plus-dct A"),
    (S, "STELLA {} (shuffled {}), each on every seed", "derpp-dct stella-dct A|@derpp-dct stella-dct A"),
    (S, "STELLA is {} below DER++, on every seed", "derpp stella A"),
    (S, "STELLA+ is {} above STELLA, cannot be told from DER++ in A ({})", "stella_plus stella A|stella_plus derpp A"),
    (S, "forgets less on every seed (F {})", "stella_plus derpp F"),
    (S, "DER++ is above ER on every seed, {}", "derpp er A"),
    (
        S,
        "STELLA is {} below DER++ on every seed, STELLA+ cannot be told from DER++ in A ({}) and has a lower F on "
        "every seed ({}), DER++ is {} above ER on every seed",
        "@derpp stella A|@stella_plus derpp A|@stella_plus derpp F|@derpp er A",
    ),
    (S, "unlimited memory (3.0) F is lower by {} and {}", "@er-dct-3 chorus F|@derpp-unlimited chorus F"),
    (S, "with slow weights they do ({} and {})", "@er-dct-3 chorus slow_F|@derpp-unlimited chorus slow_F"),
    (F, "It is {} above DER++, {} with slow weights", "stella_plus derpp A|stella_plus derpp slow_A"),
    (F, "forgets less on every seed (F {}, slow {})", "stella_plus derpp F|stella_plus derpp slow_F"),
    (F, "STELLA is below DER++ here too, by {};", "derpp stella A"),
    (F, "DER++ is {} above ER**", "derpp er A"),
    (F, "ER with the codec has 23.3 ± 0.3, {} above ER", "er-dct er A"),
    (F, "STELLA+ cannot be told from DER++ any more ({}, slow {})", WITH_CODEC),
    (F, "on every seed (slow {} and {}, whose", "derpp-dct er-dct slow_A|stella_plus-dct er-dct slow_A"),
    (F, "above DER++ with the codec by {} (slow {})", "chorus derpp-dct A|chorus derpp-dct slow_A"),
    (F, "explains {} of the 6.2 points", "er-dct-3 er-dct A"),
    (F, "Chorus is {} above that (slow {})", "chorus er-dct-3 A|chorus er-dct-3 slow_A"),
    (F, "forgets less (F {}, slow {}), both", "chorus er-dct-3 F|chorus er-dct-3 slow_F"),
    (F, "STELLA+ with it by {} ({})", "chorus stella_plus-dct A|chorus stella_plus-dct slow_A"),
    (F, "unlimited memory by {} ({})", "chorus derpp-unlimited A|chorus derpp-unlimited slow_A"),
    (F, "DER++ with unlimited memory is {} above it", "derpp-unlimited multitask A"),
]
EVERY_SEED = [  # which the pages say: more of the figure on every seed that both have
    (T, "derpp stella A|@derpp stella A|derpp stella_plus F|@derpp stella_plus F"),
    (T, "er stella_plus F|@er stella_plus F|er-dct-3 derpp-dct-3 A|@er-dct-3 derpp-dct-3 A"),
    (T, "chorus er-dct-3 slow_A|@chorus er-dct-3 slow_A|chorus derpp-dct-3 A|@chorus derpp-dct-3 A"),
    (T, "chorus cls_er-dct-3 A|@chorus cls_er-dct-3 A|@chorus stella_plus-dct-3 A"),
    (T, "chorus stella_plus-dct-3 A|@chorus stella_plus-dct-3 A|stella_plus-dct-3 derpp-unlimited A"),
    (T, "@stella_plus-dct-3 derpp-unlimited A|derpp-dct-3 derpp-unlimited A|@cls_er-dct-3 derpp-unlimited A"),
    (S, "chorus er-dct-3 A|chorus er-dct-3 slow_A|er-dct-3 chorus F|@chorus er-dct-3 A|@chorus er-dct-3 slow_A"),
    (S, "chorus derpp-unlimited A|@chorus derpp-unlimited A|@chorus multitask A|@chorus multitask slow_A"),
    (S, "derpp stella A|@derpp stella A|derpp er A|@derpp er A|derpp stella_plus F|@derpp stella_plus F"),
    (S, "er stella_plus F|@er stella_plus F|chorus mir-dct A|@chorus mir-dct A|derpp-dct stella_plus-dct A"),
    (S, "@derpp-dct stella_plus-dct A|derpp-dct stella-dct A|@derpp-dct stella-dct A"),
    (F, "derpp-dct er-dct A|stella_plus-dct er-dct A|chorus derpp-dct A|chorus stella_plus-dct A"),
    (F, "chorus er-dct-3 A|chorus er-dct-3 slow_A|er-dct-3 chorus F|er-dct-3 chorus slow_F|er-dct-3 er-dct A"),
    (F, "derpp-dct multitask A|stella_plus-dct multitask A"),
    (F, "stella_plus derpp A|stella_plus derpp slow_A|derpp stella_plus F|derpp stella_plus slow_F|er stella_plus F"),
    (F, "chorus derpp-unlimited A|chorus derpp-unlimited slow_A|multitask stella_plus A|derpp stella A|stella er A"),
]


def paired(page: str, words: str) -> Spread:
    """`@` is the shuffled order."""
    order = "shuffled" if words[0] == "@" else "original"
    better, worse, figure = words.lstrip("@").split()
    rows = [{row["seed"]: row[figure] for row in results(page)[f"{order}/{name}"]} for name in (better, worse)]
    found = Spread([float(rows[0][seed]) - float(rows[1][seed]) for seed in rows[0] if seed in rows[1]])
    assert len(found.values) > 2, words
    return found


def difference(page: str, words: str) -> str:
    """As the page writes it: with a minus sign, zero without one."""
    return str(paired(page, words)).replace("-0.0 ", "0.0 ").replace("-", "−")


@pytest.mark.parametrize(("page", "text", "of"), CLAIMS)
def test_paired_differences_are_written_as_they_are(page: str, text: str, of: str) -> None:
    """`*` says again in the shuffled order what stands before it."""
    said = of.removesuffix("|*").split("|")
    said += [f"@{words}" for words in said] if of.endswith("*") else []
    values = [difference(page, words) for words in said]
    written = re.sub(r"\s+", " ", (ROOT / "results" / page / "README.md").read_text(encoding="utf-8"))
    assert text.format(*values) in written


@pytest.mark.parametrize(("page", "of"), EVERY_SEED)
def test_what_is_said_of_every_seed_holds(page: str, of: str) -> None:
    for words in of.split("|"):
        assert min(paired(page, words).values) > 0, words

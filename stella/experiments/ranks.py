"""Which method is better, over seeds that all share: mean ranks with confidence, and agreement with an order."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stella.experiments.results import Rows

# Student's t, two-sided 95%, for 3 to 31 seeds; the last one for more
T95 = (4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09,
       2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04)  # fmt: skip
FEWEST = 3  # methods, and seeds, worth ranking


@dataclass(frozen=True)
class MeanRank:
    mean: float  # 1 is the best
    around: float  # half of the 95% interval of the mean, by Student's t over seeds

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.around:.1f}"


def shared_seeds(found: Mapping[str, Rows], figure: str) -> list[str]:
    """Seeds for which every method has the figure: draws of clips and masks are then the same for all."""
    seeds = [{row["seed"] for row in rows if row.get(figure)} for rows in found.values()]
    return sorted(set.intersection(*seeds), key=int) if seeds else []


def mean_ranks(found: Mapping[str, Rows], figure: str = "A") -> dict[str, MeanRank]:
    """The mean rank of each method over the shared seeds, the largest figure first. Equal figures share the mean
    of their ranks. Empty for fewer than three methods or seeds."""
    seeds = shared_seeds(found, figure)
    if min(len(seeds), len(found)) < FEWEST:
        return {}
    by_seed = {name: {row["seed"]: row for row in rows} for name, rows in found.items()}
    values = np.array([[float(rows[seed][figure]) for seed in seeds] for rows in by_seed.values()])  # [methods, seeds]
    above = (values[None] > values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)  # itself included
    ranks = above + (equal + 1) / 2
    return {
        name: MeanRank(float(mean), half_interval(float(deviation), len(seeds)))
        for name, mean, deviation in zip(found, ranks.mean(1), ranks.std(axis=1, ddof=1), strict=True)
    }


def half_interval(deviation: float, n: int) -> float:
    """Half of the 95% interval of a mean over n ≥ 3 values, by Student's t."""
    return T95[min(n - FEWEST, len(T95) - 1)] * deviation / math.sqrt(n)


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's τ-b of two orders: 1 if all pairs of methods stand alike in both, −1 if none does."""
    ours, theirs = np.array(pairs, dtype=float).T
    first, second = np.triu_indices(len(pairs), 1)
    here, there = np.sign(ours[first] - ours[second]), np.sign(theirs[first] - theirs[second])
    untied = math.sqrt((here != 0).sum() * (there != 0).sum())
    return float((here * there).sum() / untied) if untied else math.nan

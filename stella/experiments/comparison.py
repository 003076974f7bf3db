"""What `stella compare` leaves: A and F of each method, and how far its A is above the others' on the same seeds."""

import math
from collections.abc import Mapping, Sequence

from stella.experiments.ranks import FEWEST, half_interval
from stella.experiments.tables import Sheet
from stella.report.tables import named_ceilings
from stella.runs.record import Group, Spread


def comparison(groups: Sequence[Group], ceilings: Mapping[str, float] | None) -> list[Sheet]:
    return [_figures(groups, ceilings), *_differences(groups)]


def _figures(groups: Sequence[Group], ceilings: Mapping[str, float] | None) -> Sheet:
    versions = [version for group in groups for version in group.versions]
    rows = [[one.label, one.progress, str(one.spread("A")), str(one.spread("F"))] for one in versions]
    below = [[name, "", f"{value:.1f}", ""] for name, value in named_ceilings(ceilings or {}).items()]
    notes = ["A: mean of R@1/5/10 over all tasks in %. Mean ± deviation over runs."]
    return Sheet("Retrieval after the last task", "", ["", "runs", "A ↑", "F ↓"], rows, below, notes)


def _differences(groups: Sequence[Group]) -> list[Sheet]:
    """Over the seeds that all methods have; none for a single method or seed."""
    found = [{run.seed: run.summary["A"] for run in group.finished} for group in groups]
    seeds = sorted(set.intersection(*map(set, found))) if found else []
    if min(len(groups), len(seeds)) < 2:
        return []
    labels = [group.label for group in groups]
    rows = [
        [label, *("" if a is b else _cell([a[seed] - b[seed] for seed in seeds]) for b in found)]
        for label, a in zip(labels, found, strict=True)
    ]
    notes = [f"Differences on the same seeds ({', '.join(map(str, seeds))}): their mean ± deviation."]
    if len(seeds) >= FEWEST:
        notes += ["*: the 95% interval of the mean, by Student's t, excludes 0. No correction for several comparisons."]
    return [Sheet("A of the row less A of the column", "", ["", *labels], rows, [], notes)]


def _cell(differences: list[float]) -> str:
    found = Spread(differences)
    around = half_interval(found.deviation or 0.0, len(differences)) if len(differences) >= FEWEST else math.inf
    return f"{found}{'*' if abs(found.mean) > around else ''}"

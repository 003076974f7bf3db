"""Exact nearest neighbours by inner product, over memory-mapped float16 rows.

One pass multiplies the rows by the query in half precision: it reads each row once and converts it in registers, twice
as fast as a conversion to float32 in memory. Its scores are off by less than `error_bound`. So the first few candidates
are scored again in float64, and those that no other row can overtake are returned. The order is that of the stored
vectors' exact products; equal scores keep the order of rows.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

FIRST = 64  # candidates scored exactly at first; four times as many whenever they do not suffice

Place = tuple[int, int]  # shard, row
Shards = dict[int, Tensor]  # float16 [rows, D] by shard


def ranked(shards: Shards, query: Tensor, allowed: Tensor | None = None) -> Iterator[tuple[Place, float]]:
    """All rows with their scores, best first, computed as far as the caller asks. `allowed` is bool [rows of all]."""
    if not shards:
        return
    scores = torch.cat([torch.mv(rows, query.half()) for rows in shards.values()]).float()
    if allowed is not None:
        scores[~allowed] = -torch.inf
    total = len(scores) if allowed is None else int(allowed.sum())

    def candidates(count: int) -> tuple[Tensor, float]:
        values, positions = scores.topk(min(count, total))
        last = float(values[-1])
        return positions, last + error_bound(query, abs(last)) if count < total else -torch.inf

    yield from refined(shards, query, candidates, total)


def error_bound(query: Tensor, score: float) -> float:
    """How far a half-precision product of that size may be from the exact one, for unit rows.

    The query's rounding, sums in float32 (torch's for half-precision products), and the result's rounding.
    """
    rounding = float((query - query.half().float()).norm())
    return 1.001 * (rounding + len(query) * 2.0**-24) + 2.0**-10 * score + 2.0**-24


def refined(
    shards: Shards, query: Tensor, candidates: Callable[[int], tuple[Tensor, float]], total: int
) -> Iterator[tuple[Place, float]]:
    """Rows in exact order. `candidates(n)` returns positions, and a score that no other row exceeds."""
    given, count = 0, min(FIRST, total)
    while given < total:
        positions, others = candidates(count)
        positions = positions.sort().values
        exact = exact_scores(shards, query, positions)
        exact, order = exact.sort(descending=True, stable=True)
        sure = len(order) if others == -torch.inf else int((exact > others).sum())
        places = place_of(shards, positions[order[given:sure]])
        yield from zip(places, exact[given:sure].tolist(), strict=True)
        given, count = max(given, sure), 4 * count
        if len(positions) == total or others == -torch.inf:
            return


def exact_scores(shards: Shards, query: Tensor, positions: Tensor) -> Tensor:
    """float64 [n]."""
    wide = query.double()
    shard_numbers, rows = _split(shards, positions)
    scores = torch.empty(len(positions), dtype=torch.float64)
    for number, tensor in enumerate(shards.values()):
        here = shard_numbers == number
        if here.any():
            scores[here] = (tensor[rows[here]].double() * wide).sum(1)  # row by row: no other row changes a score
    return scores


def place_of(shards: Shards, positions: Tensor) -> list[Place]:
    names = list(shards)
    numbers, rows = _split(shards, positions)
    return [(names[number], row) for number, row in zip(numbers.tolist(), rows.tolist(), strict=True)]


def first_rows(shards: Shards) -> Tensor:
    """The position of each shard's first row, with all rows numbered consecutively."""
    lengths = torch.tensor([len(rows) for rows in shards.values()])
    return lengths.cumsum(0) - lengths


def _split(shards: Shards, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Which shard (0, 1, …) and which row of it."""
    starts = first_rows(shards)
    numbers = torch.bucketize(positions, starts, right=True) - 1
    return numbers, positions - starts[numbers]

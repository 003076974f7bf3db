"""Retrieval against the full matrix, ties, broken embeddings, and the evaluation of real clips."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stella.data.scenes import Scenes
from stella.data.stream import StreamConfig
from stella.errors import StellaError
from stella.evaluate.retrieval import Embeddings, embed, modality_gap, ranks, recall, task_recall
from stella.model.cav import CAV, preset

STREAM = StreamConfig(batch_size=4, size=96, spec_frames=256)


def naive_ranks(query: Tensor, gallery: Tensor, targets: list[int]) -> list[int]:
    """One query at a time: everything as near as the target, or nearer, stands before it."""
    places = []
    for q, target in zip(query, targets, strict=True):
        scores = [sum(a * b for a, b in zip(q.tolist(), g.tolist(), strict=True)) for g in gallery]
        others = [s for i, s in enumerate(scores) if i != target]
        places.append(1 + sum(s >= scores[target] for s in others))
    return places


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_ranks_equal_the_naive_ones_with_many_ties_for_every_chunk(
    queries: int, clips: int, chunk: int, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    query = torch.randint(-1, 2, (queries, 3), generator=gen).float()  # small integers: ties are exact
    gallery = torch.randint(-1, 2, (clips, 3), generator=gen).float()
    targets = torch.randint(0, clips, (queries,), generator=gen)
    expected = naive_ranks(query, gallery, targets.tolist())
    assert ranks(query, gallery, targets, chunk).tolist() == expected
    assert ranks(query, gallery, targets).tolist() == expected


def test_no_more_than_a_chunk_of_scores_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    matmul = Tensor.__matmul__

    def watched(self: Tensor, other: Tensor) -> Tensor:
        nonlocal largest
        out = matmul(self, other)
        largest = max(largest, out.numel())
        return out

    monkeypatch.setattr(Tensor, "__matmul__", watched)
    ranks(torch.randn(100, 4), torch.randn(90, 4), torch.arange(100) % 90, chunk=16)
    assert largest == 16 * 16


def test_ties_count_against_the_model() -> None:
    collapsed = torch.ones(20, 8) / 8**0.5
    assert ranks(collapsed, collapsed).tolist() == [20] * 20
    assert recall(ranks(collapsed, collapsed)) == {1: 0, 5: 0, 10: 0}


@pytest.mark.parametrize("dim", [96, 192, 768])
def test_equal_clips_tie_whatever_the_chunk(dim: int) -> None:
    gen = torch.Generator().manual_seed(dim)
    once = torch.nn.functional.normalize(torch.randn(50, dim, generator=gen))
    twice = torch.cat([once, once])  # in other columns a product may round otherwise
    for chunk in (3, 17, 64, 100):
        assert ranks(twice, twice, chunk=chunk).tolist() == [2] * 100


def test_what_is_not_a_number_stands_before_the_target() -> None:
    good = torch.eye(4)
    broken = good.clone()
    broken[2] = torch.nan
    assert ranks(good, broken).tolist() == [2, 2, 4, 2]
    assert ranks(broken, good).tolist() == [1, 1, 4, 1]


def test_reduced_precision_around_it_changes_no_rank() -> None:
    gen = torch.Generator().manual_seed(1)
    x = torch.nn.functional.normalize(1 + 0.01 * torch.randn(64, 16, generator=gen))  # hardly apart
    with torch.autocast("cpu", torch.bfloat16):
        places = ranks(x, x)
    assert places.tolist() == [1] * 64


def test_unpaired_without_targets_and_no_queries_are_refused() -> None:
    with pytest.raises(StellaError, match="3 queries and a gallery of 4"):
        ranks(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(StellaError, match="at least one usable clip"):
        recall(ranks(torch.ones(0, 2), torch.ones(0, 2)))


def test_every_task_is_ranked_among_the_clips_of_all() -> None:
    def clips(rows: Tensor, other: Tensor) -> Embeddings:
        return Embeddings(rows, other, torch.arange(len(rows)))

    eye = torch.eye(4)
    alone = clips(eye[:2], eye[:2])
    # The second task's audio 0 points at the first task's video 1, its audio 1 at its own.
    second = clips(eye[[1, 3]], eye[[2, 3]])
    table = task_recall([alone, second], ks=(1, 2))
    assert table["a2v"] == {"1": [100, 50], "2": [100, 50]}
    assert table["v2a"] == {"1": [50, 50], "2": [100, 50]}  # the first task's video 1 meets two equal audios
    assert task_recall([second], ks=(1, 2))["a2v"]["2"] == [100]  # an easier gallery


def test_embeddings_are_the_models_normalised_in_order_with_the_short_batch() -> None:
    torch.manual_seed(0)
    model, source = CAV(preset("tiny")), Scenes("task1", "eval", 6)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = embed(model, source, STREAM)
    assert found.ids.tolist() == [0, 1, 2, 3, 4, 5] and found.a.shape == found.v.shape == (6, 96)
    video = source[5].video[None]
    with torch.no_grad():
        alone = torch.nn.functional.normalize(model.represent_v(video))
    torch.testing.assert_close(found.v[5:], alone)
    torch.testing.assert_close(found.a.norm(dim=1), torch.ones(6))
    assert not found.a.requires_grad and all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


def test_modality_gap_is_the_distance_of_the_centroids() -> None:
    a, v = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, -1.0]])
    assert modality_gap(a, v) == pytest.approx((0.5**2 + 1.5**2) ** 0.5)
    assert modality_gap(a, a) == 0
    assert modality_gap(v, -v) == 2

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from stella.errors import StellaError
from stella.learn.home import Home
from stella.learn.translate import procrustes, translation


def unit(n: int, dim: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1)


def test_a_rotation_is_found_exactly_and_keeps_lengths() -> None:
    turn = torch.linalg.qr(unit(16, 16, 0)).Q
    old = unit(40, 16, 1)
    new = old @ turn.T  # the new version turned the space
    found = procrustes(new, old)
    assert torch.allclose(found, turn, atol=1e-10)
    queries = unit(9, 16, 2)
    assert torch.allclose((queries @ found).norm(dim=1), torch.ones(9, dtype=torch.float64))
    assert torch.allclose(queries @ found @ found.T, queries)


def test_it_is_the_best_orthogonal_map() -> None:
    """No small turn away from it fits better."""
    new, old = unit(50, 6, 3), unit(50, 6, 4)
    found = procrustes(new, old)
    best = (new @ found - old).norm()
    for seed in range(20):
        skew = 0.05 * torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        other = found @ torch.matrix_exp(skew - skew.T)
        assert (new @ other - old).norm() > best


def test_other_clips_are_refused() -> None:
    with pytest.raises(StellaError, match="are not the same clips"):
        procrustes(unit(5, 4, 0), unit(6, 4, 0))


def test_states_without_common_clips_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match="has no embeddings of round 1"):
        translation(Home(tmp_path), 1)

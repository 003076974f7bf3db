import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from stella.embed import translate
from stella.embed.translate import Measured, kept_weights, moved, procrustes, state_in_use, translation
from stella.errors import StellaError


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


def test_directions_that_no_clip_shows_stay_as_they_are() -> None:
    """With a prior, as far as clips say nothing; without one they would turn anywhere."""
    old = torch.zeros(12, 8, dtype=torch.float64)
    old[:, :4] = unit(12, 4, 1)
    turn = torch.eye(8, dtype=torch.float64)
    turn[:4, :4] = torch.linalg.qr(unit(4, 4, 2)).Q
    found = procrustes(old @ turn.T, old, 1e-6)
    assert torch.allclose(found, turn, atol=1e-4)
    assert torch.allclose(procrustes(old @ turn.T, old, 1e9), torch.eye(8, dtype=torch.float64), atol=1e-4)


def rounds(home: Path, turns: list[torch.Tensor], clips: list[range]) -> torch.Tensor:
    """A learner whose state n turns all clips by `turns[n]` and has measured with clips[n]."""
    every = unit(200, 6, 9).float()
    for number, (turn, own) in enumerate(zip(turns, clips, strict=True), 1):
        folder = home / "rounds" / f"{number:06d}"
        folder.mkdir(parents=True)
        both = every[list(own)] @ turn
        Measured(f"state {number}", [str(i) for i in own], both, both).write(folder / "embeddings.pt")
    return every


def test_the_way_between_two_states_leads_over_those_with_the_same_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "PRIOR", 1e-6)  # these states have nothing in common
    turns = [torch.linalg.qr(unit(6, 6, seed)).Q.float() for seed in range(3)]
    every = rounds(tmp_path, turns, [range(100), range(50, 150), range(100, 200)])  # the first and the last share none
    for here, there in ((2, 0), (0, 2), (1, 0), (2, 1)):
        found = translation(tmp_path, f"state {here + 1}", f"state {there + 1}")
        assert torch.allclose(found @ found.T, torch.eye(6), atol=1e-5)
        near = ((every @ turns[here]) @ found * (every @ turns[there])).sum(1)
        assert near.min() > 0.999, (here, there)


def test_what_no_clip_shows_is_not_turned(tmp_path: Path) -> None:
    """Of six directions clips show three, in which all is turned."""
    turn, axes = torch.eye(6), torch.linalg.qr(unit(6, 6, 4)).Q.float()
    turn[:3, :3] = torch.linalg.qr(unit(3, 3, 5)).Q.float()
    for number, each in enumerate((torch.eye(6), turn), 1):
        (folder := tmp_path / "rounds" / f"{number:06d}").mkdir(parents=True)
        both = F.pad(unit(200, 3, 9).float(), (0, 3)) @ each @ axes
        Measured(f"state {number}", [str(i) for i in range(200)], both, both).write(folder / "embeddings.pt")
    found = translation(tmp_path, "state 1", "state 2")
    assert torch.allclose(axes[3:] @ found, axes[3:], atol=1e-5)


def test_states_without_common_clips_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match="has not kept how its states"):
        translation(tmp_path, "new", "old")
    rounds(tmp_path, [torch.eye(6)] * 2, [range(100), range(90, 190)])
    with pytest.raises(StellaError, match="too few clips"):
        translation(tmp_path, "state 2", "state 1")
    with pytest.raises(StellaError, match="has not kept how its states"):
        translation(tmp_path, "state 2", "state 7")


def test_a_state_that_two_rounds_have_measured_is_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that trains on nothing leaves the state as it was."""
    monkeypatch.setattr(translate, "PRIOR", 1e-6)
    turn = torch.linalg.qr(unit(6, 6, 0)).Q.float()
    every = rounds(tmp_path, [torch.eye(6), turn], [range(100)] * 2)
    shutil.copytree(tmp_path / "rounds/000002", tmp_path / "rounds/000003")
    assert torch.allclose(every @ turn @ translation(tmp_path, "state 2", "state 1"), every, atol=1e-4)


def test_a_damaged_file_of_a_state_hides_no_other_one(tmp_path: Path) -> None:
    """Where a learner went is only a note, and weights are looked for among all states."""
    rounds(tmp_path, [torch.eye(6)] * 2, [range(20)] * 2)
    (tmp_path / "current").symlink_to("rounds/000002")
    (tmp_path / "rounds/000001/model.safetensors").touch()
    damaged = tmp_path / "undone/000003-0a1b2c"
    damaged.mkdir(parents=True)
    (damaged / "model.safetensors").touch()
    (damaged / "embeddings.pt").write_bytes(b"")
    assert moved(tmp_path, "state 1") == "the learner has gone on learning (round 2)"
    assert kept_weights(tmp_path, "state 1") == tmp_path / "rounds/000001/model.safetensors"
    assert state_in_use(tmp_path) == "state 2" and state_in_use(tmp_path / "nowhere") == ""

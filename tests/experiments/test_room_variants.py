"""What the variants of STELLA in `benchmarks/room_variants.py` prune, and what they leave as STELLA has it."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.method_toys import batch, method, step, train, trainer
from torch import Tensor

from stella.methods import METHODS
from stella.methods.stella import STELLA, Scores

NOW = 6  # clips of a batch; as many are drawn


@pytest.fixture(autouse=True)
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    with patch.dict(METHODS):
        importlib.import_module("room_variants").register()
        yield


def scored(name: str, monkeypatch: pytest.MonkeyPatch, **args: Any) -> tuple[Scores, Scores, STELLA]:
    """The scores of the current clips and those that patches of all clips are selected by, after some steps."""
    one = method(name, **args)
    train(one)
    assert isinstance(one, STELLA)
    of, by = list[Scores](), list[Scores]()
    scores, select = one.scores, one.select
    monkeypatch.setattr(one, "scores", lambda *given: of.append(scores(*given)) or of[-1])
    monkeypatch.setattr(one, "select", lambda a, v, each: by.append(each) or select(a, v, each))
    step(trainer(one), batch(NOW, 100))
    return of[0], by[0], one


def stellas(monkeypatch: pytest.MonkeyPatch) -> list[Scores]:
    """The scores as STELLA has them, which a variant will change."""
    true, scores = list[Scores](), STELLA.scores
    monkeypatch.setattr(STELLA, "scores", lambda *given: true.append(scores(*given)) or true[-1])
    return true


def zero(correlation: Tensor) -> bool:
    return bool((correlation == 0).all())


@pytest.mark.parametrize("pruned", "av")
def test_one_modality_alone_is_pruned(pruned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, by, _ = scored("stella_pruned_in", monkeypatch, pruned=pruned)
    for m in "av":
        assert zero(getattr(by, f"correlation_{m}")) == (m != pruned)


@pytest.mark.parametrize("pruned", ["current", "drawn"])
def test_current_or_drawn_clips_alone_are_pruned(pruned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, by, one = scored("stella_pruned_clips", monkeypatch, pruned=pruned)
    assert one.memory is not None
    stored = one.memory.draw(NOW)
    assert stored is not None
    for m in "av":
        used = getattr(by, f"correlation_{m}")
        assert len(used) == 2 * NOW
        assert [zero(used[:NOW]), zero(used[NOW:])] == [pruned == "drawn", pruned == "current"]
        assert not zero(getattr(of, f"correlation_{m}")) and not zero(stored[f"correlation_{m}"])


def test_any_of_the_important_patches_are_pruned_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each clip keeps its values of C, among the same patches, in another order."""
    true = stellas(monkeypatch)
    of, by, _ = scored("stella_pruned_any", monkeypatch)
    for m in "av":
        mixed, own = getattr(of, f"correlation_{m}"), getattr(true[-1], f"correlation_{m}")
        assert torch.equal(mixed.sort().values, own.sort().values) and torch.equal(mixed > 0, own > 0)
        assert not torch.equal(mixed, own) and torch.equal(getattr(by, f"correlation_{m}")[:NOW], mixed)


def test_a_sharper_correlation_is_further_from_a_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one head the logit is multiplied; by 1 it is STELLA's."""
    true = stellas(monkeypatch)
    for sharp in (1.0, 10.0):
        of, _, _ = scored("stella_sharp", monkeypatch, sharp=sharp, avm_heads=1)
        for m in "av":
            used, own = getattr(of, f"correlation_{m}"), getattr(true[-1], f"correlation_{m}")
            expected = torch.where(own > 0, (sharp * own.logit()).sigmoid(), 0)
            assert torch.allclose(used, expected, atol=1e-4)


@pytest.mark.parametrize("counted", [0.25, 0.5])
def test_less_important_patches_are_drawn_uniformly(counted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are drawn after them. C stays."""
    true = stellas(monkeypatch)
    of, _, _ = scored("stella_even_rest", monkeypatch, counted=counted)
    for m in "av":
        used, own = getattr(of, f"importance_{m}"), getattr(true[-1], f"importance_{m}")
        top, rest = own.sort(dim=1, descending=True).indices.tensor_split([int(counted * own.shape[1])], dim=1)
        assert torch.equal(used.gather(1, top), own.gather(1, top))
        others = used.gather(1, rest)
        assert (others == others[:, :1]).all() and (others < 1e-5 * used.gather(1, top).amin(1, keepdim=True)).all()
        assert torch.equal(getattr(of, f"correlation_{m}"), getattr(true[-1], f"correlation_{m}"))

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
    true, plain = list[Scores](), STELLA.scores
    monkeypatch.setattr(STELLA, "scores", lambda *given: true.append(plain(*given)) or true[-1])
    of, by, _ = scored("stella_pruned_any", monkeypatch)
    for m in "av":
        mixed, own = getattr(of, f"correlation_{m}"), getattr(true[-1], f"correlation_{m}")
        assert torch.equal(mixed.sort().values, own.sort().values) and torch.equal(mixed > 0, own > 0)
        assert not torch.equal(mixed, own) and torch.equal(getattr(by, f"correlation_{m}")[:NOW], mixed)

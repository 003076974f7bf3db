"""Gradients that are computed early are those that are computed late, and their activations are gone by then."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.method_toys import batch, method, step, trainer
from torch import Tensor

from stella.fast.early import known
from stella.fast.parts import applied
from stella.methods.base import Losses, Method


def remembering(name: str) -> Method:
    """A method with clips in its memory."""
    one = method(name, clips=20, dtype=torch.float64)
    step(trainer(one), batch(8))
    return one


@pytest.mark.parametrize("name", ["chorus", "stella"])
def test_values_and_gradients_are_the_same(name: str) -> None:
    found = []
    for at_once in (True, False):
        one = remembering(name)
        with applied(compile=False, at_once=at_once):
            losses = one.loss(batch(4, 8))
        torch.autograd.backward(3 * losses.total)
        gradients = {name: p.grad for name, p in one.named_parameters() if p.requires_grad}
        assert all(gradient is not None for gradient in gradients.values())
        found.append(({name: part.detach() for name, part in losses.parts.items()}, gradients))
    for one_side, other in zip(*found, strict=True):
        torch.testing.assert_close(one_side, other)


def test_the_decoder_keeps_nothing_while_past_clips_are_encoded() -> None:
    """Bytes kept for the backward pass when all losses are known, and the most on the way."""
    most = {at_once: peak(at_once) for at_once in (True, False)}
    assert most[True][0] < 0.8 * most[False][0]  # at the end
    assert most[True][1] < 0.9 * most[False][1]  # the peak


def peak(at_once: bool) -> tuple[int, int]:
    one = remembering("chorus")
    with kept() as bytes, applied(compile=False, at_once=at_once):
        losses: Losses = one.loss(batch(4, 8))
        end = bytes["now"]
    torch.autograd.backward(losses.total)
    return end, bytes["most"]


@contextmanager
def kept() -> Iterator[dict[str, int]]:
    """Bytes of activations that autograd keeps."""
    counts = {"now": 0, "most": 0}

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            counts["now"] += tensor.nbytes
            counts["most"] = max(counts.values())
            weakref.finalize(self, self.gone, tensor.nbytes)

        @staticmethod
        def gone(bytes: int) -> None:
            counts["now"] -= bytes

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda each: each.tensor):
        yield counts


def test_several_scalars_share_the_gradients_of_their_sum() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    x = torch.tensor([1.0, 5.0], requires_grad=True) * 1  # no leaf
    values = [(weight * x).sum(), (weight * x**2).sum()]
    expected = torch.autograd.grad(7 * sum(values), [weight, x], retain_graph=True)  # type: ignore[arg-type]
    found: Any = known(values, [weight, x])
    assert [value.item() for value in found] == [value.item() for value in values]
    for gradient, want in zip(torch.autograd.grad(7 * sum(found), [weight, x]), expected, strict=True):
        torch.testing.assert_close(gradient, want)


def test_other_weights_than_equal_ones_are_refused() -> None:
    """Their gradients would be wrong: they are those of the sum."""
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    found: Any = known([weight.sum(), (weight**2).sum()], [weight])
    with pytest.raises(RuntimeError, match="different weights: weigh them in recon_parts"):
        (0.1 * found[0] + found[1]).backward()


def test_values_without_gradients_stay_as_they_are() -> None:
    values = [torch.tensor(1.0)]
    assert known(values, []) is values
    assert known(values, [torch.nn.Parameter(torch.ones(1))]) is values

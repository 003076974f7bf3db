"""Compiled parts compute what they compute as written, share what is compiled, and keep less for the backward pass."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
import torch._inductor.config as inductor
import torch._inductor.scheduler
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy

from stella.fast import compile as compiling
from stella.fast.compile import Activations, compilable, compiled, lacking, lean
from stella.model.vit import Block, linear_gelu, transform

DIM, HEADS = 24, 3


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """A compiler that needs no C++ and counts what it is given."""
    torch._dynamo.reset()
    counter, plain = CompileCounterWithBackend("aot_eager"), torch.compile

    def compile(function: Callable[..., Any], **how: Any) -> Any:
        assert how["fullgraph"] and not how["dynamic"]
        return plain(function, backend=counter, fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", compile)
    return counter


def blocks() -> list[Block]:
    torch.manual_seed(0)
    return [Block(DIM, HEADS, 1e-5) for _ in range(3)]


def run(x: Tensor, parts: list[Block], through: Callable[..., Tensor]) -> list[Tensor]:
    """The output, and the gradients of input and weights."""
    x = x.clone().requires_grad_()
    out = x
    for part in parts:
        out = through(out, part.norm1, part.attn, part.norm2, part.mlp)
        part.zero_grad()
    out.square().sum().backward()
    return [out, x.grad, *(p.grad.clone() for part in parts for p in part.parameters())]  # type: ignore[list-item]


def plain_block(x: Tensor, norm1: Any, attn: Any, norm2: Any, mlp: Any) -> Tensor:
    x = x + attn(norm1(x))
    out: Tensor = x + mlp(norm2(x))
    return out


@pytest.mark.parametrize("activations", get_args(Activations))
def test_blocks_of_one_shape_are_compiled_once_and_give_the_same(
    counter: CompileCounterWithBackend, activations: Activations
) -> None:
    parts, x = blocks(), torch.randn(2, 5, DIM)
    fast = compilable(lean(plain_block))
    with compiled(activations=activations):
        found = run(x, parts, fast)
    assert counter.frame_count == 1
    for ours, theirs in zip(found, run(x, parts, plain_block), strict=True):
        torch.testing.assert_close(ours, theirs)
    with compiled(activations=activations):
        run(torch.randn(2, 7, DIM), parts, fast)
    assert counter.frame_count == 2


def test_nothing_is_compiled_outside(counter: CompileCounterWithBackend) -> None:
    fast = compilable(plain_block)
    with compiled():
        with compiled(False):
            run(torch.randn(1, 2, DIM), blocks(), fast)
        assert compiling._on
    run(torch.randn(1, 2, DIM), blocks(), fast)
    assert counter.frame_count == 0 and not compiling._on


def test_an_error_inside_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), compiled():
        raise ZeroDivisionError
    assert not compiling._on


@pytest.mark.skipif(lacking("cpu") is not None, reason="Inductor needs a C++ compiler on a CPU")
def test_reductions_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen where Inductor makes kernels, forward and backward: an option that it does not know is no help."""
    seen = []
    plain = torch._inductor.scheduler.Scheduler.__init__

    def note(self: Any, *args: Any, **more: Any) -> None:
        seen.append(inductor.triton.mix_order_reduction)
        plain(self, *args, **more)

    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.scheduler.Scheduler, "__init__", note)
    with compiled(), inductor.patch(force_disable_caches=True):
        x = torch.randn(3, 4, requires_grad=True)
        compilable(lambda x: x.sin().sum())(x).backward()
    assert len(seen) >= 2 and not any(seen)


def test_gelu_inside_the_product_is_gelu_after_it() -> None:
    x, weight, bias = torch.randn(2, 5, DIM), torch.randn(4 * DIM, DIM), torch.randn(4 * DIM)
    found = linear_gelu(x, weight, bias)
    torch.testing.assert_close(found, F.gelu(F.linear(x, weight, bias)), atol=1e-3, rtol=0)
    torch.library.opcheck(linear_gelu, (x, weight, bias))


def test_gelu_is_inside_the_product_where_nothing_needs_a_gradient(counter: CompileCounterWithBackend) -> None:
    part, x, half = blocks()[0], torch.randn(2, 5, DIM), torch.autocast("cpu", torch.bfloat16)
    fast = compilable(transform.__wrapped__)  # type: ignore[attr-defined]

    def run(gradient: bool, autocast: bool = True) -> tuple[Tensor, bool]:
        counter.graphs.clear()
        with compiled(), torch.set_grad_enabled(gradient), half if autocast else nullcontext():
            out = fast(x, part.norm1, part.attn, part.norm2, part.mlp)
        (graph,) = counter.graphs
        return out, "linear_gelu" in graph.print_readable(print_output=False)

    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        (plain, inside), (found, inside_too) = run(gradient=True), run(gradient=False)
        assert not inside and inside_too and not run(gradient=False, autocast=False)[1]
    torch.testing.assert_close(found, plain, atol=0.02, rtol=0.02)


def test_lean_keeps_products_and_attention_alone(counter: CompileCounterWithBackend) -> None:
    """Of a block: input, qkv (3), attention's output, its projection and the MLP's hidden layer (4): 10 widths a token.
    Without it at least the two normalised inputs and the hidden layer after GELU come on top; narrow, even the hidden
    layer is computed again."""

    def kept(function: Callable[..., Tensor], activations: Activations = "products") -> float:
        part, x, sizes = blocks()[0], torch.randn(4, 50, DIM, requires_grad=True), {}
        weights = {p.untyped_storage().data_ptr() for p in part.parameters()}

        def note(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in weights and t.dim() > 1:
                sizes[t.data_ptr()] = t.numel()
            return t

        with compiled(activations=activations), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            compilable(function)(x, part.norm1, part.attn, part.norm2, part.mlp)
        return sum(sizes.values()) / x.numel()

    assert 9.5 < kept(lean(plain_block)) < 11 < 14 < kept(plain_block)
    assert kept(lean(plain_block), "all") == kept(plain_block)
    assert 5.5 < kept(lean(plain_block), "narrow") < 7


def test_narrow_computes_wide_products_again_however_they_are_made() -> None:
    """On a GPU products of halves have their parts side by side: three times as wide an input."""
    aten, x = torch.ops.aten, torch.empty(5, 6)
    wide, narrow = torch.empty(6, 24), torch.empty(6, 18)
    again, kept = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    for weight, policy in ((wide, again), (narrow, kept)):
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (aten.mm.default, (x, weight)),
            (aten.addmm.default, (torch.empty(weight.shape[1]), x, weight)),
            (aten.mm.dtype, (x.repeat(1, 3), weight.repeat(3, 1), torch.float32)),
        ]
        for op, args in calls:
            with compiled(activations="narrow"):
                assert compiling._keep(None, op, *args) == policy
            assert compiling._keep(None, op, *args) == kept
    assert compiling._activations == "products"

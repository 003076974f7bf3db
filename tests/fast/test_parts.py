"""Fast parts compute what the plain code computes, share compilations, and leave no trace outside."""

import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
import torch._inductor.config as inductor
import torch._inductor.scheduler
import torch.nn.functional as F
from helpers.method_toys import TOY, batch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy

from stella import losses, selection
from stella.fast import parts
from stella.fast.activations import Activations, keeping, policy
from stella.fast.parts import PARTS, applied, linear_gelu, missing
from stella.model import vit
from stella.model.avm import AVM, draw_pairs, score
from stella.model.cav import CAV, split_by_noise
from stella.model.vit import Block, transform
from stella.rng import generator

DIM, HEADS = 24, 3
plain_loss = AVM.loss


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """A compiler that needs no C++ and counts what it is given."""
    torch._dynamo.reset()
    parts._swaps.cache_clear()
    counter, plain = CompileCounterWithBackend("aot_eager"), torch.compile

    def compile(function: Callable[..., Any], **how: Any) -> Any:
        assert how["fullgraph"] and not how["dynamic"]
        return plain(function, backend=counter, fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", compile)
    yield counter
    parts._swaps.cache_clear()


def blocks() -> list[Block]:
    torch.manual_seed(0)
    return [Block(DIM, HEADS, 1e-5) for _ in range(3)]


def run(x: Tensor, stack: list[Block]) -> list[Tensor]:
    """The output, and the gradients of input and weights."""
    x = x.clone().requires_grad_()
    out = x
    for block in stack:
        out = block(out)
        block.zero_grad()
    out.square().sum().backward()
    return [out, x.grad, *(p.grad.clone() for block in stack for p in block.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("activations", get_args(Activations))
def test_blocks_of_one_shape_are_compiled_once(counter: CompileCounterWithBackend, activations: Activations) -> None:
    stack, x = blocks(), torch.randn(2, 5, DIM)
    with applied(activations=activations):
        found = run(x, stack)
    assert counter.frame_count == 1
    for ours, theirs in zip(found, run(x, stack), strict=True):
        torch.testing.assert_close(ours, theirs)
    with applied(activations=activations):
        run(torch.randn(2, 7, DIM), stack)
    assert counter.frame_count == 2


@pytest.mark.slow
def test_a_whole_pass_is_the_same_compiled(counter: CompileCounterWithBackend) -> None:
    """Pre-training, scoring, selection and matching, with their gradients."""
    torch.manual_seed(0)
    model, avm, b = CAV(TOY), AVM(TOY.dim, 4), batch(3)

    def losses_and_gradients() -> list[Tensor]:
        a, v = model.patches_a(b.audio), model.patches_v(b.video)
        splits = [split_by_noise(torch.rand(3, n, generator=generator(n)), n // 5) for n in (64, 16)]
        scored = score(model, avm, a, v)
        importance = selection.importance(scored.qk.q_a, scored.qk.k_v, 0.4)
        query = selection.weighted_query(scored.qk.q_v, importance, 8)
        correlated = selection.correlation(scored.qk.k_v, query, query.roll(1, 0), importance, 8)
        out = model.pretrain(a, v, *splits)
        recon = losses.reconstruction(out.recon_v, losses.norm_pix(out.target_v)).mean() + out.recon_a.mean()
        total = recon + out.z_a.sum() + out.z_v.sum() + avm.loss(model, scored, draw_pairs(3, generator(0)))
        model.zero_grad()
        avm.zero_grad()
        total.backward()
        return [total, importance, correlated, *(p.grad for m in (model, avm) for p in m.parameters())]  # type: ignore[list-item]

    plain = losses_and_gradients()
    with applied():
        found = losses_and_gradients()
    assert counter.frame_count > 10
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_nothing_is_changed_outside(counter: CompileCounterWithBackend) -> None:
    owned = [(AVM, "loss"), (vit.Mlp, "forward"), (selection, "importance"), *((p.owner, p.name) for p in PARTS)]
    before = [vars(owner)[name] for owner, name in owned]
    with applied():
        assert all(vars(owner)[name] is not old for (owner, name), old in zip(owned, before, strict=True))
        with applied(False):
            run(torch.randn(1, 2, DIM), blocks())
        assert vit.transform is not before[3 + [p.name for p in PARTS].index("transform")]
    with pytest.raises(ZeroDivisionError), applied():
        raise ZeroDivisionError
    assert [vars(owner)[name] for owner, name in owned] == before
    run(torch.randn(1, 2, DIM), blocks())
    assert counter.frame_count == 0


def test_residuals_are_in_half_precision_where_a_run_is() -> None:
    """Also without a compiler: what blocks pass on is in autocast's dtype."""
    torch.manual_seed(0)
    model, b, seen = CAV(TOY), batch(2), []
    for block in (*model.blocks_a, *model.blocks_v, *model.decoder_blocks):
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    splits = [split_by_noise(torch.rand(2, n), n // 5) for n in (64, 16)]

    def dtypes(half: bool, fast: bool) -> set[torch.dtype]:
        seen.clear()
        with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16, enabled=half):
            if fast:
                with applied(compile=False):
                    model.pretrain(model.patches_a(b.audio), model.patches_v(b.video), *splits)
            else:
                model.pretrain(model.patches_a(b.audio), model.patches_v(b.video), *splits)
        return set(seen)

    assert dtypes(half=True, fast=True) == {torch.bfloat16}
    assert torch.float32 in dtypes(half=True, fast=False)
    assert dtypes(half=False, fast=True) == {torch.float32}


def test_the_matching_loss_has_its_gradients_at_once_and_keeps_nothing_else() -> None:
    torch.manual_seed(0)
    model, avm, b = CAV(TOY), AVM(TOY.dim, 4), batch(6)
    scored, pairs = score(model, avm, model.patches_a(b.audio), model.patches_v(b.video)), draw_pairs(6, generator(0))
    plain = avm.loss(model, scored, pairs)
    wanted = torch.autograd.grad(3 * plain, list(avm.parameters()))
    with applied(compile=False):
        loss = avm.loss(model, scored, pairs)
        with torch.no_grad():
            assert avm.loss(model, scored, pairs).equal(plain)
    assert AVM.loss is plain_loss
    torch.testing.assert_close(loss, plain, rtol=0, atol=0)
    behind = [function for function, _ in loss.grad_fn.next_functions if function is not None]  # type: ignore[union-attr]
    assert all(type(function).__name__ == "AccumulateGrad" for function in behind)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, list(avm.parameters())), wanted)


@pytest.mark.slow
@pytest.mark.skipif(missing("cpu") is not None, reason="Inductor needs a C++ compiler on a CPU")
def test_reductions_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observed inside Inductor, forward and backward: it ignores options that it does not know."""
    seen = []
    plain = torch._inductor.scheduler.Scheduler.__init__

    def note(self: Any, *args: Any, **more: Any) -> None:
        seen.append(inductor.triton.mix_order_reduction)
        plain(self, *args, **more)

    def double(x: Tensor) -> Tensor:
        return x.sin().sum()

    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.scheduler.Scheduler, "__init__", note)
    with inductor.patch(force_disable_caches=True):
        parts._compiled(double)(torch.randn(3, 4, requires_grad=True)).backward()
    assert len(seen) >= 2 and not any(seen)


def test_gelu_inside_the_product_is_gelu_after_it() -> None:
    x, weight, bias = torch.randn(2, 5, DIM), torch.randn(4 * DIM, DIM), torch.randn(4 * DIM)
    found = linear_gelu(x, weight, bias)
    torch.testing.assert_close(found, F.gelu(F.linear(x, weight, bias)), atol=1e-3, rtol=0)
    torch.library.opcheck(linear_gelu, (x, weight, bias))


def test_gelu_is_inside_the_product_in_passes_without_gradient(counter: CompileCounterWithBackend) -> None:
    block, x = blocks()[0], torch.randn(2, 5, DIM)

    def graph(gradient: bool, autocast: bool = True) -> tuple[Tensor, bool]:
        counter.graphs.clear()
        half = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with applied(), torch.set_grad_enabled(gradient), half:
            out = block(x)
        (found,) = counter.graphs
        return out, "linear_gelu" in found.print_readable(print_output=False)

    with torch.backends.mkldnn.flags(enabled=False):
        (plain, inside), (found, inside_too) = graph(gradient=True), graph(gradient=False)
        assert not inside and inside_too and not graph(gradient=False, autocast=False)[1]
    torch.testing.assert_close(found, plain, atol=0.02, rtol=0.02)


def test_products_and_attention_alone_are_kept(counter: CompileCounterWithBackend) -> None:
    """Of a block: input, qkv (3), attention's output, its projection and the MLP's hidden layer (4): 10 widths a token.
    With `all` at least the two normalised inputs and the hidden layer after GELU come on top; with `narrow` the hidden
    layer is recomputed too."""

    def kept(activations: Activations) -> float:
        block, x, sizes = blocks()[0], torch.randn(4, 50, DIM, requires_grad=True), {}
        weights = {p.untyped_storage().data_ptr() for p in block.parameters()}

        def note(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in weights and t.dim() > 1:
                sizes[t.data_ptr()] = t.numel()
            return t

        with applied(activations=activations), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            block(x)
        return sum(sizes.values()) / x.numel()

    assert 5.5 < kept("narrow") < 7 < 9.5 < kept("products") < 11 < 14 < kept("all")


def test_narrow_recomputes_wide_products() -> None:
    aten, x = torch.ops.aten, torch.empty(5, 6)
    again, saved = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    for width, expected in ((24, again), (18, saved)):
        weight = torch.empty(6, width)
        for op, args in ((aten.mm.default, (x, weight)), (aten.addmm.default, (torch.empty(width), x, weight))):
            assert policy("narrow", None, op, *args) == expected
            assert policy("products", None, op, *args) == saved
    assert policy("products", None, aten.gelu.default, x) == CheckpointPolicy.PREFER_RECOMPUTE
    assert keeping(transform, "all") is transform


def test_the_model_names_nothing_of_this() -> None:
    """No decorator, no dispatch on compilers or autocast in what reads like the paper."""
    for module in ("stella.model.vit", "stella.model.cav", "stella.model.avm", "stella.losses", "stella.selection"):
        text = open(sys.modules[module].__file__, encoding="utf-8").read()  # type: ignore[arg-type]  # noqa: PTH123, SIM115
        for word in ("compile(", "is_compiling", "is_autocast_enabled", "triton", "checkpoint("):
            assert word not in text, (module, word)


def kept(lean: bool) -> tuple[int, list[Tensor]]:
    """Numbers that a pass through blocks keeps for its backward pass, and what it computes."""
    numbers = 0

    def count(x: Tensor) -> Tensor:
        nonlocal numbers
        numbers += x.numel()
        return x

    x = torch.randn(2, 5, DIM, generator=generator("kept"))
    with applied(False, lean=lean), torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        found = run(x, blocks())
    return numbers, found


def test_plain_code_can_keep_less_too() -> None:
    """As for short batches in a compiled run."""
    (less, lean), (more, plain) = kept(True), kept(False)
    assert less < 0.6 * more
    for ours, theirs in zip(lean, plain, strict=True):
        torch.testing.assert_close(ours, theirs)

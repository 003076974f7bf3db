"""Float32 products made of half-precision ones: about as exact as float32's own, forward and back, at any scale."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stella.fast.compile import compilable, compiled
from stella.model.linear import Linear, Product, exact_products, halves, product

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def noise(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def off(found: Tensor, exact: Tensor) -> float:
    """Mean error, of the mean size of what is right."""
    return float((found.double() - exact).abs().mean() / exact.abs().mean())


@pytest.mark.parametrize("scale_x", [1e-36, 1e-30, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("scale_w", [1e-4, 0.02, 1e3])
def test_is_about_as_exact_as_float32(scale_x: float, scale_w: float) -> None:
    x, w = scale_x * noise(40, 300), scale_w * noise(20, 300)
    if scale_x * scale_w < 1e-37:
        w = w * 1e6  # the result, too, is a float32
    exact = x.double() @ w.double().t()
    assert off(product(x, w), exact) < 1.5 * off(x @ w.t(), exact) < 1e-6


def test_rows_of_very_different_size_are_as_exact() -> None:
    x, w = noise(40, 300) * 2.0 ** torch.arange(0, -40, -1)[:, None], noise(20, 300)
    for found, exact in zip(product(x, w), x.double() @ w.double().t(), strict=True):
        assert off(found, exact) < 1e-6


def test_sums_are_not_biased() -> None:
    """Where all is positive, what is left out of every product would add up if it had a sign."""
    x, w = noise(200, 500).abs(), noise(100, 500).abs()
    exact = x.double() @ w.double().t()
    assert ((product(x, w) - exact) / exact).mean().abs() < 1e-8


@given(st.integers(-100, 100), st.integers(0, 2**24))
def test_parts_have_22_bits_of_numbers_of_a_size(exponent: int, bits: int) -> None:
    x = torch.tensor([[bits / 2**24, -1.0, 2.0**-17]]).double() * 2.0**exponent
    high, low, scale = halves(x.float())
    assert high.dtype == low.dtype == torch.float16
    large = x.abs() >= 2.0 ** (exponent - 17)
    back = (high.double() + low.double()) * scale.double()
    assert ((back - x).abs() <= 2.0**-22 * x.abs())[large].all()
    assert (torch.frexp(scale).mantissa == 0.5).all()  # powers of two: scaling rounds nothing


def test_nothing_becomes_nothing_and_what_is_not_finite_stays_so() -> None:
    assert (product(torch.zeros(2, 3), noise(4, 3)) == 0).all()
    assert (product(torch.full((2, 3), 1e-42), noise(4, 3)).abs() < 1e-40).all()
    assert product(torch.empty(0, 3), noise(4, 3)).shape == (0, 4)
    for bad in (torch.inf, torch.nan):
        x = noise(2, 3)
        x[1, 1] = bad
        found = product(x, noise(4, 3))
        assert not found[1].isfinite().any()
        torch.testing.assert_close(found[0], x[0] @ noise(4, 3).t())


def test_gradients_are_those_of_a_product() -> None:
    x, w, back = noise(7, 30), noise(5, 30), noise(7, 5)
    found = torch.autograd.grad(Product.apply(x.requires_grad_(), w.requires_grad_()), [x, w], back)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, (back @ w, back.t() @ x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
def test_a_layer_is_torchs_own_elsewhere(shape: tuple[int, ...]) -> None:
    ours, theirs, x = Linear(6, 4), nn.Linear(6, 4), noise(*shape)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x), theirs(x))
    with exact_products():
        inside = ours(x)
        assert torch.equal(ours.double()(x.double()), theirs.double()(x.double()))
    assert not torch.equal(inside, theirs.float()(x)) and inside.shape == (*shape[:-1], 4)
    torch.testing.assert_close(inside, theirs(x))


@cuda
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_on_a_gpu(compile: bool, bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(768, 192, bias=bias, device="cuda")
    x, back = noise(4, 100, 768, device="cuda").requires_grad_(), noise(4, 100, 192, device="cuda")
    exact_layer = nn.Linear(768, 192, bias=bias, device="cuda", dtype=torch.float64)
    exact_layer.load_state_dict(layer.state_dict())
    through = compilable(lambda x, layer: layer(x))
    inputs = [x, *layer.parameters()]
    exact = exact_layer(x.double())
    exact_back = torch.autograd.grad(exact, [x, *exact_layer.parameters()], back.double())
    with compiled(compile), exact_products():
        out = through(x, layer)
        found = torch.autograd.grad(out, inputs, back)
    assert off(out, exact) < 3e-6
    assert all(off(one, other.double()) < 3e-6 for one, other in zip(found, exact_back, strict=True))
    with compiled(compile):
        assert not torch.equal(through(x, layer), out)  # outside it is the card's own float32

"""Convolution, maximum and ReLU as one step: torch's layers, gradients, independent networks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.victims import split_layers
from recon_core.victims.split_layers import pooled_convolution

pytestmark = pytest.mark.usefixtures("one_thread")

R, N = 6, 5
CASES = {
    "one channel, padded": (1, 1, 8, 8, 2),
    "even sides": (R, 2, 8, 10, 0),
    "even sides, shared": (1, 3, 10, 8, 0),
    "odd sides, shared": (1, 2, 9, 8, 0),
    "three channels, padded": (1, 3, 8, 8, 2),
}
"""Networks with images of their own, channels, height, width, padding."""


def layer(
    case: str, *, dtype: torch.dtype = torch.float64, n: int = N, outputs: int = 4
) -> tuple[list[Tensor], int]:
    """Weights, biases and images that want gradients; the padding."""
    q, channels, height, width, padding = CASES[case]
    generator = torch.Generator().manual_seed(3)
    shapes = [(R, outputs, channels, 5, 5), (R, outputs), (q, n, channels, height, width)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).requires_grad_() for t in drawn], padding


def plainly(weight: Tensor, bias: Tensor, x: Tensor, padding: int) -> Tensor:
    """torch's layers, one network after another."""
    images = x if len(x) > 1 else x.expand(len(weight), -1, -1, -1, -1)
    blocks = zip(weight, bias, images, strict=True)
    return torch.stack(
        [F.max_pool2d(F.conv2d(a, w, b, padding=padding).relu(), 2) for w, b, a in blocks]
    )


def gradients(result: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    """Of a sum that gives every number another weight."""
    factors = torch.randn(result.shape, generator=torch.Generator().manual_seed(4))
    return list(torch.autograd.grad((result * factors.to(result)).sum(), wanted))


@pytest.fixture(params=["all images at once", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, of two images and one of one, where they are not taken at once."""
    if request.param == "in parts":
        monkeypatch.setattr(split_layers, "NUMBERS_AT_ONCE", 1)
        monkeypatch.setattr(
            split_layers, "_parts", lambda n, _: [slice(i, min(i + 2, n)) for i in range(0, n, 2)]
        )


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_block_is_that_of_torchs_layers(case: str, dtype: torch.dtype) -> None:
    leaves, padding = layer(case, dtype=dtype)
    result, theirs = pooled_convolution(*leaves, padding), plainly(*leaves, padding)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    found, expected = gradients(result, leaves), gradients(theirs, leaves)
    for one, other in zip([result, *found], [theirs, *expected], strict=True):
        assert (one - other).norm() < tolerance * other.norm()


@pytest.mark.parametrize("case", ["one channel, padded", "even sides", "even sides, shared"])
def test_no_network_depends_on_the_others_bit_for_bit(case: str) -> None:
    """As one, four and two of six: with another number of channels in a convolution."""
    leaves, padding = layer(case, dtype=torch.float32, n=64, outputs=6)
    weight, bias, x = leaves
    result = pooled_convolution(weight, bias, x, padding)
    found = gradients(result, [weight, bias])
    factors = torch.randn(result.shape, generator=torch.Generator().manual_seed(4))
    for r in range(R):
        own = [t[r : r + 1].detach().requires_grad_() for t in (weight, bias)]
        images = x if len(x) == 1 else x[r : r + 1]
        alone = pooled_convolution(*own, images, padding)
        assert torch.equal(alone[0], result[r])
        theirs = torch.autograd.grad((alone * factors[r]).sum(), own)
        for one, other in zip(found, theirs, strict=True):
            assert torch.equal(one[r], other[0])


def test_parts_do_not_depend_on_the_number_of_networks() -> None:
    """Gradients are sums over parts: other parts would be another order."""
    at_once = split_layers.NUMBERS_AT_ONCE
    parts = split_layers._parts(1000, at_once // 300)
    assert [p.stop for p in parts[:-1]] == [p.start for p in parts[1:]]
    assert (parts[0].start, parts[-1].stop) == (0, 1000)
    sizes = [p.stop - p.start for p in parts]
    assert len(sizes) == 4
    assert max(sizes) <= 300
    assert len(split_layers._parts(3, 2 * at_once)) == 3


def test_of_equal_numbers_the_first_is_the_maximum() -> None:
    """As for torch, or a picture's plain ground would count four times."""
    generator = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(2, 3, 1, 5, 5, generator=generator), torch.ones(2, 3)
    leaves = [weight.requires_grad_(), bias.requires_grad_()]
    ground = torch.zeros(1, N, 1, 8, 8)
    found = gradients(pooled_convolution(*leaves, ground, 2), leaves)
    expected = gradients(plainly(*leaves, ground, 2), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_only_what_is_wanted_has_a_gradient() -> None:
    leaves, padding = layer("even sides")
    fixed = [leaf.detach() for leaf in leaves]
    for wanted in range(3):
        mixed = [leaves[i] if i == wanted else fixed[i] for i in range(3)]
        (one,) = gradients(pooled_convolution(*mixed, padding), [leaves[wanted]])
        (other,) = gradients(plainly(*mixed, padding), [leaves[wanted]])
        torch.testing.assert_close(one, other)
    assert not pooled_convolution(*fixed, padding).requires_grad


def test_it_is_differentiable_once() -> None:
    leaves, padding = layer("even sides")
    result = pooled_convolution(*leaves, padding)
    (first,) = torch.autograd.grad(result.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()

"""The order of inputs and what was subtracted from them, planted in a first layer, told by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recon_core.attacks.span.inputs import (
    InputOrder,
    better_order,
    orders_of,
    shares_in_span,
    smoother_order,
    subtracted,
)


def pictures(n: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    """Smooth pictures (n, c, h, w) in [0, 1]: blobs that are wider than high, channels alike."""
    g = torch.Generator().manual_seed(seed)
    c, h, w = shape
    y, x = torch.arange(h)[:, None] / h, torch.arange(w)[None] / w
    found = torch.zeros(n, c, h, w)
    for _ in range(4):
        a, b, s = (torch.rand(n, 1, 1, generator=g) for _ in range(3))
        blob = torch.exp(-(((y - a) / 0.12) ** 2) - ((x - b) / (0.2 + 0.2 * s)) ** 2)
        colour = torch.rand(n, c, 1, 1, generator=g) + torch.tensor([1.0, 0.5, 0.2])[:c, None, None]
        found += colour * blob[:, None]
    return found / found.amax((1, 2, 3), keepdim=True)


def directions(inputs: Tensor, noise: float, seed: int = 0) -> Tensor:
    """The strongest directions of a layer of 60 neurons that learned inputs (n, d)."""
    g = torch.Generator().manual_seed(seed)
    layer = torch.randn(60, len(inputs), generator=g) @ inputs.flatten(1)
    layer += noise * layer.std() * torch.randn(layer.shape, generator=g)
    return torch.linalg.svd(layer, full_matrices=False).Vh[: len(inputs)]


SHAPES = ((3, 12, 12), (3, 10, 14), (1, 12, 12))
CASES = [(shape, order) for shape in SHAPES for order in orders_of(shape)]


@pytest.mark.parametrize(("shape", "order"), CASES, ids=str)
def test_the_order_that_inputs_had_fits_best(
    shape: tuple[int, int, int], order: InputOrder
) -> None:
    images = pictures(30, shape, 1)
    flat = (images - images.mean(0)).flatten(1)
    assert torch.equal(order.to_images(order.to_inputs(flat, shape), shape), flat)
    usual = images.permute(0, 2, 3, 1).flatten(1)  # as numpy flattens (h, w, c)
    assert torch.equal(InputOrder("hwc").to_inputs(images.flatten(1), shape), usual)
    for noise in (0.0, 0.5):
        shares = shares_in_span(directions(order.to_inputs(flat, shape), noise), images)
        assert max(shares, key=lambda o: float(shares[o].mean())) == order
        assert better_order(shares, order) is None
        for other in set(orders_of(shape)) - {order}:
            assert better_order(shares, other) == order


def test_no_order_is_told_where_none_fits() -> None:
    g = torch.Generator().manual_seed(0)
    for seed in range(20):
        images, others = (pictures(20, (3, 12, 12), seed + k) for k in (0, 100))
        untrained = torch.randn(20, 432, generator=g)
        for wrong in (untrained, directions((others - others.mean(0)).flatten(1), 0.1)):
            assert better_order(shares_in_span(wrong, images), InputOrder()) is None


def test_smooth_directions_tell_a_flattening_without_images() -> None:
    shape = (3, 16, 16)
    images = pictures(20, shape, 0)
    flat = (images - images.mean(0)).flatten(1)
    for order in ("hwc", "whc", "chw", "cwh"):
        inputs = directions(InputOrder(order).to_inputs(flat, shape), 0.2)
        found = smoother_order(inputs, shape, InputOrder())
        assert (found is not None and found.pixels[2] == "c") == (order[2] == "c")


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("channels", [1, 3])
def test_what_was_subtracted_is_told_by_the_mean_s_place_in_the_span(
    channels: int, noise: float
) -> None:
    images = pictures(30, (channels, 12, 12), 2)
    own = images.mean(0)
    others = pictures(400, (channels, 12, 12), 3).mean(0)
    for mean in (own, others):
        assert subtracted(directions((images - mean).flatten(1), noise), images) == "own"
    # grey pictures so small have every constant in their span
    for constant in (0.0,) if channels == 1 else (0.0, 0.5):
        found = subtracted(directions((images - constant).flatten(1), noise), images)
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, torch.full((channels,), constant), atol=0.05, rtol=0)
        assert bool(found.any()) == (constant > 0)
    assert subtracted(torch.eye(channels * 144)[:3], images[:2]) is None

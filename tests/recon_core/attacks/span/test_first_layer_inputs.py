"""The order of inputs, what was subtracted from them and divided, told by a first layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from recon_core.attacks.span.inputs import (
    InputOrder,
    better_order,
    channel_scales,
    orders_of,
    shares_in_span,
    smoother_order,
    subtracted,
    undone,
)
from recon_core.attacks.span.learning import metric_of
from recon_core.attacks.span.separator import Card, Separator
from tests.recon_core.drawing import generator


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


SIDE, N_PUBLIC, N = 16, 1500, 60


def _images(channels: int) -> Tensor:
    """Bars of different brightness on a dark ground; of three channels in a few soft colours."""
    draw = generator(3)
    n = N_PUBLIC + N
    light = 0.1 * torch.rand(n, 1, 1, 1, generator=draw).expand(n, 1, SIDE, SIDE).clone()
    for picture in light:
        for row, column, length in torch.randint(0, 10, (4, 3), generator=draw).tolist():
            picture[0, row : row + 3, column : column + 2 + length // 2] = float(
                torch.rand(1, generator=draw)
            )
    if channels == 1:
        return light
    colours = 1 + 0.1 * torch.randn(n, 3, 2, 2, generator=draw)
    return (light * interpolate(colours, SIDE, mode="bilinear")).clamp(0, 1)


def _separator(public: Tensor, *, centred: bool) -> Separator:
    c = public.shape[1]
    card = Card(
        shape=(c, SIDE, SIDE), widths=(8,), patch=2, centred=centred, mirrored=False,
        shifted=0, floor=1e-3, source="tiles", n_pictures=len(public), sha256="",
        n_steps=1, alone=0.0, spread=1.0,
    )  # fmt: skip
    mean = public.mean(0)
    seen = public - mean if centred else public
    return Separator(
        card, torch.nn.Identity(), metric_of(seen, floor=1e-3, mirrored=False), mean.flatten()
    )


def _mixed(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """(directions of inputs (n, c, h, w) with biases, the matrix that unmixes them)."""
    n = len(inputs)
    mixing = torch.randn(n, n, generator=generator(6)) + 4 * torch.eye(n)
    whole = torch.cat([inputs.flatten(1), torch.ones(n, 1)], 1)
    return mixing @ whole, torch.linalg.inv(mixing)


IMAGENET = (torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225]))
NORMALISED = {
    "as they are": (torch.zeros(3), torch.ones(3)),
    "imagenet": IMAGENET,
    "half": (torch.full((3,), 0.5), torch.full((3,), 0.5)),
    "channels apart": (torch.tensor([0.5, 0.4, 0.4]), torch.tensor([0.2, 0.25, 0.35])),
}


@pytest.mark.parametrize("case", NORMALISED)
@pytest.mark.parametrize("centred", [False, True])
def test_colour_is_told(case: str, centred: bool) -> None:
    images, (s, t) = _images(3), NORMALISED[case]
    separator, private = _separator(images[:N_PUBLIC], centred=centred), images[N_PUBLIC:]
    rows, unmixing = _mixed((private - s[:, None, None]) / t[:, None, None])
    scales = channel_scales(separator, rows).float()
    assert torch.allclose(scales, t / t.log().mean().exp(), rtol=0.01)
    seen = unmixing @ undone(separator, rows, scales)
    assert _distance(seen, private.flatten(1) - (separator.mean if centred else 0)) < 0.05


def test_grey_is_told() -> None:
    images = _images(1)
    separator, private = _separator(images[:N_PUBLIC], centred=False), images[N_PUBLIC:]
    mean = separator.mean.view(1, SIDE, SIDE)
    planted = [(s, t) for s in (torch.zeros(1), mean.mean(), torch.tensor(0.5)) for t in (1, 0.31)]
    for s, t in [*planted, (mean, 1)]:
        rows, unmixing = _mixed((private - s) / t)
        seen = unmixing @ undone(separator, rows, torch.ones(1))
        assert _distance(seen, private.flatten(1)) < 0.07
        assert not s.any() or _distance(unmixing @ rows[:, :-1], private.flatten(1)) > 0.2


def test_rows_without_biases_are_only_scaled() -> None:
    images = _images(3)
    separator = _separator(images[:N_PUBLIC], centred=True)
    rows, scales = images[N_PUBLIC:].flatten(1), torch.tensor([1.0, 2.0, 0.5])
    wanted = images[N_PUBLIC:] * scales[:, None, None]
    assert torch.equal(undone(separator, rows, scales), wanted.flatten(1))
    untrained = torch.cat([rows, torch.zeros(N, 1)], 1)
    assert torch.equal(undone(separator, untrained, scales), wanted.flatten(1))


def _distance(found: Tensor, truth: Tensor) -> float:
    """Relative to the truth, at the best common factor."""
    factor = (found * truth).sum() / found.square().sum()
    return float((factor * found - truth).norm() / truth.norm())

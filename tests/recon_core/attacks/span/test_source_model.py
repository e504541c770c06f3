"""Filters, whitened features, and the learned model of images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.span.source_model import (
    Learning,
    learn_source_model,
    learned_filters,
    score_matching,
)
from recon_core.attacks.span.features import (
    BLOCK,
    Kind,
    colour_axes,
    cosines,
    dct_filters,
    outputs_of,
    shipped_model,
    whitened,
)
from recon_core.attacks.span.search import ladder_of, views_of
from recon_core.attacks.span.separation import rotation_start
from recon_core.attacks.span.settings import SpanAttack
from tests.recon_core.attacks.span.models import small_model
from tests.recon_core.drawing import generator
from tests.recon_core.tiles import photograph_tiles


def test_cosines_are_orthonormal() -> None:
    pictures = torch.randn(2, 3, 8, 6, generator=generator(1)).double()
    there = cosines(pictures)
    assert torch.allclose(cosines(there, inverse=True), pictures)
    assert float(there.square().sum()) == pytest.approx(float(pictures.square().sum()))


def test_learning_lowers_the_score_matching_loss_of_other_images() -> None:
    tiles = photograph_tiles(16, shrink=1).float() / 255
    seen, held = tiles[:800], tiles[800:] - tiles[800:].mean(0)
    noise = torch.randn(held.shape, generator=torch.Generator().manual_seed(2))
    losses = []
    for n_steps in (1, 40):
        learning = Learning(
            size=3, stride=3, n_patches=4000, n_pools=24, n_steps=n_steps, batch_size=32
        )
        generator = torch.Generator().manual_seed(0)
        model = learn_source_model(seen, generator=generator, learning=learning)
        losses.append(float(score_matching(model, held, noise, sigma=learning.sigma)))
    gaussian = 1 / (1 + learning.sigma**2)
    assert losses[1] < losses[0]
    assert losses[1] < gaussian - 0.03


def test_a_learned_pool_keeps_the_filters_that_weigh_most() -> None:
    tiles = photograph_tiles(16, shrink=1).float() / 255
    learning = Learning(
        size=3, stride=3, n_patches=4000, n_pools=30, n_kept=5, n_steps=6, batch_size=8
    )
    models = [
        learn_source_model(
            tiles[:200], generator=generator(0), learning=replace(learning, n_kept=kept)
        )
        for kept in (5, 24)
    ]
    few, all_of_them = (model.pools for model in models)
    assert few.shape == (30, 24)
    assert few.count_nonzero(1).tolist() == [5] * 30
    assert bool((all_of_them > 0).all())
    # what is kept has hardly moved in the three steps since: it is what was largest
    weakest = torch.where(few > 0, few, torch.inf).amin(1)
    dropped = torch.where(few > 0, 0.0, all_of_them).amax(1)
    assert bool((weakest > 0.8 * dropped).all())


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_energies_gradients_and_curves_of_pictures_are_those_of_autograd(share: float) -> None:
    model = small_model(share)
    n = BLOCK + 5  # so more than one block
    pictures = torch.randn(n, 2, 10, 15, generator=generator(4), dtype=torch.float64)

    def energies(outputs: torch.Tensor) -> torch.Tensor:
        pools = torch.matmul(model.pools, outputs.square()).log1p()
        return torch.einsum("mkp,k->m", pools, model.alpha)

    seen = pictures.clone().requires_grad_()
    outputs = model.outputs(seen)
    expected = energies(outputs)
    (gradient,) = torch.autograd.grad(expected.sum(), seen)
    found = model.pooled(pictures)
    torch.testing.assert_close(found, (expected.detach(), gradient))
    assert bool((gradient[:, :, 9:] == 0).all())  # no filter reaches the last row
    y = outputs.detach()
    second = torch.autograd.functional.hessian(lambda one: energies(one[None]).sum(), y[0])
    (n_filters, n_places), (curves, squares) = y.shape[1:], model.curves(pictures)
    own = second.view(n_filters * n_places, -1).diagonal().view(n_filters, n_places)
    torch.testing.assert_close(curves[0], own.sum(1))
    torch.testing.assert_close(squares, y.square().mean(2))


def test_pictures_are_seen_in_falling_noise() -> None:
    pictures = photograph_tiles(32, shrink=1)[None, :4].float() / 255
    rough, coarse = ladder_of(SpanAttack(sources="learned"), pictures)
    for views, kind in ((rough, "rough"), (coarse, "coarse")):
        assert views.model is not None
        assert torch.equal(views.model.pools, shipped_model(kind).pools)
        white = views.features(views.z)[0]
        covariance = white @ white.mT / white.shape[1]
        torch.testing.assert_close(covariance, torch.eye(4), atol=1e-4, rtol=0)
    (alone,) = ladder_of(SpanAttack(sources="independent"), pictures)
    assert alone.model is None
    assert torch.equal(alone.features(alone.z), alone.z)


@pytest.mark.parametrize(("kind", "n_pools"), [("rough", 189), ("coarse", 189), ("fine", 378)])
def test_the_shipped_models_tell_images_from_mixtures(kind: Kind, n_pools: int) -> None:
    """Whitened features of a rotation of images: the images themselves have the lower energy."""
    model = shipped_model(kind)
    assert len(model.pools) == n_pools
    assert int(model.pools.count_nonzero(1).max()) == 12
    assert model.spectrum.shape == (3, 32, 32)
    tiles = photograph_tiles(32, shrink=1)[:30].float() / 255
    images = tiles - tiles.mean(0)
    units = images.flatten(1) / images.flatten(1).norm(dim=1, keepdim=True) * 0.25 * 3072**0.5
    turn = torch.linalg.qr(torch.randn(30, 30, generator=generator(0)))[0]

    def energy(pictures: torch.Tensor) -> float:
        y = model.outputs(pictures.view(-1, 3, 32, 32))
        pools = (model.pools @ y.square()).log1p()
        return float(torch.einsum("mkp,k->m", pools, model.alpha).mean())

    assert energy(units) < 0.9 * energy(turn @ units)


def test_the_gaussian_part_is_measured_in_the_images_own_deviations() -> None:
    model = shipped_model()
    noise = torch.randn(4, 3, 32, 32, generator=generator(0))
    images = cosines(noise * model.spectrum.sqrt(), inverse=True)
    assert torch.allclose(model.whitened(images), noise.flatten(1), atol=1e-3)
    views = views_of(SpanAttack(sources="learned"), images[None])
    assert views.precision is not None
    unit = views.whiten[0] @ model.whitened(images)
    assert torch.allclose(views.precision[0], unit @ unit.mT, rtol=1e-3)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_cosine_filters_are_orthonormal_and_blind_to_the_mean(size: int, channels: int) -> None:
    filters = dct_filters(size, channels)
    assert filters.shape == (channels * (size**2 - 1), channels, size, size)
    flat = filters.flatten(1)
    assert torch.allclose(flat @ flat.mT, torch.eye(len(flat), dtype=flat.dtype), atol=1e-12)
    assert float(filters.sum((2, 3)).abs().max()) < 1e-12
    axes = colour_axes(channels)
    assert torch.allclose(axes @ axes.mT, torch.eye(channels, dtype=axes.dtype), atol=1e-12)


def test_filters_learned_from_images_are_sparser_than_their_rotations() -> None:
    images = photograph_tiles(16, shrink=1).float() / 255
    generator = torch.Generator().manual_seed(0)
    learned = learned_filters(images, 4, generator=generator, n_patches=8000).double()
    assert learned.shape == (45, 3, 4, 4)
    assert float(learned.mean((2, 3)).abs().max()) < 1e-5

    def sparsity(filters: torch.Tensor) -> float:
        outputs = torch.nn.functional.conv2d(images.double(), filters).transpose(0, 1).flatten(1)
        outputs = outputs / outputs.square().mean(1, keepdim=True).sqrt()
        return float((1 + (outputs / 0.5).square()).log().mean())

    turn = rotation_start(45, torch.Generator().manual_seed(1))
    turned = torch.einsum("gf,fcij->gcij", turn, learned)
    assert sparsity(learned) < sparsity(turned) - 0.02
    with pytest.raises(ValueError, match="have no patches of 20x20"):
        learned_filters(images, 20, generator=torch.Generator())
    with pytest.raises(ValueError, match="fewer than 45 directions"):
        learned_filters(torch.ones(3, 3, 16, 16), 4, generator=torch.Generator())


def test_features_are_white_over_directions() -> None:
    pictures = photograph_tiles(16, shrink=2)[:20].double() / 255
    outputs = outputs_of(pictures, dct_filters(4, 3), stride=2)
    z, whiten = whitened(outputs)
    assert z.shape == (20, 45 * 49)
    assert torch.allclose(whiten @ outputs, z)
    covariance = z @ z.mT / z.shape[1]
    assert torch.allclose(covariance, torch.eye(20, dtype=covariance.dtype), atol=1e-6)


@pytest.mark.parametrize(
    ("n", "size", "stride", "message"),
    [
        (4, 17, 1, "images of 16x16 are smaller than filters of 17x17"),
        (200, 4, 7, "180 features cannot tell 200 images apart"),
    ],
)
def test_pictures_that_have_too_few_features(n: int, size: int, stride: int, message: str) -> None:
    pictures = photograph_tiles(16, shrink=1).double().repeat(2, 1, 1, 1)[:n]
    with pytest.raises(ValueError, match=message):
        whitened(outputs_of(pictures, dct_filters(size, 3), stride=stride))

"""The learned model of images: its cosines, its score, what learning it gains."""

from __future__ import annotations

import pytest
import torch

from benchmarks.span.source_model import Learning, learn_source_model, score_matching
from recon_core.attacks.span.features import (
    cosines,
    shipped_model,
)
from recon_core.attacks.span.search import views_of
from recon_core.attacks.span.settings import SpanAttack
from tests.recon_core.tiles import photograph_tiles


def test_cosines_are_orthonormal() -> None:
    pictures = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(1)).double()
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


def test_the_shipped_model_tells_images_from_mixtures() -> None:
    """Whitened features of a rotation of images: the images themselves have the lower energy."""
    model = shipped_model()
    assert model.spectrum.shape == (3, 32, 32)
    tiles = photograph_tiles(32, shrink=1)[:30].float() / 255
    images = tiles - tiles.mean(0)
    units = images.flatten(1) / images.flatten(1).norm(dim=1, keepdim=True) * 0.25 * 3072**0.5
    turn = torch.linalg.qr(torch.randn(30, 30, generator=torch.Generator().manual_seed(0)))[0]

    def energy(pictures: torch.Tensor) -> float:
        y = model.outputs(pictures.view(-1, 3, 32, 32))
        pools = (model.pools @ y.square()).log1p()
        return float(torch.einsum("mkp,k->m", pools, model.alpha).mean())

    assert energy(units) < 0.9 * energy(turn @ units)


def test_the_gaussian_part_is_measured_in_the_images_own_deviations() -> None:
    model = shipped_model()
    noise = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images = cosines(noise * model.spectrum.sqrt(), inverse=True)
    assert torch.allclose(model.whitened(images), noise.flatten(1), atol=1e-3)
    views = views_of(SpanAttack(sources="learned"), images[None])
    assert views.precision is not None
    unit = views.whiten[0] @ model.whitened(images)
    assert torch.allclose(views.precision[0], unit @ unit.mT, rtol=1e-3)

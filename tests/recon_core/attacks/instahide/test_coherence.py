"""Windows of gradients, whitened: what they are, and that their coherence needs no signs."""

from __future__ import annotations

import pytest
import torch

from recon_core.attacks.instahide.coherence import (
    Windows,
    centred,
    coherence,
    gradient_windows,
    public_coherence,
    signed_coherence,
    unit,
    whitening,
)
from recon_core.attacks.instahide.mixing import InstaHide
from tests.recon_core.tiles import photograph_tiles

SHAPE = (3, 16, 16)


def photographs(n: int) -> torch.Tensor:
    return photograph_tiles(16, shrink=2)[:n].float().flatten(1) / 127.5 - 1


def test_a_window_holds_the_differences_of_its_pixels():
    images = torch.randn(2, 3 * 8 * 8, generator=torch.Generator().manual_seed(0))
    cut = gradient_windows(images, (3, 8, 8), Windows(side=4, stride=2))
    assert cut.shape == (9, 2, 2 * 3 * 16)
    pictures = images.reshape(2, 3, 8, 8)
    across = pictures[1, 2, 3, 5] - pictures[1, 2, 3, 4]  # of pixel (3, 4), in the middle window
    middle = cut[4, 1].reshape(6, 4, 4)
    assert middle[2, 1, 2] == across
    assert middle[5, 1, 2] == pictures[1, 2, 4, 4] - pictures[1, 2, 3, 4]


def test_whitened_windows_have_unit_covariance():
    drawn = torch.Generator().manual_seed(0)
    cut = torch.randn(3, 4000, 5, generator=drawn) @ torch.randn(3, 5, 5, generator=drawn)
    white = cut @ whitening(cut, Windows(floor=1e-6))
    covariance = white.mT @ white / 4000
    torch.testing.assert_close(covariance, torch.eye(5).expand(3, 5, 5), atol=2e-2, rtol=0)


def test_every_pixel_is_in_the_window_nearest_to_it():
    places = Windows(side=4, stride=4).of_pixels((1, 9, 8))
    assert places[:, 0].tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 2]
    assert places[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_coherence_does_not_see_the_windows_signs():
    drawn = torch.Generator().manual_seed(1)
    white = torch.randn(6, 20, 8, generator=drawn)
    flipped = white * torch.where(torch.rand(6, 20, 1, generator=drawn) < 0.5, -1.0, 1.0)
    torch.testing.assert_close(coherence(white), coherence(flipped))
    assert not torch.allclose(
        signed_coherence(white, torch.ones(6, 20)), signed_coherence(flipped, torch.ones(6, 20))
    )


def test_centred_scores_have_no_diagonal_and_no_mean():
    scores = torch.rand(7, 7, generator=torch.Generator().manual_seed(2))
    found = centred(scores + scores.T)
    assert abs(float(found.mean())) < 1e-6
    torch.testing.assert_close(found, found.T)


def test_nothing_has_no_direction():
    vectors = torch.zeros(1, 3, 4)
    vectors[0, 0] = 2.0
    assert unit(vectors)[0].norm(dim=1).tolist() == [1.0, 0.0, 0.0]


def test_encodings_are_coherent_with_their_public_images_and_with_each_other():
    """On photographs, where squares of pixels say nothing."""
    pictures = photographs(60)
    private, public = pictures[:10], pictures[10:60]
    drawn = torch.Generator().manual_seed(0)
    made = InstaHide(k_pub=2, n_epochs=12).encode(private, public, generator=drawn)
    cut = gradient_windows(made.y, SHAPE, Windows())
    whiten = whitening(cut, Windows())
    white = cut @ whiten
    found = public_coherence(white, gradient_windows(public, SHAPE, Windows()) @ whiten)
    strong = made.public[made.public_weights > 0.3], (made.public_weights > 0.3).nonzero()[:, 0]
    ranks = found.argsort(1, descending=True).argsort(1)[strong[1], strong[0]]
    assert float((ranks < 3).float().mean()) > 0.8
    has = torch.zeros(len(made.y), 10).scatter_(1, made.private, made.private_weights)
    common = (has @ has.T)[~torch.eye(len(has), dtype=torch.bool)]
    scores = coherence(white)[~torch.eye(len(has), dtype=torch.bool)]
    assert float(scores[common > 0.1].mean() - scores[common == 0].mean()) > 0.5 * scores.std()


@pytest.mark.parametrize(
    ("windows", "shape", "said"),
    [
        ({"side": 1}, SHAPE, "side=1"),
        ({"stride": 5}, SHAPE, "stride=5"),
        ({"floor": 0.0}, SHAPE, "floor=0"),
        ({"side": 20, "stride": 4}, SHAPE, "smaller than side=20"),
        ({}, (3, 16, 15), "has 720"),
    ],
)
def test_what_does_not_fit_is_said(windows, shape, said):
    with pytest.raises(ValueError, match=said):
        gradient_windows(photographs(2), shape, Windows(**windows))

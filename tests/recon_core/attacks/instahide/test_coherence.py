"""Scores of pairs of encodings from whitened windows of gradients, without signs or with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.instahide.oracles import auc, squares
from recon_core.attacks.instahide.coherence import (
    centred,
    coherence,
    gradient_windows,
    public_coherence,
    pursued,
    signs_of_pixels,
    unit,
    whitened_windows,
    without_publics,
)
from recon_core.attacks.instahide.mixing import Encodings, InstaHide
from tests.recon_core.attacks.instahide.cases import photographs
from tests.recon_core.drawing import generator

SHAPE = (3, 32, 32)


@pytest.fixture(scope="module")
def case() -> tuple[Encodings, Tensor]:
    """Encodings of forty photographs, and eighty public ones."""
    drawn = generator(0)
    images = photographs(120, 32, drawn)
    scheme = InstaHide(k_pub=2, n_epochs=10)
    return scheme.encode(images[:40], images[40:], generator=drawn), images[40:]


def test_on_normal_pixels_squares_tell() -> None:
    images = torch.randn(20, 3072, generator=generator(0))
    made = InstaHide(k_pub=0, n_epochs=8).encode(images, images[:0], generator=generator(1))
    assert auc(squares(made.y), made.private) > 0.99


def test_on_photographs_signs_of_windows_tell_and_true_public_images_tell_most(case) -> None:
    made, public = case
    found = pursued(made.y, SHAPE, public, largest=0.65)
    assert found.coefficients.shape == (len(made.y), len(public))
    assert found.signs.abs().max() <= 1
    white, theirs = whitened_windows(SHAPE, made.y, public)
    true = torch.zeros(len(made.y), len(public)).scatter_(1, made.public, made.public_weights)
    known = without_publics(true, white, theirs)
    scores = [squares(made.y), coherence(white), centred(found.scores), centred(known.scores)]
    aucs = [auc(some, made.private) for some in scores]
    assert 0.5 < aucs[0] < aucs[1] < aucs[2] < aucs[3], aucs
    for some in scores:
        scale = float(some.abs().max())
        torch.testing.assert_close(some, some.T, rtol=1e-4, atol=1e-4 * scale)
        assert float(some.mean(0).abs().max()) < 1e-3 * float(some.std())


def test_encodings_are_coherent_with_their_public_images(case) -> None:
    made, public = case
    found = public_coherence(*whitened_windows(SHAPE, made.y, public))
    rows, column = (made.public_weights > 0.35).nonzero().T
    ranks = found.argsort(1, descending=True).argsort(1)[rows, made.public[rows, column]]
    assert float((ranks < 3).float().mean()) > 0.8


def test_a_window_holds_the_differences_of_its_pixels() -> None:
    images = torch.randn(2, 3 * 8 * 12, generator=generator(0))
    cut = gradient_windows(images, (3, 8, 12))
    assert cut.shape == (6, 2, 2 * 3 * 16)
    pictures = images.reshape(2, 3, 8, 12)
    window = cut[4, 1].reshape(6, 4, 4)  # the middle one of the second row
    assert window[2, 1, 2] == pictures[1, 2, 5, 7] - pictures[1, 2, 5, 6]
    assert window[5, 1, 2] == pictures[1, 2, 6, 6] - pictures[1, 2, 5, 6]


def test_whitened_windows_have_unit_covariance(monkeypatch) -> None:
    monkeypatch.setattr("recon_core.attacks.instahide.coherence.FLOOR", 1e-6)
    (white,) = whitened_windows((1, 5, 5), torch.randn(4000, 25, generator=generator(0)))
    values = torch.linalg.eigvalsh(white[0].mT @ white[0] / 4000)
    # the differences of 24 pixels
    torch.testing.assert_close(values[-23:], torch.ones(23), atol=2e-2, rtol=0)


def test_every_pixel_has_the_sign_of_the_window_nearest_to_it() -> None:
    signs = torch.arange(4.0)[:, None]  # 2 x 2 windows of 9 x 8 pixels
    found = signs_of_pixels(signs, (2, 9, 8)).reshape(2, 9, 8)
    assert found[1, :, 0].tolist() == [0] * 4 + [2] * 5
    assert found[0, 0].tolist() == [0] * 4 + [1] * 4


def test_coherence_does_not_see_the_windows_signs() -> None:
    drawn = generator(1)
    white = torch.randn(6, 20, 8, generator=drawn)
    flipped = white * torch.where(torch.rand(6, 20, 1, generator=drawn) < 0.5, -1.0, 1.0)
    torch.testing.assert_close(coherence(white), coherence(flipped))
    assert unit(torch.zeros(1, 2, 4)).abs().max() == 0  # nothing has no direction


@pytest.mark.parametrize(
    ("shape", "said"), [((3, 2, 128), "2 x 128 are smaller"), ((3, 16, 15), "has 720")]
)
def test_what_does_not_fit_is_refused(shape, said) -> None:
    with pytest.raises(ValueError, match=said):
        gradient_windows(torch.zeros(2, 768), shape)

"""Statistics of pairs of encodings, and the whitened windows of gradients that the best use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.instahide.oracles import auc
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
from recon_core.attacks.instahide.mixing import Encodings, InstaHide
from recon_core.attacks.instahide.pair_statistics import (
    STATISTICS,
    Seen,
    left_by,
    likeness,
    pursued,
)
from recon_core.attacks.instahide.similarity_network import Similarity, SimilarityNetwork
from tests.recon_core.attacks.instahide.cases import photographs
from tests.recon_core.drawing import generator
from tests.recon_core.tiles import photograph_tiles

SHAPE = (3, 32, 32)
BY_ENCODINGS_ALONE = [name for name, s in STATISTICS.items() if s.needs == "nothing"]


@pytest.fixture(scope="module")
def case() -> tuple[Seen, Encodings]:
    drawn = generator(0)
    images = photographs(120, 32, drawn)
    scheme = InstaHide(k_pub=2, n_epochs=10)
    made = scheme.encode(images[:40], images[40:], generator=drawn)
    return Seen(made.y, SHAPE, public=images[40:]), made


def gaussian(d: int = 3072) -> tuple[Tensor, Encodings]:
    drawn = generator(0)
    images = torch.randn(20, d, generator=drawn)
    return images, InstaHide(k_pub=0, n_epochs=8).encode(images, images[:0], generator=drawn)


@pytest.mark.parametrize("name", BY_ENCODINGS_ALONE)
def test_scores_are_symmetric_centred_and_without_signs(name: str, case) -> None:
    seen, _made = case
    found = likeness(name, seen)
    torch.testing.assert_close(found, found.T, rtol=1e-4, atol=1e-4 * float(found.abs().max()))
    assert float(found.mean(0).abs().max()) < 1e-3 * float(found.std())


def test_on_normal_pixels_squares_tell() -> None:
    _images, made = gaussian()
    assert auc(likeness("squares", Seen(made.y, SHAPE)), made.private) > 0.99


def test_on_photographs_signs_of_windows_tell_and_squares_do_not(case) -> None:
    seen, made = case
    aucs = {name: auc(likeness(name, seen), made.private) for name in (*BY_ENCODINGS_ALONE,
                                                                      "pursuit")}  # fmt: skip
    assert all(value > 0.5 for value in aucs.values()), aucs
    assert max(aucs, key=lambda name: aucs[name]) == "pursuit", aucs
    assert aucs["coherence"] > max(aucs["squares"], aucs["laplacian"], aucs["whitened"]), aucs


def test_true_public_images_leave_what_is_private(case) -> None:
    seen, made = case
    assert seen.public is not None
    found = pursued(seen, seen.public)
    assert found.coefficients.shape == (len(seen.y), len(seen.public))
    assert found.signs.abs().max() <= 1
    cut = gradient_windows(seen.y, SHAPE, seen.windows)
    whiten = whitening(cut, seen.windows)
    theirs = gradient_windows(seen.public, SHAPE, seen.windows) @ whiten
    true = torch.zeros(len(seen.y), len(seen.public)).scatter_(1, made.public, made.public_weights)
    known = left_by(true, cut @ whiten, theirs, seen.search.noise)
    assert auc(centred(known.scores), made.private) > auc(centred(found.scores), made.private) > 0.6


def test_the_network_s_scores_are_its_own(case) -> None:
    seen, _made = case
    few = replace(seen, y=seen.y[:30])
    network = SimilarityNetwork().of_shape(SHAPE).build(seed=0)
    assert isinstance(network, Similarity)
    found = likeness("learned", replace(few, network=network))
    raw = network.scores(few.y).fill_diagonal_(0)
    off = raw - raw.mean(0) - raw.mean(0)[:, None] + raw.mean()
    torch.testing.assert_close(found, off)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("magic", "unknown statistic 'magic'; use one of squares, gradients"),
        ("pursuit", "pursuit needs public images"),
        ("learned", "learned needs a trained network"),
    ],
)
def test_what_is_missing_is_said(name: str, words: str, case) -> None:
    with pytest.raises(ValueError, match=words):
        likeness(name, replace(case[0], public=None))


SMALL = (3, 16, 16)


def astronauts(n: int) -> torch.Tensor:
    return photograph_tiles(16, shrink=2)[:n].float().flatten(1) / 127.5 - 1


def test_a_window_holds_the_differences_of_its_pixels():
    images = torch.randn(2, 3 * 8 * 8, generator=generator(0))
    cut = gradient_windows(images, (3, 8, 8), Windows(side=4, stride=2))
    assert cut.shape == (9, 2, 2 * 3 * 16)
    pictures = images.reshape(2, 3, 8, 8)
    across = pictures[1, 2, 3, 5] - pictures[1, 2, 3, 4]  # of pixel (3, 4), in the middle window
    middle = cut[4, 1].reshape(6, 4, 4)
    assert middle[2, 1, 2] == across
    assert middle[5, 1, 2] == pictures[1, 2, 4, 4] - pictures[1, 2, 3, 4]


def test_whitened_windows_have_unit_covariance():
    drawn = generator(0)
    cut = torch.randn(3, 4000, 5, generator=drawn) @ torch.randn(3, 5, 5, generator=drawn)
    white = cut @ whitening(cut, Windows(floor=1e-6))
    covariance = white.mT @ white / 4000
    torch.testing.assert_close(covariance, torch.eye(5).expand(3, 5, 5), atol=2e-2, rtol=0)


def test_every_pixel_is_in_the_window_nearest_to_it():
    places = Windows(side=4, stride=4).of_pixels((1, 9, 8))
    assert places[:, 0].tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 2]
    assert places[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_coherence_does_not_see_the_windows_signs():
    drawn = generator(1)
    white = torch.randn(6, 20, 8, generator=drawn)
    flipped = white * torch.where(torch.rand(6, 20, 1, generator=drawn) < 0.5, -1.0, 1.0)
    torch.testing.assert_close(coherence(white), coherence(flipped))
    assert not torch.allclose(
        signed_coherence(white, torch.ones(6, 20)), signed_coherence(flipped, torch.ones(6, 20))
    )


def test_nothing_has_no_direction():
    vectors = torch.zeros(1, 3, 4)
    vectors[0, 0] = 2.0
    assert unit(vectors)[0].norm(dim=1).tolist() == [1.0, 0.0, 0.0]


def test_encodings_are_coherent_with_their_public_images_and_with_each_other():
    """On photographs, where squares of pixels say nothing."""
    pictures = astronauts(60)
    private, public = pictures[:10], pictures[10:60]
    drawn = generator(0)
    made = InstaHide(k_pub=2, n_epochs=12).encode(private, public, generator=drawn)
    cut = gradient_windows(made.y, SMALL, Windows())
    whiten = whitening(cut, Windows())
    white = cut @ whiten
    found = public_coherence(white, gradient_windows(public, SMALL, Windows()) @ whiten)
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
        ({"side": 1}, SMALL, "side=1"),
        ({"stride": 5}, SMALL, "stride=5"),
        ({"floor": 0.0}, SMALL, "floor=0"),
        ({"side": 20, "stride": 4}, SMALL, "smaller than side=20"),
        ({}, (3, 16, 15), "has 720"),
    ],
)
def test_what_does_not_fit_is_said(windows, shape, said):
    with pytest.raises(ValueError, match=said):
        gradient_windows(astronauts(2), shape, Windows(**windows))

"""Statistics of encodings: what each sees, in one order on photographs, and what each needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.instahide.oracles import auc
from recon_core.attacks.instahide.coherence import centred, gradient_windows, whitening
from recon_core.attacks.instahide.mixing import Encodings, InstaHide
from recon_core.attacks.instahide.pair_statistics import (
    STATISTICS,
    Seen,
    left_by,
    likeness,
    pursued,
)
from recon_core.attacks.instahide.similarity_network import Similarity, SimilarityNetwork
from storage.sources.photographs import photograph_tiles

SHAPE = (3, 32, 32)
BY_ENCODINGS_ALONE = [name for name, s in STATISTICS.items() if s.needs == "nothing"]


@pytest.fixture(scope="module")
def case() -> tuple[Seen, Encodings]:
    tiles = torch.from_numpy(photograph_tiles("train", 32)[0]).float() * (2 / 255) - 1
    drawn = torch.Generator().manual_seed(0)
    images = tiles[torch.randperm(len(tiles), generator=drawn)[:120]].flatten(1)
    scheme = InstaHide(k_pub=2, n_epochs=10)
    made = scheme.encode(images[:40], images[40:], generator=drawn)
    return Seen(made.y, SHAPE, public=images[40:]), made


def gaussian(d: int = 3072) -> tuple[Tensor, Encodings]:
    drawn = torch.Generator().manual_seed(0)
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

"""How many private images two encodings share: means of the statistics, and rounding at size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.instahide.oracles import gram_extract
from recon_core.attacks.instahide.clusters import (
    common_images,
    overlaps,
    posterior_mean,
)
from recon_core.attacks.instahide.line_graph import gram
from recon_core.attacks.instahide.mixing import Mixing
from tests.recon_core.attacks.instahide.cases import gaussian_case


def test_posterior_mean_is_bayes():
    """Of the two candidates for s each weighs as much as its density: against quadrature."""
    mixing = Mixing.by_parts(2)
    y, c = torch.tensor([[0.3, 1.2, 2.0]]), torch.tensor([[0.5, -0.7, 0.1]])
    tau = mixing.private_variance
    candidates = torch.stack([y - c, -y - c])
    weights = torch.exp(-candidates.square() / (2 * tau))
    expected = (candidates * weights).sum(0) / weights.sum(0)
    torch.testing.assert_close(posterior_mean(y, c, mixing), expected)


@pytest.mark.parametrize("make", [Mixing.by_parts, Mixing.as_a_whole])
@pytest.mark.parametrize(("k_pub", "blind"), [(0, True), (2, False), (4, False), (2, True)])
def test_statistics_have_their_means(make, k_pub, blind):
    mixing = make(k_pub)
    case = gaussian_case(mixing, n=12, p=4000, d=6000, m=60, seed=k_pub)
    found = overlaps(case.encodings.y, mixing, None if blind else case.public_part).numpy()
    truth = gram(case.edges)
    off = ~np.eye(60, dtype=bool)
    for shared, mean in ((0, 0), (1, 1), (2, 4 if blind else 2)):
        rows = off & (truth == shared)
        assert found[rows].mean() == pytest.approx(mean, abs=0.12 if shared < 2 else 0.5)


@pytest.mark.parametrize("k_pub", [0, 2, 4])
def test_overlaps_of_the_paper_s_size_are_right(k_pub):
    mixing = Mixing.by_parts(k_pub)
    case = gaussian_case(mixing, n=100, p=200, d=3072, m=400, seed=k_pub)
    found = common_images(case.encodings.y.float(), mixing, case.public_part.float())
    wrong = found.numpy() != gram(case.edges)
    assert wrong.sum() <= 2  # of 79,800 pairs
    assert (gram(case.edges) == 2).sum() > 400  # some encodings mix the same two


def test_the_same_pair_is_told_from_two_correlated_ones():
    """An overlap that looks like 2, but of which no single pair explains both, is 1."""
    mixing = Mixing.by_parts(2)
    case = gaussian_case(mixing, n=30, p=100, d=3072, m=60, seed=2)
    scores = torch.full((60, 60), 2.0, dtype=torch.float64)
    found = common_images(case.encodings.y, mixing, case.public_part, scores).numpy()
    np.testing.assert_array_equal(found == 2, gram(case.edges) == 2)


def test_gram_extract_of_the_paper():
    """Algorithm 1, line 4: k times the Gram matrix of selection vectors, public images and all."""
    mixing = Mixing.as_a_whole(2)
    case = gaussian_case(mixing, n=6, p=6, d=40_000, m=25)
    found = gram_extract(case.encodings.y, 4, 1 / 8)
    w = torch.zeros(25, 12, dtype=torch.float64)
    w.scatter_(1, case.encodings.private, 1.0)
    w.scatter_(1, case.encodings.public + 6, 1.0)
    torch.testing.assert_close(found, w @ w.T)

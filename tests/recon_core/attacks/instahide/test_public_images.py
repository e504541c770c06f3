"""The public images of encodings: against all sets of them, and at size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.public_images import find_publics, spike
from tests.recon_core.attacks.instahide.cases import gaussian_case


def test_greedy_search_equals_trying_all_sets():
    mixing = Mixing.by_parts(3)
    case = gaussian_case(mixing, n=6, p=12, d=150, m=200, seed=4)
    found = find_publics(case.encodings.y, case.public, mixing, n_tried=0)
    blocks = spike(case.encodings.y, case.public.expand(200, -1, -1), mixing)
    sets = torch.combinations(torch.arange(12), 3)
    sums = torch.stack([blocks[:, s][:, :, s].sum((1, 2)) for s in sets], 1)
    best = sets[sums.argmax(1)]
    assert (best == found).all(1).double().mean() > 0.95  # one exchange at a time: local optima
    assert 0.2 < (found == case.encodings.public.sort(1).values).all(1).double().mean() < 0.99


def test_likelihood_decides_where_squares_are_not_enough():
    mixing = Mixing.by_parts(3)
    case = gaussian_case(mixing, n=6, p=60, d=400, m=150, seed=5)
    truth = case.encodings.public.sort(1).values
    share = [
        (find_publics(case.encodings.y, case.public, mixing, n_tried=k) == truth)
        .all(1)
        .double()
        .mean()
        for k in (0, 8)
    ]
    assert share[0] < 0.9 < share[1]


def test_finds_all_of_a_thousand():
    mixing = Mixing.by_parts(4)
    case = gaussian_case(mixing, n=50, p=1000, d=3072, m=100)
    found = find_publics(case.encodings.y.float(), case.public.float(), mixing)
    assert torch.equal(found, case.encodings.public.sort(1).values)


def test_spike_has_the_mean_of_the_model():
    mixing = Mixing.by_parts(2)
    case = gaussian_case(mixing, n=4, p=6, d=400_000, m=2, seed=1)
    block = spike(case.encodings.y, case.public.expand(2, -1, -1), mixing)
    w = torch.zeros(2, 6, dtype=torch.float64).scatter_(
        1, case.encodings.public, case.encodings.public_weights
    )
    expected = 2 * w[:, :, None] * w[:, None] / mixing.variance
    np.testing.assert_allclose(block, expected, atol=0.02)


def test_without_public_images_there_are_none():
    found = find_publics(torch.ones(3, 5), torch.zeros(0, 5), Mixing.by_parts(0))
    assert found.shape == (3, 0)


def test_too_few_public_images_are_refused():
    with pytest.raises(ValueError, match="3 public images are too few: every encoding has 4"):
        find_publics(torch.ones(3, 5), torch.zeros(3, 5), Mixing.by_parts(4))

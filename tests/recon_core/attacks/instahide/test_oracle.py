"""The similarity that knows the truth, and the measure of all similarities."""

from __future__ import annotations

import pytest
import torch

from benchmarks.instahide.oracles import auc, oracle_similarity
from recon_core.attacks.instahide.similarity_network import shared_images


def pairs(m: int, n: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(n, generator=generator)[:2] for _ in range(m)])


def test_without_noise_it_is_the_truth():
    private = pairs(700, 30)
    found = oracle_similarity(private, noise=0.0, generator=torch.Generator())
    assert torch.equal(found, shared_images(private).float().fill_diagonal_(0))
    assert auc(found, private) == 1.0


@pytest.mark.parametrize(("noise", "expected"), [(1.0, 0.760), (0.5, 0.921)])
def test_noise_sets_the_auc(noise, expected):
    private = pairs(900, 200)
    found = oracle_similarity(private, noise=noise, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found, found.T)
    assert auc(found, private) == pytest.approx(expected, abs=0.01)


def test_the_auc_counts_all_pairs():
    private = pairs(40, 8)
    scores = torch.randn(40, 40, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    scores = scores + scores.T
    shared = shared_images(private) > 0
    i, j = torch.triu_indices(40, 40, 1)
    ones, none = scores[i, j][shared[i, j]], scores[i, j][~shared[i, j]]
    apart = ones[:, None] - none
    expected = float(((apart > 0).double() + (apart == 0).double() / 2).mean())
    assert auc(scores, private) == pytest.approx(expected, abs=1e-12)
    assert auc(torch.zeros(40, 40), private) == 0.5


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="noise=-1"):
        oracle_similarity(pairs(5, 4), noise=-1.0, generator=torch.Generator())
    with pytest.raises(ValueError, match="of 3 pairs 3 have a common image"):
        auc(torch.zeros(3, 3), torch.tensor([[0, 1], [0, 2], [0, 3]]))

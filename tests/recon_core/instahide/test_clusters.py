"""Who is in which encoding when overlaps are uncertain."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recon_core.attacks.instahide.clusters import Clustering, assign_uncertain
from recon_core.attacks.instahide.line_graph import gram
from tests.recon_core.instahide.cases import random_edges, renumbered


def found(scores, n, seed=0, how=None):
    drawn = torch.Generator().manual_seed(seed)
    return assign_uncertain(scores, n, generator=drawn, how=how)


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.4])
def test_noise_of_single_overlaps_averages_out(noise):
    rng = np.random.default_rng(3)
    edges = random_edges(rng, 40, 500)
    errors = rng.standard_normal((500, 500)) * noise
    scores = torch.from_numpy(gram(edges) + (errors + errors.T) / 2**0.5)
    assigned = found(scores, 40)
    right = (renumbered(assigned.edges.numpy(), edges, 40) == edges).all(1)
    assert assigned.n_found == 40
    assert right.mean() > 0.99
    assert float(assigned.margin[torch.from_numpy(right)].median()) > 0.5


def test_a_wrong_row_does_not_spread():
    rng = np.random.default_rng(4)
    edges = random_edges(rng, 30, 300)
    scores = torch.from_numpy(gram(edges).astype(float))
    scores[7] = scores[:, 7] = torch.from_numpy(rng.permutation(scores[7].numpy()))
    assigned = found(scores, 30)
    right = (renumbered(assigned.edges.numpy(), edges, 30) == edges).all(1)
    assert right[np.arange(300) != 7].all()


def test_same_generator_same_groups():
    scores = torch.from_numpy(gram(random_edges(np.random.default_rng(1), 20, 150)).astype(float))
    assert torch.equal(found(scores, 20).edges, found(scores, 20).edges)


def test_overlaps_without_structure_are_refused():
    with pytest.raises(ValueError, match="groups of encodings with a common image were found"):
        found(torch.zeros(50, 50, dtype=torch.float64), 10)


@pytest.mark.parametrize(
    ("settings", "message"), [({"n_tries": 0}, "n_tries=0"), ({"inside": 1.0}, "inside=1.0")]
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Clustering(**settings)

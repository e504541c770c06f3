"""Who is in which encoding when overlaps are uncertain."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recon_core.attacks.instahide.clusters import (
    Assigned,
    _distinct,
    _explained,
    assign_uncertain,
)
from recon_core.attacks.instahide.line_graph import gram
from tests.recon_core.attacks.instahide.cases import random_edges, renumbered


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


def test_repairs_find_images_that_growth_has_lost():
    """With 20 encodings of an image on average and much noise, chance groups take places first."""
    rng = np.random.default_rng(5)
    edges = random_edges(rng, 60, 600)
    errors = rng.standard_normal((600, 600)) * 0.8
    scores = torch.from_numpy((gram(edges) + (errors + errors.T) / 2**0.5).astype(np.float32))
    right = {}
    for n_repairs in (0, 12):
        assigned = found(scores, 60, n_repairs=n_repairs)
        right[n_repairs] = (renumbered(assigned.edges.numpy(), edges, 60) == edges).all(1).mean()
    assert right[0] < 0.9
    assert right[12] > 0.93


def test_what_is_kept_explains_most():
    edges = random_edges(np.random.default_rng(6), 20, 200)
    scores = torch.from_numpy(gram(edges).astype(np.float32)).fill_diagonal_(0)
    margin = torch.zeros(200)
    true = _explained(scores, Assigned(torch.from_numpy(edges), margin, 20))
    assert true == float(scores.double().square().sum())  # no error is left
    other = edges.copy()
    other[3] = (other[3] + 1) % 20
    assert _explained(scores, Assigned(torch.from_numpy(np.sort(other)), margin, 20)) < true


def test_two_groups_of_one_image_are_one():
    inside = torch.zeros(4, 30, dtype=torch.bool)
    inside[0, :10] = inside[1, :6] = inside[2, 10:20] = inside[3, 18:24] = True
    scores = inside[[0, 2, 3]].float().T @ inside[[0, 2, 3]].float()
    kept = _distinct(inside, scores, 4)
    assert kept.sum(1).sort().values.tolist() == [6, 10, 10]
    assert len(_distinct(inside, scores, 2)) == 2


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

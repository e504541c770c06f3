"""Clusters grown from scores are images' encodings, and k-means finds each image once."""

from __future__ import annotations

import pytest
import torch

from benchmarks.instahide.oracles import oracle_similarity
from recon_core.attacks.instahide.groups import (
    Growth,
    grown,
    grown_groups,
    jaccard,
    jaccard_kmeans,
)
from recon_core.attacks.instahide.mixing import InstaHide


def drawn(n: int, noise: float, seed: int = 0):
    """Scores of encodings of n images, and which image is in which."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(n, 1)
    e = InstaHide(k_pub=0, n_epochs=40).encode(images, images, generator=generator)
    own = torch.zeros(len(e.y), n).scatter_(1, e.private, 1.0)
    return oracle_similarity(e.private, noise=noise, generator=generator), own


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("n_seeds", [0, 200])
def test_every_image_has_a_group_of_its_own_encodings(noise, n_seeds):
    scores, own = drawn(20, noise)
    generator = torch.Generator().manual_seed(0)
    groups = grown_groups(scores, 20, generator=generator, how=Growth(n_seeds=n_seeds))
    assert groups.sum(0).tolist() == [40] * 20
    hits = groups.float().T @ own
    assert len(hits.argmax(1).unique()) == 20
    assert float(hits.amax(1).min()) >= 36


def test_a_cluster_takes_in_what_is_most_alike():
    scores, own = drawn(12, 0.2)
    clusters = grown(scores, torch.arange(10), 30)
    assert clusters.sum(1).tolist() == [30] * 10
    assert clusters[torch.arange(10), torch.arange(10)].all()
    pure = (clusters.float() @ own).amax(1) / 30
    assert float(pure.median()) > 0.95


def test_the_diagonal_does_not_matter():
    scores, _own = drawn(12, 0.2)
    other = scores.clone().fill_diagonal_(1000.0)
    assert torch.equal(grown(scores, torch.arange(5), 20), grown(other, torch.arange(5), 20))


def test_the_jaccard_index_is_of_sets():
    one = torch.tensor([[1.0, 1, 1, 0], [0, 0, 0, 0]])
    other = torch.tensor([[0.0, 1, 1, 1], [0, 0, 0, 1]])
    torch.testing.assert_close(jaccard(one, other), torch.tensor([[0.5, 0.0], [0.0, 0.0]]))


def test_a_centre_that_no_cluster_is_nearest_to_is_given_another():
    sets = torch.zeros(30, 12, dtype=torch.bool)
    for k in range(30):
        sets[k, 4 * (k % 3) : 4 * (k % 3) + 4] = True
    for seed in range(10):
        drawn_by = torch.Generator().manual_seed(seed)
        found = jaccard_kmeans(sets, 3, generator=drawn_by, how=Growth())
        assert len(found.float().argmax(1).unique()) == 3


def test_too_few_encodings_are_said():
    with pytest.raises(ValueError, match="5 clusters of 5 encodings for 6 images"):
        grown_groups(torch.eye(5), 6, generator=torch.Generator())
    with pytest.raises(ValueError, match="3 clusters of 9 encodings for 6 images"):
        grown_groups(torch.eye(9), 6, generator=torch.Generator(), how=Growth(n_seeds=3))


@pytest.mark.parametrize("wrong", [{"n_seeds": -1}, {"n_rounds": 0}, {"share": 0.0}])
def test_settings_are_checked(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}="):
        Growth(**wrong)

"""What encodings are made of, and who is in which: overlaps, graphs, groups despite errors."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import torch

from benchmarks.instahide.oracles import (
    assign_by_trying,
    gram_extract,
    graphs_agree,
    pairs_right,
)
from benchmarks.instahide.speed import Gaussian, edges_of
from recon_core.attacks.instahide.graph import (
    NotALineGraphError,
    assign,
    assign_uncertain,
    canonical,
    common_images,
    gram,
    incidence_of,
    overlaps,
    posterior_mean,
)
from recon_core.attacks.instahide.mixing import InstaHide, Mixing, mixture
from tests.recon_core.drawing import generator


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
    case = Gaussian.drawn(mixing, n=12, p=4000, d=6000, m=60, seed=k_pub)
    found = overlaps(case.encodings.y, mixing, None if blind else case.public_part).numpy()
    truth = gram(case.edges)
    off = ~np.eye(60, dtype=bool)
    for shared, mean in ((0, 0), (1, 1), (2, 4 if blind else 2)):
        rows = off & (truth == shared)
        assert found[rows].mean() == pytest.approx(mean, abs=0.12 if shared < 2 else 0.5)


@pytest.mark.parametrize("k_pub", [0, 2, 4])
def test_overlaps_of_the_paper_s_size_are_right(k_pub):
    mixing = Mixing.by_parts(k_pub)
    case = Gaussian.drawn(mixing, n=100, p=200, d=3072, m=400, seed=k_pub)
    found = common_images(case.encodings.y.float(), mixing, case.public_part.float())
    wrong = found.numpy() != gram(case.edges)
    assert wrong.sum() <= 2  # of 79,800 pairs
    assert (gram(case.edges) == 2).sum() > 400  # some encodings mix the same two


def test_the_same_pair_is_told_from_two_correlated_ones():
    """An overlap that looks like 2, but of which no single pair explains both, is 1."""
    mixing = Mixing.by_parts(2)
    case = Gaussian.drawn(mixing, n=30, p=100, d=3072, m=60, seed=2)
    scores = torch.full((60, 60), 2.0, dtype=torch.float64)
    found = common_images(case.encodings.y, mixing, case.public_part, scores).numpy()
    np.testing.assert_array_equal(found == 2, gram(case.edges) == 2)


def test_gram_extract_of_the_paper():
    """Algorithm 1, line 4: k times the Gram matrix of selection vectors, public images and all."""
    mixing = Mixing.as_a_whole(2)
    case = Gaussian.drawn(mixing, n=6, p=6, d=40_000, m=25)
    found = gram_extract(case.encodings.y, 4, 1 / 8)
    w = torch.zeros(25, 12, dtype=torch.float64)
    w.scatter_(1, case.encodings.private, 1.0)
    w.scatter_(1, case.encodings.public + 6, 1.0)
    torch.testing.assert_close(found, w @ w.T)


def test_equals_trying_all_graphs():
    assert graphs_agree(200).holds


@pytest.mark.parametrize(
    "edges",
    [
        [[0, 1], [0, 2], [1, 2]],
        [[0, 1], [0, 2], [0, 3]],
        [[0, 1], [0, 2], [1, 2], [2, 3]],
        [[0, 1], [0, 2], [1, 2], [1, 3], [2, 3]],
        [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]],
    ],
    ids=["triangle", "star of three", "paw", "K4 without an edge", "K4"],
)
def test_five_graphs_have_two_labelled_roots(edges):
    edges = np.array(edges)
    (part,) = assign(gram(edges))
    assert len(part.roots) == 2
    assert canonical(edges).tobytes() in {root.tobytes() for root in part.roots}
    for root in part.roots:
        np.testing.assert_array_equal(gram(root), gram(edges))


@pytest.mark.parametrize(
    "graph",
    [
        nx.complete_graph(7),
        nx.star_graph(9),
        nx.cycle_graph(9),
        nx.path_graph(6),
        nx.complete_bipartite_graph(3, 4),
        nx.wheel_graph(6),
        nx.random_labeled_tree(12, seed=3),
        nx.petersen_graph(),
    ],
    ids=["K7", "star", "cycle", "path", "K34", "wheel", "tree", "petersen"],
)
def test_known_graphs_have_one_root(graph):
    edges = np.sort(np.array(list(graph.edges)), axis=1)
    edges = edges[np.random.default_rng(0).permutation(len(edges))]
    (part,) = assign(gram(edges))
    (root,) = part.roots
    np.testing.assert_array_equal(canonical(root), canonical(edges))


@pytest.mark.parametrize(("n", "m"), [(100, 600), (60, 2000), (300, 1500)])
def test_recovers_random_multigraphs(n, m):
    edges = edges_of(n, m, n)
    edges = edges[np.isin(edges, np.flatnonzero(incidence_of(edges, n).sum(0) > 1)).all(1)]
    parts = assign(gram(edges))
    assert [len(part.roots) for part in parts] == [1]
    np.testing.assert_array_equal(canonical(parts[0].roots[0]), canonical(edges))


def test_parts_are_solved_apart():
    edges = np.array([[0, 1], [5, 6], [1, 2], [5, 7], [5, 8], [0, 1]])
    parts = assign(gram(edges))
    assert [part.rows.tolist() for part in parts] == [[0, 2, 5], [1, 3, 4]]
    assert [len(part.roots) for part in parts] == [1, 2]  # a path with a double edge; a star of 3


def test_errors_in_the_overlaps_are_found():
    edges = edges_of(30, 150, 5)
    shared = gram(edges)
    zeros = np.argwhere(np.triu(shared == 0, 1))
    for i, j in zeros[:: len(zeros) // 20]:
        for share in (1, 2):
            wrong = shared.copy()
            wrong[i, j] = wrong[j, i] = share
            with pytest.raises(NotALineGraphError):
                assign(wrong)


def test_claw_is_no_line_graph():
    claw = np.array([[2, 1, 1, 1], [1, 2, 0, 0], [1, 0, 2, 0], [1, 0, 0, 2]])
    with pytest.raises(NotALineGraphError):
        assign(claw)
    assert assign_by_trying(claw, 5) == []


def share_right(scores, edges, n):
    """Of encodings, those with both images right."""
    found = assign_uncertain(scores, n, generator=generator(0))
    return pairs_right(found.numpy(), torch.from_numpy(edges), n)


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.4])
def test_noise_of_single_overlaps_averages_out(noise):
    rng = np.random.default_rng(3)
    edges = edges_of(40, 500, rng)
    errors = rng.standard_normal((500, 500)) * noise
    scores = torch.from_numpy(gram(edges) + (errors + errors.T) / 2**0.5)
    assert share_right(scores, edges, 40) > 0.99


def test_repairs_find_images_that_growth_has_lost(monkeypatch):
    """With 20 encodings of an image on average and much noise, chance groups take places first."""
    rng = np.random.default_rng(5)
    edges = edges_of(60, 600, rng)
    errors = rng.standard_normal((600, 600)) * 0.8
    scores = torch.from_numpy((gram(edges) + (errors + errors.T) / 2**0.5).astype(np.float32))
    assert share_right(scores, edges, 60) > 0.93
    monkeypatch.setattr("recon_core.attacks.instahide.graph.N_REPAIRS", 0)
    assert share_right(scores, edges, 60) < 0.9


def test_a_wrong_row_does_not_spread():
    rng = np.random.default_rng(4)
    edges = edges_of(30, 300, rng)
    scores = torch.from_numpy(gram(edges).astype(float))
    scores[7] = scores[:, 7] = torch.from_numpy(rng.permutation(scores[7].numpy()))
    assert share_right(scores, edges, 30) >= 299 / 300


def test_overlaps_without_structure_are_refused():
    with pytest.raises(ValueError, match="groups of encodings with a common image were found"):
        assign_uncertain(torch.zeros(50, 50, dtype=torch.float64), 10, generator=generator(0))


@pytest.mark.parametrize("k_pub", [0, 2, 4])
@pytest.mark.parametrize("make", [Mixing.by_parts, Mixing.as_a_whole])
def test_encodings_are_what_they_say(make, k_pub):
    case = Gaussian.drawn(make(k_pub), n=9, p=12, d=7, m=40)
    e = case.encodings
    mixed = mixture(case.private, e.private, e.private_weights) + case.public_part
    torch.testing.assert_close(e.y, mixed.abs())
    for ids, k in ((e.private, 2), (e.public, k_pub)):
        assert all(len(set(row)) == k for row in ids.tolist())


def test_normalisations_of_the_paper():
    assert Mixing.by_parts(4).variance == pytest.approx(2)  # definition 2.5, not a unit vector
    assert Mixing.as_a_whole(4).variance == pytest.approx(1)
    assert Mixing.by_parts(0).variance == Mixing.as_a_whole(0).variance == pytest.approx(1)
    for mixing in (Mixing.by_parts(2, noise=0.3), Mixing(k_pub=1, wa=0.3, wb=0.9)):
        case = Gaussian.drawn(mixing, n=5, p=5, d=100_000, m=6)
        assert float(case.encodings.y.square().mean()) == pytest.approx(mixing.variance, rel=0.02)


def test_signs_are_fair_and_hide_nothing():
    e = Gaussian.drawn(Mixing.by_parts(2), n=5, p=5, d=4000, m=3).encodings
    flipped = e.flipped(generator(1))
    assert torch.equal(flipped.abs(), e.y)
    assert abs(float((flipped < 0).double().mean()) - 0.5) < 0.03


@pytest.mark.parametrize("k_pub", [0, 4])
def test_instahide_mixes_every_image_every_epoch(k_pub):
    scheme = InstaHide(k_pub=k_pub, n_epochs=30)
    private, public = torch.rand(10, 6), torch.rand(20, 6)
    labels = torch.eye(10)
    e = scheme.encode(private, public, generator=generator(3), labels=labels)
    weights = torch.cat([e.private_weights, e.public_weights], 1)
    assert e.y.shape == (300, 6)
    torch.testing.assert_close(weights.sum(1), torch.ones(300))
    assert 0 < float(weights.min()) < float(weights.max()) <= 0.65
    for epoch in e.private.split(10):
        assert epoch[:, 0].tolist() == list(range(10))
        assert sorted(epoch[:, 1].tolist()) == list(range(10))
        assert (epoch[:, 0] != epoch[:, 1]).all()
    torch.testing.assert_close(e.labels, mixture(labels, e.private, e.private_weights))
    mixed = mixture(private, e.private, e.private_weights)
    mixed += mixture(public, e.public, e.public_weights)
    torch.testing.assert_close(e.y, mixed.abs())


def test_coefficients_are_uniform_below_the_cap():
    scheme = InstaHide(k_pub=1, largest=1.0, n_epochs=2000)
    images = torch.zeros(20, 1)
    lam = scheme.encode(images, images, generator=generator(0)).private_weights
    # uniform on the simplex: each coordinate is Beta(1, 2)
    assert float(lam[:, 0].mean()) == pytest.approx(1 / 3, abs=0.01)
    assert float(lam[:, 0].var()) == pytest.approx(1 / 18, abs=0.002)


@pytest.mark.parametrize(
    ("k_pub", "n", "message"),
    [(3, 5, "2 public images are too"), (0, 1, "1 private images are too")],
)
def test_too_few_images_are_refused(k_pub, n, message):
    with pytest.raises(ValueError, match=message):
        Gaussian.drawn(Mixing.by_parts(k_pub), n=n, p=2, d=4, m=2)

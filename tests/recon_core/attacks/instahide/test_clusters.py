"""Who is in which encoding when overlaps are uncertain: clusters, components, assignments."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
import torch

from recon_core.attacks.instahide.clusters import (
    assign_uncertain,
)
from recon_core.attacks.instahide.coherence import centred
from recon_core.attacks.instahide.groups import assigned, independent_groups
from recon_core.attacks.instahide.line_graph import gram
from tests.recon_core.attacks.instahide.cases import random_edges, renumbered
from tests.recon_core.drawing import generator


def found(scores, n, seed=0, **settings):
    drawn = generator(seed)
    return assign_uncertain(scores, n, generator=drawn, **settings)


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


def test_a_wrong_row_does_not_spread():
    rng = np.random.default_rng(4)
    edges = random_edges(rng, 30, 300)
    scores = torch.from_numpy(gram(edges).astype(float))
    scores[7] = scores[:, 7] = torch.from_numpy(rng.permutation(scores[7].numpy()))
    assigned = found(scores, 30)
    right = (renumbered(assigned.edges.numpy(), edges, 30) == edges).all(1)
    assert right[np.arange(300) != 7].all()


def test_overlaps_without_structure_are_refused():
    with pytest.raises(ValueError, match="groups of encodings with a common image were found"):
        found(torch.zeros(50, 50, dtype=torch.float64), 10)


def planted(n: int, m: int, noise: float, seed: int = 0):
    """Scores of encodings with random weights, and A."""
    rng = np.random.default_rng(seed)
    edges = random_edges(rng, n, m)
    a = np.zeros((m, n))
    np.put_along_axis(a, edges, rng.uniform(0.2, 1.0, (m, 2)), axis=1)
    z = rng.normal(size=(m, m))
    scores = a @ a.T + noise * (z + z.T) / 2**0.5
    return torch.from_numpy(scores), torch.from_numpy(a)


def purity(loads: torch.Tensor, a: torch.Tensor) -> tuple[float, int]:
    """The least share of a group's encodings that have its image, and how many images are found."""
    hits = (loads > 0).double().T @ (a > 0).double()
    share = hits.amax(1) / (loads > 0).sum(0).clamp(min=1)
    return float(share.min()), len(hits.argmax(1).unique())


@pytest.mark.parametrize(("m", "noise"), [(400, 0.1), (400, 0.3), (1200, 0.6)])
def test_every_image_has_a_group_of_its_own_encodings(m, noise):
    scores, a = planted(20, m, noise)
    drawn = generator(0)
    loads = independent_groups(centred(scores.float()), 20, generator=drawn)
    least, n_found = purity(loads, a)
    assert n_found == 20
    assert least > 0.9
    assert int((loads > 0).sum(0).min()) > m / 20 / 4


def test_loads_follow_the_weights():
    scores, a = planted(10, 400, 0.05)
    drawn = generator(0)
    loads = independent_groups(centred(scores.float()), 10, generator=drawn)
    ids = ((loads > 0).double().T @ (a > 0).double()).argmax(1)
    for k, image in enumerate(ids.tolist()):
        rows = loads[:, k] > 0
        both = torch.stack([loads[rows, k].double(), a[rows, image]])
        assert float(torch.corrcoef(both)[0, 1]) > 0.8


def test_too_few_encodings_are_said():
    with pytest.raises(ValueError, match="5 encodings are too few for the components of 5 images"):
        independent_groups(torch.eye(5), 5, generator=torch.Generator())


def total(affinity: torch.Tensor, edges: torch.Tensor) -> float:
    return float(affinity.gather(1, edges).sum())


def best_by_trying(affinity: torch.Tensor, capacity: int) -> float:
    """The largest total over all assignments of two images to each encoding."""
    m, n = affinity.shape
    pairs = np.array(list(itertools.combinations(range(n), 2)))
    chosen = np.indices((len(pairs),) * m).reshape(m, -1)
    counts = (pairs[chosen][..., None] == np.arange(n)).sum((0, 2))
    worth = affinity.double().numpy()[:, pairs].sum(2)
    totals = np.take_along_axis(worth, chosen, axis=1).sum(0)
    return float(totals[(counts <= capacity).all(1)].max())


def test_the_flow_is_the_best_of_all_assignments():
    """Of 1,296 in each of 60 cases."""
    drawn = generator(0)
    for case in range(60):
        affinity = torch.randn(4, 4, generator=drawn)
        affinity[:, 0] += 2 * (case % 3)  # wanted by all; only its share may have it
        edges = assigned(affinity, n_arcs=4, slack=0.0)
        assert bool((edges[:, 0] < edges[:, 1]).all())
        assert edges.flatten().bincount(minlength=4).tolist() == [2] * 4
        assert total(affinity, edges) == pytest.approx(best_by_trying(affinity, 2), abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_flow_is_that_of_networkx(seed):
    drawn = generator(seed)
    m, n, arcs = 40, 8, 5
    affinity = torch.randn(m, n, generator=drawn).double()
    edges = assigned(affinity, n_arcs=arcs, slack=0.1)
    graph = nx.DiGraph()
    best = affinity.topk(arcs, dim=1).indices
    for k in range(m):
        graph.add_edge("source", ("encoding", k), capacity=2, weight=0)
        for image in best[k].tolist():
            cost = -round(float(affinity[k, image]) * 10**6)
            graph.add_edge(("encoding", k), ("image", image), capacity=1, weight=cost)
    for image in range(n):
        capacity = int(np.ceil(2 * m / n * 1.1))
        graph.add_edge(("image", image), "sink", capacity=capacity, weight=0)
    graph.add_node("source", demand=-2 * m)
    graph.add_node("sink", demand=2 * m)
    cost, _flow = nx.network_simplex(graph)
    assert total(affinity, edges) == pytest.approx(-cost / 10**6, abs=1e-4)


def test_greed_keeps_to_shares_and_gains_less():
    drawn = generator(0)
    worse = 0
    for _ in range(20):
        affinity = torch.randn(30, 6, generator=drawn)
        affinity[:, 0] += 2
        flow = assigned(affinity, n_arcs=6, slack=0.2)
        greedy = assigned(affinity, n_arcs=6, slack=0.2, method="greedy")
        given = (greedy >= 0).all(1)
        assert greedy[given].flatten().bincount(minlength=6).max() <= 12
        assert bool((greedy[given, 0] < greedy[given, 1]).all())
        own = total(affinity[given], greedy[given])
        assert own <= total(affinity, flow) + 1e-4 or not given.all()
        worse += not given.all() or own < total(affinity, flow) - 1e-4
    assert worse > 10


def test_images_that_labels_forbid_come_last():
    drawn = generator(1)
    affinity = torch.randn(20, 5, generator=drawn)
    allowed = torch.rand(20, 5, generator=drawn) < 0.7
    allowed[:, :2] = True
    affinity[~allowed] += 5
    edges = assigned(affinity, allowed, slack=2.0)
    assert bool(allowed.gather(1, edges).all())


def test_encodings_without_room_have_no_images():
    edges = assigned(torch.tensor([[3.0, 2.0, 0.0]] * 9), n_arcs=2, slack=0.0)
    full = (edges >= 0).all(1)
    assert int(full.sum()) == 6  # both of the images that they may be given to have room for six
    assert bool((edges[~full] == -1).all())


def test_one_image_is_refused():
    with pytest.raises(ValueError, match="1 images: an encoding has two"):
        assigned(torch.zeros(4, 1))

"""The flow has the largest total there is; the greedy assignment is no better."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
import torch

from recon_core.attacks.instahide.groups import assigned


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
    """Of 1,296 in each of 300 cases."""
    drawn = torch.Generator().manual_seed(0)
    for case in range(300):
        affinity = torch.randn(4, 4, generator=drawn)
        affinity[:, 0] += 2 * (case % 3)  # wanted by all; only its share may have it
        edges = assigned(affinity, n_arcs=4, slack=0.0)
        assert bool((edges[:, 0] < edges[:, 1]).all())
        assert edges.flatten().bincount(minlength=4).tolist() == [2] * 4
        assert total(affinity, edges) == pytest.approx(best_by_trying(affinity, 2), abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_flow_is_that_of_networkx(seed):
    drawn = torch.Generator().manual_seed(seed)
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
    drawn = torch.Generator().manual_seed(0)
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
    drawn = torch.Generator().manual_seed(1)
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

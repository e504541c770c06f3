"""The graph of encodings from the overlaps: against trying all graphs, roots counted."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest

from benchmarks.instahide.oracles import assign_by_trying
from recon_core.attacks.instahide.line_graph import (
    NotALineGraphError,
    assign,
    canonical,
    gram,
    incidence_of,
)
from tests.recon_core.attacks.instahide.cases import random_edges


def all_roots(shared):
    """Every assignment of the whole, from those of the components."""
    parts = assign(shared)
    found = set()
    for roots in itertools.product(*(part.roots for part in parts)):
        edges, first = np.zeros((len(shared), 2), np.int64), 0
        for part, root in zip(parts, roots, strict=True):
            edges[part.rows] = root + first
            first += int(root.max()) + 1
        found.add(canonical(edges).tobytes())
    return found, sum(max(p.n_images(k) for k in range(len(p.roots))) for p in parts)


@pytest.mark.parametrize("seed", range(8))
def test_equals_trying_all_graphs(seed):
    rng = np.random.default_rng(seed)
    several = 0
    for _ in range(50):
        edges = random_edges(rng, int(rng.integers(2, 6)), int(rng.integers(1, 8)))
        found, n = all_roots(gram(edges))
        tried = {root.tobytes() for root in assign_by_trying(gram(edges), min(n, 7))}
        if n <= 7:
            assert found == tried
        assert canonical(edges).tobytes() in found
        several += len(found) > 1
    assert several > 3


@pytest.mark.parametrize(
    ("name", "edges"),
    [
        ("triangle", [[0, 1], [0, 2], [1, 2]]),
        ("star of three", [[0, 1], [0, 2], [0, 3]]),
        ("paw", [[0, 1], [0, 2], [1, 2], [2, 3]]),
        ("K4 without an edge", [[0, 1], [0, 2], [1, 2], [1, 3], [2, 3]]),
        ("K4", [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]),
    ],
)
def test_five_graphs_have_two_labelled_roots(name, edges):
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


def test_agrees_with_networkx_on_simple_graphs():
    for seed in range(10):
        graph = nx.gnm_random_graph(12, 30, seed=seed)
        graph = graph.subgraph(max(nx.connected_components(graph), key=len))
        edges = np.sort(np.array(list(graph.edges)), axis=1)
        line = nx.from_numpy_array(gram(edges) - 2 * np.eye(len(edges), dtype=int))
        (part,) = assign(gram(edges))
        ours = nx.Graph(part.roots[0].tolist())
        assert nx.is_isomorphic(ours, nx.inverse_line_graph(line))


@pytest.mark.parametrize(("n", "m"), [(100, 600), (60, 2000), (300, 1500)])
def test_recovers_random_multigraphs(n, m):
    edges = random_edges(np.random.default_rng(n), n, m)
    edges = edges[np.isin(edges, np.flatnonzero(incidence_of(edges, n).sum(0) > 1)).all(1)]
    parts = assign(gram(edges))
    assert [len(part.roots) for part in parts] == [1]
    np.testing.assert_array_equal(canonical(parts[0].roots[0]), canonical(edges))


def test_parts_are_solved_apart():
    edges = np.array([[0, 1], [5, 6], [1, 2], [5, 7], [5, 8], [0, 1]])
    parts = assign(gram(edges))
    assert [part.rows.tolist() for part in parts] == [[0, 2, 5], [1, 3, 4]]
    assert [len(part.roots) for part in parts] == [1, 2]  # a path with a double edge; a star of 3


def test_incidence_has_two_ones_per_row():
    edges = random_edges(np.random.default_rng(1), 9, 20)
    w = incidence_of(edges, 9)
    assert (w.sum(1) == 2).all()
    np.testing.assert_array_equal(w @ w.T, gram(edges))


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        (np.zeros((0, 0), int), r"shape \(0, 0\)"),
        (np.array([[2, 3], [3, 2]]), "shared has 3"),
        (np.array([[2, -1], [-1, 2]]), "shared has -1"),
        (np.array([[2, 1], [0, 2]]), r"not symmetric: 1 at \(0, 1\), 0 at \(1, 0\)"),
    ],
)
def test_what_is_no_gram_matrix_is_refused(shared, message):
    with pytest.raises(ValueError, match=message):
        assign(shared)


def test_errors_in_the_overlaps_are_found():
    edges = random_edges(np.random.default_rng(5), 30, 150)
    shared = gram(edges)
    zeros = np.argwhere(np.triu(shared == 0, 1))
    for i, j in zeros[:: len(zeros) // 20]:
        wrong = shared.copy()
        wrong[i, j] = wrong[j, i] = 1
        with pytest.raises(NotALineGraphError, match=r"no line graph|the same two images"):
            assign(wrong)
    wrong = shared.copy()
    i, j = zeros[0]
    wrong[i, j] = wrong[j, i] = 2
    with pytest.raises(NotALineGraphError, match="mix the same two images"):
        assign(wrong)


def test_claw_is_no_line_graph():
    claw = np.array([[2, 1, 1, 1], [1, 2, 0, 0], [1, 0, 2, 0], [1, 0, 0, 2]])
    with pytest.raises(NotALineGraphError):
        assign(claw)
    assert assign_by_trying(claw, 5) == []

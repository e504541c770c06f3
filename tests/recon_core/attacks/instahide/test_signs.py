"""Pixels from hidden signs: against trying all signs, with solutions counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.instahide.oracles import all_solutions
from recon_core.attacks.instahide.signs import Equations, determined, solve, suspects
from tests.recon_core.attacks.instahide.cases import random_edges


def planted(rng, n, m, d, *, with_public, weights=None):
    edges = random_edges(rng, n, m)
    equations = Equations(edges, np.ones((m, 2)) if weights is None else weights, n)
    x = rng.standard_normal((n, d))
    c = rng.standard_normal((m, d)) * with_public
    return equations, x, c, np.abs(equations.matrix @ x + c)


def solved(equations, y, c, **settings):
    return solve(torch.from_numpy(y), torch.from_numpy(c), equations, tolerance=1e-7, **settings)


@pytest.mark.parametrize("with_public", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_equals_trying_all_signs(seed, with_public):
    rng = np.random.default_rng(seed)
    unique = 0
    for _ in range(30):
        n = int(rng.integers(2, 6))
        m = int(rng.integers(n + 1, 12))
        equations, _x, c, y = planted(rng, n, m, 1, with_public=with_public)
        known = determined(equations, with_public=with_public)
        tried = np.array(all_solutions(y[:, 0], c[:, 0], equations))
        if not known.free.any():
            assert len(tried) == known.n_solutions
        found = solved(equations, y, c)
        np.testing.assert_array_equal(found.met[:, 0], known.images)
        for image in np.flatnonzero(known.images):
            values = tried[:, image] if with_public else np.abs(tried[:, image])
            assert np.ptp(values) < 1e-6  # all solutions agree
            own = float(found.z[image, 0])
            assert abs((own if with_public else abs(own)) - values[0]) < 1e-6
            unique += 1
        for image in np.flatnonzero(known.ambiguous):
            assert np.ptp(np.abs(tried[:, image])) > 1e-6 or np.ptp(tried[:, image]) > 1e-6
            assert bool(found.z[image].isnan().all())
    assert unique > 5


@pytest.mark.parametrize("with_public", [True, False])
@pytest.mark.parametrize(("n", "m"), [(20, 80), (60, 300), (100, 500)])
def test_recovers_planted_images(n, m, with_public):
    equations, x, c, y = planted(np.random.default_rng(m), n, m, 400, with_public=with_public)
    found = solved(equations, y, c)
    assert found.met.all()
    assert found.determined.images.all()
    truth = x if with_public else x * np.where(x[:1] < 0, -1, 1)
    np.testing.assert_allclose(found.z, truth, atol=1e-9)


def test_with_noise_errors_are_those_of_least_squares():
    rng = np.random.default_rng(3)
    equations, x, c, _y = planted(rng, 40, 300, 500, with_public=True)
    noise = 0.01 * rng.standard_normal(c.shape)
    y = np.abs(equations.matrix @ x + c + noise)
    found = solve(torch.from_numpy(y), torch.from_numpy(c), equations, tolerance=0.08)
    best = x + np.linalg.pinv(equations.matrix) @ noise  # with all signs known
    near_zero = np.abs(y).min(0) < 0.05
    assert found.met.all()
    assert np.abs(np.asarray(found.z) - x).max() < 0.1
    np.testing.assert_allclose(np.asarray(found.z)[:, ~near_zero], best[:, ~near_zero], atol=1e-9)


def test_a_wider_beam_is_used_where_a_narrow_one_fails():
    rng = np.random.default_rng(4)
    equations, x, c, y = planted(rng, 60, 105, 300, with_public=True)
    narrow = solved(equations, y, c, beams=(2,))
    wide = solved(equations, y, c, beams=(2, 64, 512))
    assert float(narrow.met.double().mean()) < float(wide.met.double().mean())
    known = wide.determined.images
    good = np.asarray(wide.met[known])
    assert good.mean() > 0.9
    np.testing.assert_allclose(np.asarray(wide.z)[known][good], x[known][good], atol=1e-7)


def test_images_on_long_odd_cycles_only_are_left_out_and_cost_the_others_nothing():
    around = np.array([[k, (k + 1) % 15] for k in range(15)])
    triangle = np.array([[15, 16], [16, 17], [15, 17]])
    edges = np.sort(np.concatenate([around, around, triangle, triangle]), axis=1)
    equations = Equations(edges, np.ones((len(edges), 2)), 18)
    rng = np.random.default_rng(0)
    x, c = rng.standard_normal((18, 5)), rng.standard_normal((len(edges), 5))
    found = solved(equations, np.abs(equations.matrix @ x + c), c)
    assert found.determined.images.all()
    assert found.met[15:].all()
    np.testing.assert_allclose(found.z[15:], x[15:], atol=1e-9)
    assert not found.met[:15].any()
    assert found.z[:15].isnan().all()


def test_what_is_not_determined_is_named():
    # a triangle; a pendant image on it; a pair of images that only their sum is known of
    edges = np.array([[0, 1], [1, 2], [0, 2], [2, 3], [4, 5]])
    equations = Equations(edges, np.ones((5, 2)), 7)
    known = determined(equations, with_public=True)
    assert known.coloops.tolist() == [True] * 5  # a triangle's equations are independent
    edges = np.array([[0, 1], [1, 2], [0, 2], [0, 1], [1, 2], [0, 2], [2, 3], [4, 5]])
    known = determined(Equations(edges, np.ones((8, 2)), 7), with_public=True)
    assert known.coloops.tolist() == [False] * 6 + [True] * 2
    assert known.images.tolist() == [True] * 3 + [False] * 4
    assert known.ambiguous.tolist() == [False] * 3 + [True] + [False] * 3
    assert known.free.tolist() == [False] * 4 + [True] * 3
    assert [part.tolist() for part in known.parts] == [[0, 1, 2]]


def test_bipartite_graphs_determine_nothing():
    edges = np.array([[0, 1], [1, 2], [2, 3], [0, 3], [0, 1], [2, 3]])
    equations = Equations(edges, np.ones((6, 2)), 4)
    known = determined(equations, with_public=True)
    assert known.free.all()
    found = solved(equations, np.ones((6, 3)), np.zeros((6, 3)))
    assert found.z.isnan().all()


def test_wrong_encodings_are_outvoted():
    rng = np.random.default_rng(6)
    equations, _x, c, y = planted(rng, 50, 400, 300, with_public=True)
    c[[7, 100, 333]] = rng.standard_normal((3, 300))
    wrong = suspects(torch.from_numpy(y), torch.from_numpy(c), equations, tolerance=1e-7)
    assert np.flatnonzero(wrong).tolist() == [7, 100, 333]

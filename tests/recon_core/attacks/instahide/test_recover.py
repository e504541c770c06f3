"""Private images from encodings: exact or not determined; pixels against trying all signs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.instahide.oracles import pairs_right, publics_agree, signs_agree
from benchmarks.instahide.speed import Gaussian, edges_of
from recon_core.attacks.instahide.graph import NotALineGraphError, canonical, gram, overlaps
from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.recover import (
    MAX_PUBLIC,
    Status,
    by_sdp,
    find_publics,
    recover,
    spike,
)
from recon_core.attacks.instahide.signs import Equations, determined, solve, suspects
from tests.recon_core.drawing import generator


def recovered(case, **settings):
    drawn = generator(0)
    own = {"public": case.public, "n_private": len(case.private)} | settings
    return recover(case.encodings.y, case.mixing, generator=drawn, **own)


@pytest.mark.parametrize("make", [Mixing.by_parts, Mixing.as_a_whole])
@pytest.mark.parametrize("k_pub", [0, 2, 4])
def test_recovers_every_image_exactly(make, k_pub):
    case = Gaussian.drawn(make(k_pub), n=30, p=200, d=3072, m=200, seed=k_pub)
    found = recovered(case)
    assert found.exact
    assert found.n_graphs == 1
    assert found.n_recovered == 30
    assert found.explained.all()
    assert torch.equal(found.public, case.encodings.public.sort(1).values)
    np.testing.assert_array_equal(canonical(found.edges), canonical(case.edges))
    assert float(case.matched(found).errors.max()) < 1e-9


def test_noise_of_a_hundredth_costs_no_pixel_ten_deviations():
    case = Gaussian.drawn(Mixing.by_parts(2, noise=0.01), n=40, p=100, d=3072, m=400)
    found = recovered(case)
    assert found.n_recovered == 40
    assert float(case.matched(found).errors.max()) < 0.1


def test_images_that_are_not_determined_are_named_and_not_guessed():
    case = Gaussian.drawn(Mixing.by_parts(2), n=20, p=60, d=3072, m=34, seed=3)
    found = recovered(case)
    known = torch.tensor([status is Status.RECOVERED for status in found.status])
    assert 0 < int(known.sum()) < 20
    assert found.images[~known].isnan().all()
    assert not found.images[known].isnan().any()
    assert float(case.matched(found).errors[known].max()) < 1e-9
    assert {Status.AMBIGUOUS, Status.FREE} <= set(found.status)
    in_no_encoding = recovered(
        Gaussian.drawn(Mixing.by_parts(0), n=6, p=0, d=3072, m=40), n_private=9
    )
    assert in_no_encoding.status.count(Status.FREE) == 3
    assert in_no_encoding.images.shape == (9, 3072)


def test_wrong_public_images_are_found_and_mended(monkeypatch):
    case = Gaussian.drawn(Mixing.by_parts(2), n=30, p=300, d=3072, m=220, seed=3)

    def mistaken(*given):
        ids = find_publics(*given)
        ids[[3, 50, 51], 0] = (ids[[3, 50, 51], 0] + 17) % 300
        return ids

    monkeypatch.setattr("recon_core.attacks.instahide.recover.find_publics", mistaken)
    found = recovered(case)
    assert found.n_recovered == 30
    assert found.explained.all()
    assert torch.equal(found.public, case.encodings.public.sort(1).values)
    assert float(case.matched(found).errors.max()) < 1e-9


def test_an_encoding_that_is_something_else_is_left_out_or_spoils_all_without_repairs(monkeypatch):
    case = Gaussian.drawn(Mixing.by_parts(2), n=30, p=300, d=3072, m=220, seed=4)
    drawn = generator(11)
    other = torch.randn(3072, dtype=torch.float64, generator=drawn)
    case.encodings.y[11] = other.abs() * 2**0.5
    found = recovered(case)
    assert np.flatnonzero(~found.explained).tolist() == [11]
    assert found.n_recovered == 30
    assert float(case.matched(found).errors.max()) < 1e-9
    others = np.arange(220) != 11
    assert pairs_right(found.edges[others], case.encodings.private[others], 30) == 1
    monkeypatch.setattr("recon_core.attacks.instahide.recover.N_REPAIRS", 0)
    unrepaired = recovered(case)
    assert unrepaired.status == (Status.UNSOLVED,) * 30
    assert unrepaired.images.isnan().all()


@pytest.mark.parametrize("changed", [1, 2])
def test_an_overlap_that_is_nearly_something_else_costs_nothing(monkeypatch, changed):
    case = Gaussian.drawn(Mixing.by_parts(2), n=20, p=60, d=3072, m=60, seed=3)
    expected = recovered(case)

    def mistaken(*given):
        scores = overlaps(*given)
        shares = gram(case.edges)
        rows, columns = np.nonzero(np.triu(shares == 1, 1))
        for k, score in zip((5, 40)[:changed], (0.492, 0.43), strict=False):
            scores[rows[k], columns[k]] = scores[columns[k], rows[k]] = score
        return scores

    monkeypatch.setattr("recon_core.attacks.instahide.recover.overlaps", mistaken)
    found = recovered(case)
    assert found.exact
    np.testing.assert_array_equal(found.edges, expected.edges)
    assert found.status == expected.status
    assert Status.RECOVERED in found.status


def test_single_precision_is_enough():
    case = Gaussian.drawn(Mixing.by_parts(2), n=20, p=60, d=3072, m=120)
    e = replace(case.encodings, y=case.encodings.y.float())
    found = recovered(replace(case, encodings=e, public=case.public.float()))
    assert found.n_recovered == 20
    assert float(case.matched(found).errors.max()) < 1e-4
    stored = replace(case, encodings=replace(e, y=e.y.double()), public=case.public.float())
    assert torch.equal(recovered(stored).images, found.images)


@pytest.mark.parametrize("k_pub", [0, 2])
def test_two_graphs_are_left_open(k_pub):
    """Of the six pairs of four images, whose overlaps those of other pairs have, too."""
    case = Gaussian.drawn(Mixing.by_parts(k_pub), n=4, p=9, d=3072, m=6, seed=8)
    pairs = torch.combinations(torch.arange(4))
    mixed = 2**-0.5 * case.private[pairs].sum(1) + case.public_part
    drawn = generator(0)
    found = recover(mixed.abs(), case.mixing, public=case.public, n_private=4, generator=drawn)
    assert found.n_graphs == 2
    assert found.status == (Status.SEVERAL_GRAPHS,) * 4
    assert found.images.isnan().all()


@pytest.mark.parametrize(
    ("pixel", "change", "message"),
    [
        (0.0, {"n_private": 300}, "200 encodings of n_private=300"),
        (0.0, {"n_private": 1}, "n_private=1"),
        (0.0, {"public": None}, "0 public images are too few"),
        (0.0, {"public": torch.zeros(9, 5)}, "public images have 5 pixels, encodings 64"),
        (torch.nan, {}, "encoding 3 has pixels that are not finite"),
    ],
)
def test_bad_input_is_refused(pixel, change, message):
    case = Gaussian.drawn(Mixing.by_parts(2), n=10, p=20, d=64, m=200)
    case.encodings.y[3, 5] = pixel
    with pytest.raises(ValueError, match=message):
        recovered(case, **change)


def test_too_few_pixels_are_a_clear_outcome():
    case = Gaussian.drawn(Mixing.by_parts(2), n=20, p=40, d=30, m=100)
    with pytest.raises(NotALineGraphError, match=r"Gram matrix has errors|same two images"):
        recovered(case, n_private=None)


def planted(rng, n, m, d, *, with_public, weights=None):
    edges = edges_of(n, m, rng)
    equations = Equations(edges, np.ones((m, 2)) if weights is None else weights, n)
    x = rng.standard_normal((n, d))
    c = rng.standard_normal((m, d)) * with_public
    return equations, x, c, np.abs(equations.matrix @ x + c)


def solved(equations, y, c, **settings):
    return solve(torch.from_numpy(y), torch.from_numpy(c), equations, tolerance=1e-7, **settings)


def test_equals_trying_all_signs():
    assert signs_agree(150).holds


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


def test_greedy_search_equals_trying_all_sets(monkeypatch):
    monkeypatch.setattr("recon_core.attacks.instahide.recover.DOUBT", 0.0)
    mixing = Mixing.by_parts(3)
    case = Gaussian.drawn(mixing, n=6, p=12, d=150, m=200, seed=4)
    found = find_publics(case.encodings.y, case.public, mixing)
    blocks = spike(case.encodings.y, case.public.expand(200, -1, -1), mixing)
    sets = torch.combinations(torch.arange(12), 3)
    sums = torch.stack([blocks[:, s][:, :, s].sum((1, 2)) for s in sets], 1)
    best = sets[sums.argmax(1)]
    assert (best == found).all(1).double().mean() > 0.95  # one exchange at a time: local optima
    assert 0.2 < (found == case.encodings.public.sort(1).values).all(1).double().mean() < 0.99


def test_likelihood_decides_where_squares_are_not_enough(monkeypatch):
    case = Gaussian.drawn(Mixing.by_parts(3), n=6, p=60, d=400, m=150, seed=5)
    truth, share = case.encodings.public.sort(1).values, []
    for doubt in (0.0, 6.0):
        monkeypatch.setattr("recon_core.attacks.instahide.recover.DOUBT", doubt)
        found = find_publics(case.encodings.y, case.public, case.mixing)
        share.append(float((found == truth).all(1).double().mean()))
    assert share[0] < 0.9 < share[1]


def test_finds_all_of_a_thousand():
    mixing = Mixing.by_parts(4)
    case = Gaussian.drawn(mixing, n=50, p=1000, d=3072, m=100)
    found = find_publics(case.encodings.y.float(), case.public.float(), mixing)
    assert torch.equal(found, case.encodings.public.sort(1).values)


def test_spike_has_the_mean_of_the_model():
    mixing = Mixing.by_parts(2)
    case = Gaussian.drawn(mixing, n=4, p=6, d=400_000, m=2, seed=1)
    block = spike(case.encodings.y, case.public.expand(2, -1, -1), mixing)
    w = torch.zeros(2, 6, dtype=torch.float64).scatter_(
        1, case.encodings.public, case.encodings.public_weights
    )
    expected = 2 * w[:, :, None] * w[:, None] / mixing.variance
    np.testing.assert_allclose(block, expected, atol=0.02)


def test_without_public_images_there_are_none():
    for search in (find_publics, by_sdp):
        assert search(torch.ones(3, 5), torch.zeros(0, 5), Mixing.by_parts(0)).shape == (3, 0)


@pytest.mark.slow
def test_the_program_finds_what_the_search_finds() -> None:
    assert publics_agree(150).holds


def test_images_come_back_with_public_images_by_the_program() -> None:
    mixing = Mixing.by_parts(2)
    case, shares = Gaussian.drawn(mixing, n=5, p=12, d=1500, m=30, seed=1), list[float]()
    found = recover(
        case.encodings.y, mixing, public=case.public, n_private=5, semidefinite=True,
        generator=generator(0), progress=shares.append,
    )  # fmt: skip
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert found.public is not None
    assert torch.equal(found.public, case.encodings.public.sort(1).values)
    assert set(found.status) == {Status.RECOVERED}


def test_more_than_it_takes_and_what_it_does_not_solve_are_refused(monkeypatch) -> None:
    mixing = Mixing.by_parts(2)
    with pytest.raises(ValueError, match="41 public images are too many for the semidefinite"):
        by_sdp(torch.ones(3, 5), torch.zeros(MAX_PUBLIC + 1, 5), mixing)
    with pytest.raises(ValueError, match="1 public images are too few"):
        by_sdp(torch.ones(3, 5), torch.zeros(1, 5), mixing)
    monkeypatch.setattr("cvxpy.Problem.status", "infeasible")
    with pytest.raises(ValueError, match="encoding 0 has no solution to this accuracy"):
        by_sdp(torch.ones(3, 5), torch.zeros(4, 5), mixing)

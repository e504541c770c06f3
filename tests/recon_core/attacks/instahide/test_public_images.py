"""The public images of encodings: against all sets, at size, by the paper's program; few atoms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.natural_fit import exchanged, few_atoms
from recon_core.attacks.instahide.public_images import (
    MAX_PUBLIC,
    by_sdp,
    find_publics,
    spike,
)
from recon_core.attacks.instahide.recover import Status, recover
from tests.recon_core.attacks.instahide.cases import gaussian_case
from tests.recon_core.drawing import generator


def test_greedy_search_equals_trying_all_sets():
    mixing = Mixing.by_parts(3)
    case = gaussian_case(mixing, n=6, p=12, d=150, m=200, seed=4)
    found = find_publics(case.encodings.y, case.public, mixing, n_tried=0)
    blocks = spike(case.encodings.y, case.public.expand(200, -1, -1), mixing)
    sets = torch.combinations(torch.arange(12), 3)
    sums = torch.stack([blocks[:, s][:, :, s].sum((1, 2)) for s in sets], 1)
    best = sets[sums.argmax(1)]
    assert (best == found).all(1).double().mean() > 0.95  # one exchange at a time: local optima
    assert 0.2 < (found == case.encodings.public.sort(1).values).all(1).double().mean() < 0.99


def test_likelihood_decides_where_squares_are_not_enough():
    mixing = Mixing.by_parts(3)
    case = gaussian_case(mixing, n=6, p=60, d=400, m=150, seed=5)
    truth = case.encodings.public.sort(1).values
    share = [
        (find_publics(case.encodings.y, case.public, mixing, n_tried=k) == truth)
        .all(1)
        .double()
        .mean()
        for k in (0, 8)
    ]
    assert share[0] < 0.9 < share[1]


def test_finds_all_of_a_thousand():
    mixing = Mixing.by_parts(4)
    case = gaussian_case(mixing, n=50, p=1000, d=3072, m=100)
    found = find_publics(case.encodings.y.float(), case.public.float(), mixing)
    assert torch.equal(found, case.encodings.public.sort(1).values)


def test_spike_has_the_mean_of_the_model():
    mixing = Mixing.by_parts(2)
    case = gaussian_case(mixing, n=4, p=6, d=400_000, m=2, seed=1)
    block = spike(case.encodings.y, case.public.expand(2, -1, -1), mixing)
    w = torch.zeros(2, 6, dtype=torch.float64).scatter_(
        1, case.encodings.public, case.encodings.public_weights
    )
    expected = 2 * w[:, :, None] * w[:, None] / mixing.variance
    np.testing.assert_allclose(block, expected, atol=0.02)


def test_without_public_images_there_are_none():
    for search in (find_publics, by_sdp):
        assert search(torch.ones(3, 5), torch.zeros(0, 5), Mixing.by_parts(0)).shape == (3, 0)


def test_too_few_public_images_are_refused():
    with pytest.raises(ValueError, match="3 public images are too few: every encoding has 4"):
        find_publics(torch.ones(3, 5), torch.zeros(3, 5), Mixing.by_parts(4))


@pytest.mark.slow
@pytest.mark.parametrize("k_pub", [2, 3, 4])
def test_the_program_finds_what_the_search_finds(k_pub: int) -> None:
    mixing = Mixing.by_parts(k_pub)
    case = gaussian_case(mixing, n=8, p=12, d=1500, m=70, seed=k_pub)
    ours = find_publics(case.encodings.y, case.public, mixing)
    shares: list[float] = []
    theirs = by_sdp(case.encodings.y, case.public, mixing, progress=shares.append)
    assert torch.equal(ours, theirs)
    assert torch.equal(theirs, case.encodings.public.sort(1).values)
    assert shares == sorted(shares)
    assert (len(shares), shares[-1]) == (70, 1.0)


def test_images_come_back_with_public_images_by_the_program() -> None:
    mixing = Mixing.by_parts(2)
    case = gaussian_case(mixing, n=5, p=12, d=1500, m=30, seed=1)
    found = recover(
        case.encodings.y, mixing, public=case.public, n_private=5, semidefinite=True,
        generator=generator(0),
    )  # fmt: skip
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


def test_the_best_two_of_eight_are_found():
    """Against non-negative least squares of all 28 pairs, 200 targets."""
    drawn = generator(0)
    atoms = torch.randn(8, 40, generator=drawn)
    ids = torch.stack([torch.randperm(8, generator=drawn)[:2] for _ in range(200)])
    weights = 0.2 + torch.rand(200, 2, generator=drawn)
    noise = 0.1 * torch.randn(200, 40, generator=drawn)
    targets = (atoms[ids] * weights[..., None]).sum(1) + noise
    chosen, own = few_atoms(targets @ atoms.T, atoms @ atoms.T, 2, largest=2.0)
    for k in range(200):
        best = min(
            itertools.combinations(range(8), 2),
            key=lambda pair: nnls(atoms[list(pair)].T.numpy(), targets[k].numpy())[1],
        )
        assert sorted(chosen[k].tolist()) == list(best)
        exact, _ = nnls(atoms[chosen[k]].T.numpy(), targets[k].numpy())
        torch.testing.assert_close(own[k], torch.from_numpy(exact).float(), atol=1e-3, rtol=1e-3)


def test_coefficients_stay_within_their_bounds():
    drawn = generator(1)
    atoms = torch.randn(6, 30, generator=drawn)
    targets = torch.stack([3 * atoms[0] - atoms[1], -2 * atoms[2]])
    chosen, weights = few_atoms(targets @ atoms.T, atoms @ atoms.T, 2, largest=0.65)
    assert 0 <= float(weights.min()) <= float(weights.max()) <= 0.65
    assert 0 in chosen[0].tolist()


def test_exchanges_find_atoms_of_small_coefficients():
    """Of 200 alike atoms four, one of which has a fiftieth of the weight."""
    drawn = generator(2)
    atoms = torch.randn(200, 300, generator=drawn) + torch.randn(300, generator=drawn)
    ids = torch.stack([torch.randperm(200, generator=drawn)[:4] for _ in range(100)])
    weights = torch.tensor([0.4, 0.3, 0.2, 0.02])
    targets = (atoms[ids] * weights[:, None]).sum(1)
    targets += 0.005 * torch.randn(100, 300, generator=drawn)
    products, gram = targets @ atoms.T, atoms @ atoms.T
    first, _own = few_atoms(products, gram, 4)
    chosen, own = exchanged(products, gram, first)
    true = ids.sort(1).values
    assert float((first.sort(1).values == true).all(1).float().mean()) < 0.5
    assert float((chosen.sort(1).values == true).all(1).float().mean()) > 0.95
    torch.testing.assert_close(own.mean(0), weights, atol=2e-3, rtol=0)
    assert torch.equal(exchanged(products, gram, chosen)[0], chosen)


def test_of_one_atom_the_best_is_taken():
    drawn = generator(3)
    atoms = torch.randn(9, 30, generator=drawn)
    targets = 0.5 * atoms[[4, 7]] + 0.01 * torch.randn(2, 30, generator=drawn)
    start = torch.zeros(2, 1, dtype=torch.int64)
    assert exchanged(targets @ atoms.T, atoms @ atoms.T, start)[0].tolist() == [[4], [7]]

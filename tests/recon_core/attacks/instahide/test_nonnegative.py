"""Few atoms with coefficients at or above 0, beside trying all."""

from __future__ import annotations

import itertools

import torch
from scipy.optimize import nnls

from recon_core.attacks.instahide.nonnegative import exchanged, few_atoms


def test_the_best_two_of_eight_are_found():
    """Against non-negative least squares of all 28 pairs, 200 targets."""
    drawn = torch.Generator().manual_seed(0)
    atoms = torch.randn(8, 40, generator=drawn)
    ids = torch.stack([torch.randperm(8, generator=drawn)[:2] for _ in range(200)])
    weights = 0.2 + torch.rand(200, 2, generator=drawn)
    noise = 0.1 * torch.randn(200, 40, generator=drawn)
    targets = (atoms[ids] * weights[..., None]).sum(1) + noise
    found = few_atoms(targets @ atoms.T, atoms @ atoms.T, 2, largest=2.0)
    for k in range(200):
        best = min(
            itertools.combinations(range(8), 2),
            key=lambda pair: nnls(atoms[list(pair)].T.numpy(), targets[k].numpy())[1],
        )
        assert sorted(found.ids[k].tolist()) == list(best)
        exact, _ = nnls(atoms[found.ids[k]].T.numpy(), targets[k].numpy())
        torch.testing.assert_close(
            found.weights[k], torch.from_numpy(exact).float(), atol=1e-3, rtol=1e-3
        )


def test_coefficients_stay_within_their_bounds():
    drawn = torch.Generator().manual_seed(1)
    atoms = torch.randn(6, 30, generator=drawn)
    targets = torch.stack([3 * atoms[0] - atoms[1], -2 * atoms[2]])
    found = few_atoms(targets @ atoms.T, atoms @ atoms.T, 2, largest=0.65)
    assert float(found.weights.min()) >= 0
    assert float(found.weights.max()) <= 0.65
    assert 0 in found.ids[0].tolist()


def test_exchanges_find_atoms_of_small_coefficients():
    """Of 200 alike atoms four, one of which has a fiftieth of the weight."""
    drawn = torch.Generator().manual_seed(2)
    atoms = torch.randn(200, 300, generator=drawn) + torch.randn(300, generator=drawn)
    ids = torch.stack([torch.randperm(200, generator=drawn)[:4] for _ in range(100)])
    weights = torch.tensor([0.4, 0.3, 0.2, 0.02])
    targets = (atoms[ids] * weights[:, None]).sum(1)
    targets += 0.005 * torch.randn(100, 300, generator=drawn)
    products, gram = targets @ atoms.T, atoms @ atoms.T
    first = few_atoms(products, gram, 4)
    found = exchanged(products, gram, first.ids)
    true = ids.sort(1).values
    assert float((first.ids.sort(1).values == true).all(1).float().mean()) < 0.5
    assert float((found.ids.sort(1).values == true).all(1).float().mean()) > 0.95
    torch.testing.assert_close(found.weights.mean(0), weights, atol=2e-3, rtol=0)
    again = exchanged(products, gram, found.ids)
    assert torch.equal(again.ids, found.ids)


def test_of_one_atom_the_best_is_taken():
    drawn = torch.Generator().manual_seed(3)
    atoms = torch.randn(9, 30, generator=drawn)
    targets = 0.5 * atoms[[4, 7]] + 0.01 * torch.randn(2, 30, generator=drawn)
    found = exchanged(targets @ atoms.T, atoms @ atoms.T, torch.zeros(2, 1, dtype=torch.int64))
    assert found.ids.tolist() == [[4], [7]]

"""Few atoms with coefficients at or above 0, beside trying all."""

from __future__ import annotations

import itertools

import torch
from scipy.optimize import nnls

from recon_core.attacks.instahide.nonnegative import few_atoms


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

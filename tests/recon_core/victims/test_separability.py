"""MixCon and UniCon against their formulas, where their minima are, and how far features are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from recon_core.victims import separability as module
from recon_core.victims.separability import mixcon, separability, unicon
from tests.recon_core.drawing import normal, refuses

R, P, K, M = 3, 4, 5, 6
BETA = torch.tensor([0.0, 1e-4, 0.3], dtype=torch.float64)


def at_norm_1(h: Tensor) -> Tensor:
    norm = h.norm()
    return h / norm if bool(norm > 0) else h


def literal_mixcon(h: Tensor, beta: float, *, normalise: bool, eps: float) -> Tensor:
    """Equation 1 and footnote 3 as they are written, for one network (p, k, m)."""
    p, k, _ = h.shape
    total = torch.zeros((), dtype=h.dtype)
    for i in range(p):
        for c1, c2 in itertools.permutations(range(k), 2):
            a, b = (at_norm_1(h[i, c]) if normalise else h[i, c] for c in (c1, c2))
            dist = (a - b).square().sum().clamp(eps, 1 / eps)
            total = total + dist + beta / dist
    return total / p / (k * (k - 1))


def literal_unicon(h: Tensor, *, normalise: bool) -> Tensor:
    """The loss of D.1 as it is written, for one network (p, k, m)."""
    p, k, _ = h.shape
    total = torch.zeros((), dtype=h.dtype)
    for c, i, j in itertools.product(range(k), range(p), range(p)):
        a, b = (at_norm_1(h[row, c]) if normalise else h[row, c] for row in (i, j))
        total = total + (a - b).square().sum() / (p * (p - 1))
    return total / k


def gradient(loss: Tensor, h: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, h)
    return found


@pytest.mark.parametrize("normalise", [True, False])
def test_mixcon_is_equation_1(normalise: bool) -> None:
    h = normal(R, P, K, M).requires_grad_()
    eps = 0.2  # many of the distances are below it, or above 5 if not normalised
    found = mixcon(h, BETA, normalise=normalise, eps=eps)
    written = torch.stack(
        [
            literal_mixcon(a, float(b), normalise=normalise, eps=eps)
            for a, b in zip(h, BETA, strict=True)
        ]
    )
    torch.testing.assert_close(found, written, rtol=1e-13, atol=0)
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    ours, theirs = (gradient((weights * loss).sum(), h) for loss in (found, written))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    dist = torch.cdist(h[0, 0].detach(), h[0, 0].detach()).square()
    if not normalise:
        assert bool((dist > 5).any())


@pytest.mark.parametrize("normalise", [True, False])
def test_unicon_is_the_loss_of_d_1(normalise: bool) -> None:
    h = normal(R, P, K, M).requires_grad_()
    found = unicon(h, normalise=normalise)
    written = torch.stack([literal_unicon(a, normalise=normalise) for a in h])
    torch.testing.assert_close(found, written, rtol=1e-13, atol=0)
    ours, theirs = (gradient(loss.square().sum(), h) for loss in (found, written))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def descended(h: Tensor, beta: float, *, lr: float, steps: int) -> Tensor:
    """Free features (1, p, k, m) after gradient descent on MixCon, at norm 1."""
    beta_1 = torch.tensor([beta], dtype=torch.float64)
    for _ in range(steps):
        h = h.detach().requires_grad_()
        h = h - lr * gradient(mixcon(h, beta_1)[0], h)
    return h.detach()


def squared_gaps(h: Tensor) -> Tensor:
    u = h / h.norm(dim=-1, keepdim=True)
    return (u.unsqueeze(-2) - u.unsqueeze(-3)).square().sum(-1)


@pytest.mark.parametrize("beta", [0.25, 1e-2, 1e-4])
def test_with_beta_the_minimum_is_where_every_dist_is_its_root(beta: float) -> None:
    h = descended(normal(1, 2, 3, 8, seed=1), beta, lr=0.5, steps=2000)
    gaps = squared_gaps(h)[0][:, *torch.triu_indices(3, 3, 1)]
    torch.testing.assert_close(gaps, torch.full_like(gaps, math.sqrt(beta)), rtol=1e-3, atol=0)
    loss = mixcon(h, torch.tensor([beta], dtype=torch.float64))
    assert float(loss) == pytest.approx(2 * math.sqrt(beta), rel=1e-6)


def test_without_beta_the_minimum_is_collapse() -> None:
    start = normal(1, 2, 3, 8, seed=1)
    h = descended(start, 0.0, lr=1.0, steps=500)
    assert float(squared_gaps(start).max()) > 1
    assert float(squared_gaps(h).max()) < 2e-8  # and no further: below eps nothing pulls
    assert float(mixcon(h, BETA[:1])) <= 2e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_identical_features_cost_the_cut_off_and_do_not_move(dtype: torch.dtype) -> None:
    h = normal(1, 1, 1, M).to(dtype).expand(1, P, K, M).clone().requires_grad_()
    loss = mixcon(h, torch.tensor([1e-4], dtype=dtype), eps=1e-6)
    assert float(loss.detach()) == pytest.approx(1e-6 + 1e-4 / 1e-6, rel=1e-6)
    assert not gradient(loss[0], h).any()


@pytest.mark.parametrize("gap", [1e-1, 1e-2, 1e-3, 1.1e-4])
def test_float32_is_accurate_where_features_almost_agree(gap: float) -> None:
    """What is left to rounding is the features' own; inner products in float32 have 1e-7 / dist."""
    base = torch.nn.functional.normalize(normal(1, 50, 1, 400, seed=3), dim=-1)
    h = (7 * (base + gap / 20 * normal(1, 50, 10, 400, seed=4))).float().requires_grad_()
    exact = h.detach().double().requires_grad_()
    beta = 1e-4
    found = mixcon(h, torch.tensor([beta]))
    u = exact / exact.norm(dim=-1, keepdim=True)
    first, second = torch.triu_indices(10, 10, 1)
    dist = (u[..., first, :] - u[..., second, :]).square().sum(-1).clamp(1e-8, 1e8)
    wanted = (dist + beta / dist).mean()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=3e-7)
    ours, theirs = gradient(found[0], h).double(), gradient(wanted, exact)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_features_of_norm_0_stay_there_and_nothing_is_nan(dtype: torch.dtype) -> None:
    h = normal(2, 3, 4, M).to(dtype)
    h[0, 0, :2] = 0
    h[1] = 0
    h.requires_grad_()
    beta = torch.tensor([0.1, 0.1], dtype=dtype)
    for loss in (mixcon(h, beta, eps=1e-3), unicon(h)):
        assert bool(loss.isfinite().all())
        assert bool(gradient(loss.sum(), h).isfinite().all())
    one = torch.zeros(1, 1, 2, 3, dtype=dtype)
    one[0, 0, 0, 1] = 5
    assert float(mixcon(one, beta[:1])) == pytest.approx(1 + 0.1, rel=1e-6)
    written = literal_mixcon(h[0].detach().double(), 0.1, normalise=True, eps=1e-3)
    assert float(mixcon(h.detach(), beta, eps=1e-3)[0]) == pytest.approx(float(written), rel=1e-6)


def test_a_diverged_network_is_nan_and_its_neighbours_are_not() -> None:
    h = normal(3, P, K, M)
    h[1, 0, 0, 0] = math.nan
    for loss in (mixcon(h, BETA), unicon(h), separability(h.flatten(1, 2)).mean,
                 separability(h.flatten(1, 2)).minimum):  # fmt: skip
        assert loss.isnan().tolist() == [False, True, False]


def test_batches_that_have_no_pairs_are_refused_with_the_fix() -> None:
    refuses(r"1 classes have no pairs.*at least 2", mixcon, normal(R, P, 1, M), BETA)
    refuses(r"p=0 images of each class.*larger batches", mixcon, normal(R, 0, K, M), BETA)
    refuses(r"p=1 images of each class.*at least 2", unicon, normal(R, 1, K, M))
    unicon(normal(R, 2, 1, M))
    refuses(r"1 images have no pairs", separability, normal(R, 1, M))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("block", [3, 7, 1024])
def test_separability_is_over_all_pairs(
    normalise: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", block)
    h = normal(R, 17, M)
    u = h / h.norm(dim=-1, keepdim=True) if normalise else h
    pairs = torch.cdist(u, u, compute_mode="donot_use_mm_for_euclid_dist")
    pairs = pairs[:, *torch.triu_indices(17, 17, 1)]
    found = separability(h.requires_grad_(), normalise=normalise)
    torch.testing.assert_close(found.mean, pairs.mean(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.minimum, pairs.amin(1), rtol=1e-12, atol=0)
    assert not found.mean.requires_grad


def test_equal_features_are_at_0_and_near_ones_where_they_are() -> None:
    h = normal(2, 9, 300).float()
    h[0, 7] = h[0, 2]
    h[1, 4] = h[1, 5]
    h[1, 4, 0] += 1e-4
    found = separability(h + 1000, normalise=False)
    assert float(found.minimum[0]) == 0
    moved = (h + 1000).double()
    assert float(found.minimum[1]) == float((moved[1, 4] - moved[1, 5]).norm()) > 0

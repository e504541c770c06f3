"""Generic inpainting: DDNM on Gaussians whose conditional means are known, and biharmonic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from skimage.restoration import inpaint_biharmonic
from torch import Tensor

from recon_core.restore import EDM
from recon_core.restore.inpaint import DDNM, biharmonic, unconditional

SHAPE = (3, 2, 2)
N_PIXELS = math.prod(SHAPE)
MU = 0.1  # the prior's mean and standard deviation, of images in [-1, 1]
STD = 0.15

Denoiser = Callable[[Tensor, float], Tensor]


def generators(n: int, *, first: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(first, first + n)]


def covariance() -> Tensor:
    """Pixels that are the more correlated the nearer they are in memory."""
    place = torch.arange(N_PIXELS, dtype=torch.float64)
    return STD**2 * 0.8 ** (place[:, None] - place[None]).abs()


def gaussian(C: Tensor) -> Denoiser:
    """D(x; sigma) = mu + C (C + sigma^2 I)^-1 (x - mu)."""

    def denoise(x: Tensor, sigma: float) -> Tensor:
        gain = torch.linalg.solve(C + sigma**2 * torch.eye(len(C)).double(), C)
        return (MU + (x.flatten(1) - MU) @ gain).view_as(x)

    return denoise


def pixels(seed: int, n: int = 1) -> Tensor:
    """Images in [0, 1] that the prior could have made."""
    root = torch.linalg.cholesky(covariance())
    normal = torch.randn(n, N_PIXELS, generator=generators(1, first=seed)[0]).double()
    return ((MU + normal @ root.T + 1) / 2).view(n, *SHAPE)


def half(n: int = 1) -> Tensor:
    """Every other pixel is known."""
    return (torch.arange(N_PIXELS) % 2 == 0).view(1, *SHAPE).expand(n, *SHAPE)


def conditional_mean(y: Tensor, mask: Tensor, *, variance: float = 0.0) -> Tensor:
    """E[x | known pixels of y, which have noise of `variance`], all of images in [-1, 1]."""
    C, known = covariance(), mask.flatten()
    S = C[known][:, known] + variance * torch.eye(int(known.sum())).double()
    given = 2 * y.flatten()[known] - 1 - MU
    return (MU + C[:, known] @ torch.linalg.solve(S, given)).view_as(y)


def test_known_pixels_come_back_exactly_and_nothing_leaves_the_range() -> None:
    n = 4
    y, mask = pixels(1, n).float(), half(n)
    y[0, 0, 0, 0], y[1, 0, 0, 0] = 0.0, 1.0
    hidden = torch.where(mask, y, torch.nan)  # not even looked at
    x = DDNM(n_steps=10).inpaint(gaussian(100 * covariance()), hidden, mask,
                                 generators=generators(n))  # fmt: skip
    assert x.dtype == torch.float32
    assert torch.equal(x[mask], y[mask])
    assert ((x >= 0) & (x <= 1)).all()
    assert not torch.equal(x[~mask], y[~mask])


def mean_of_samples(method: DDNM, y: Tensor, mask: Tensor, *, sigma: float = 0.0) -> Tensor:
    """Mean of 4000 samples, of images in [-1, 1]; its standard error is STD / 63 at most."""
    n = 4000
    x = method.inpaint(
        gaussian(covariance()),
        y.expand(n, *SHAPE),
        mask.expand(n, *SHAPE),
        generators=generators(n),
        sigma=sigma,
        batch_size=n,
    )
    return 2 * x.mean(0, keepdim=True) - 1


def test_time_travel_brings_the_mean_to_that_of_what_is_unknown_given_what_is_known() -> None:
    """Of the way from the prior's mean to the conditional one, DDNM alone leaves out a part,
    whatever the number of steps: at level t it denoises the unknown pixels beside known ones that
    have noise of level t, and when that is gone they hardly move any more. Going back to a level
    gives them the time; then what is left is the sampling error of 4000 draws, about .02 of it."""
    y, mask = pixels(3), half()
    exact = conditional_mean(y, mask)
    way = (exact - MU)[~mask].norm()
    methods = {
        "plain": DDNM(n_steps=30, sigma_max=5.0),
        "fine": DDNM(n_steps=90, sigma_max=5.0),
        "travel": DDNM(n_steps=30, sigma_max=5.0, travel_length=6, travel_repeat=8),
    }
    missed = {
        name: float((mean_of_samples(method, y, mask) - exact)[~mask].norm() / way)
        for name, method in methods.items()
    }
    print(missed)
    assert missed["plain"] < 0.5
    assert missed["fine"] > 0.5 * missed["plain"]
    assert missed["travel"] < 0.1

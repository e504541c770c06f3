"""Restorers that learn nothing from pairs: DDNM, biharmonic and classical denoisers."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from skimage.restoration import inpaint_biharmonic
from torch import Tensor, nn

from recon_core.restore import EDM
from recon_core.restore.generic import Classical, estimate_noise
from recon_core.restore.inpaint import DDNM, ancestral_step, biharmonic, unconditional
from tests.recon_core.drawing import refuses

MU, STD = 0.1, 0.15  # of every pixel, in images in [-1, 1]
PLACE = torch.arange(12, dtype=torch.float64)
C = STD**2 * 0.8 ** (PLACE[:, None] - PLACE[None]).abs()
KNOWN = PLACE % 2 == 0
QUICK = DDNM(n_steps=10, sigma_max=5.0)

Denoiser = Callable[[Tensor, float], Tensor]


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def rows_of(x: Tensor) -> Tensor:
    """(b, 3, h, 4) as (b h, 12)."""
    return x.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)


def images_of(rows: Tensor, n: int = 1) -> Tensor:
    """(n h, 12) as (n, 3, h, 4)."""
    return rows.view(n, -1, 3, 4).permute(0, 2, 1, 3).contiguous()


def gaussian(x: Tensor, sigma: float) -> Tensor:
    """D(x; sigma) = mu + C (C + sigma^2 I)^-1 (x - mu)."""
    gain = torch.linalg.solve(C + sigma**2 * torch.eye(12).double(), C)
    return images_of(MU + (rows_of(x).double() - MU) @ gain, len(x)).to(x.dtype)


def pictures(n_rows: int, n: int = 1, *, seed: int = 0) -> Tensor:
    """n images in [0, 1] that the prior could have made."""
    normal = torch.randn(n * n_rows, 12, generator=generators(seed)[0], dtype=torch.float64)
    values = MU + normal @ torch.linalg.cholesky(C).T
    return images_of((values + 1) / 2, n)


def mask_of(y: Tensor) -> Tensor:
    return images_of(KNOWN.expand(len(rows_of(y)), 12), len(y))


def conditional_mean(row: Tensor) -> Tensor:
    """E[unknown pixels | known pixels of `row`], of images in [-1, 1]."""
    gain = torch.linalg.solve(C[KNOWN][:, KNOWN], C[KNOWN][:, ~KNOWN])
    return MU + (row[KNOWN] - MU) @ gain


def test_known_pixels_come_back_exactly_and_the_unknown_ones_of_y_are_not_looked_at() -> None:
    y = pictures(5, 4).float()
    y[0, 0, 0, 0], y[1, 0, 0, 0] = 0.0, 1.0
    mask = mask_of(y)
    hidden = torch.where(mask, y, torch.nan)
    x = replace(QUICK, n_samples=3).inpaint(
        gaussian, hidden, mask, generators=generators(*range(4))
    )
    assert x.dtype == torch.float32
    assert torch.equal(x[mask], y[mask])
    assert ((x >= 0) & (x <= 1)).all()


def missed(method: DDNM) -> float:
    """How far from E[x_u | x_k] the mean of 5000 samples is, in units of E[x_u | x_k] - mu."""
    row = 2 * rows_of(pictures(1, seed=3))[0] - 1
    y = images_of(((row + 1) / 2).expand(5000, 12))
    x = method.inpaint(gaussian, y, mask_of(y), generators=generators(0))
    mean = (2 * rows_of(x) - 1).mean(0)[~KNOWN]
    exact = conditional_mean(row)
    return float((mean - exact).norm() / (exact - MU).norm())


def test_ddnm_comes_near_the_conditional_mean_and_time_travel_closer() -> None:
    """DDNM leaves out a part of the way from the prior's mean to the conditional one, however many
    its steps: at level t it denoises the unknown pixels beside known ones that have noise of level
    t, and when that has gone they hardly move any more. Here a linear recursion gives .394 for 30
    steps, .362 for 90, .350 for 400. Each repetition of a step takes them further: .074 is left
    with 8. The means of 5000 samples have an error of .02."""
    plain, fine = (DDNM(n_steps=n, sigma_max=5.0) for n in (30, 90))
    assert missed(plain) == pytest.approx(0.394, abs=0.04)
    assert missed(fine) == pytest.approx(0.362, abs=0.04)
    assert missed(replace(plain, travel_repeat=8)) == pytest.approx(0.074, abs=0.04)


def test_time_travel_goes_through_every_step_as_often_as_it_says() -> None:
    asked: list[float] = []

    def denoiser(x: Tensor, sigma: float) -> Tensor:
        asked.append(sigma)
        return gaussian(x, sigma)

    method = DDNM(n_steps=3, sigma_max=5.0, travel_repeat=3)
    *levels, zero = method.noise_levels()
    y = pictures(1000)
    nothing = torch.zeros_like(mask_of(y))
    done: list[float] = []
    method.inpaint(denoiser, y, nothing, generators=generators(0), progress=done.append)
    assert asked == [level for level in levels for _ in range(3)]
    assert zero == 0.0
    assert done == pytest.approx([1 / 3, 2 / 3, 1.0])
    fine = replace(method, n_steps=60)
    x = fine.inpaint(gaussian, y, nothing, generators=generators(0))
    assert (2 * x - 1).std().item() == pytest.approx(STD, rel=0.1)


def test_with_nothing_known_it_samples_the_prior_and_with_everything_known_it_copies() -> None:
    y = pictures(2000)
    nothing, everything = torch.zeros_like(mask_of(y)), torch.ones_like(mask_of(y))
    method = DDNM(n_steps=100, sigma_max=5.0)
    samples = 2 * rows_of(method.inpaint(gaussian, y, nothing, generators=generators(1))) - 1
    assert samples.mean().item() == pytest.approx(MU, abs=0.01)
    assert (samples.T.cov() - C).abs().max().item() < 0.15 * STD**2
    assert torch.equal(QUICK.inpaint(gaussian, y, everything, generators=generators(1)), y)


def test_an_image_does_not_depend_on_its_batch() -> None:
    y = pictures(6, 5)
    mask = torch.rand(y.shape, generator=generators(4)[0]) < 0.4
    method = replace(QUICK, n_samples=2, travel_repeat=2)

    def inpaint(rows: slice, **how: int) -> Tensor:
        seeds = range(5)[rows]
        return method.inpaint(gaussian, y[rows], mask[rows], generators=generators(*seeds), **how)

    whole = inpaint(slice(0, 5))
    assert torch.allclose(inpaint(slice(0, 5), batch_size=2), whole, atol=1e-12)
    for k in range(5):
        assert torch.allclose(inpaint(slice(k, k + 1)), whole[k : k + 1], atol=1e-12)
    assert not torch.allclose(inpaint(slice(0, 1)), inpaint(slice(1, 2)), atol=1e-3)


@pytest.mark.parametrize("s", [1.0, 0.4, 0.1, 0.01])
def test_a_step_ends_at_its_noise_level_whatever_the_noise_of_y(s: float) -> None:
    t, sigma_y = 1.5, 0.3
    source = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(1, 1, 400, 500, generator=source, dtype=torch.float64)

    x0 = torch.full((1, 1, 400, 500), 0.2, dtype=torch.float64)
    mask = torch.zeros_like(x0, dtype=torch.bool)
    mask[..., 250:] = True
    stepped = ancestral_step(
        x0, x0 + t * draw(), x0 + sigma_y * draw(), mask, t=t, s=s, sigma_y=sigma_y, draw=draw
    )
    stepped -= x0
    for part in stepped.split(250, dim=-1):
        assert part.mean().item() == pytest.approx(0, abs=0.02 * s)
        assert part.std().item() == pytest.approx(s, rel=0.01)


def test_a_step_trusts_y_as_much_as_its_noise_allows() -> None:
    t, s, sigma_y = 1.5, 0.1, 0.3
    wrong, y = torch.zeros(1, 1, 1, 1).double(), torch.ones(1, 1, 1, 1).double()
    mask = torch.ones_like(y, dtype=torch.bool)
    a = 1 - s**2 / t**2

    def mean(sigma_y: float) -> float:
        zero = torch.zeros_like(y)
        return ancestral_step(
            wrong, wrong, y, mask, t=t, s=s, sigma_y=sigma_y, draw=lambda: zero
        ).item()

    assert mean(0.0) == pytest.approx(a)
    assert mean(s) == pytest.approx(a)
    assert mean(sigma_y) == pytest.approx(a * s / (math.sqrt(a) * sigma_y))


def test_noise_in_y_is_not_overfitted() -> None:
    """The error of the known pixels lies between that of y, which DDNM gives back if it is told of
    no noise, and the least that is possible, that of their mean given all known ones. DDNM+ does
    not reach the least: below the noise's level it goes on to use y, with ever less weight."""
    sigma = 0.1
    clean = pictures(1000)
    y = clean + sigma * torch.randn(clean.shape, generator=generators(2)[0]).double()
    mask = mask_of(y)
    method = DDNM(n_steps=30, sigma_max=5.0, n_samples=8)

    def error(sigma: float) -> float:
        x = method.inpaint(gaussian, y, mask, generators=generators(0), sigma=sigma)
        return float((x - clean)[mask].square().mean().sqrt())

    Ck, noise = C[KNOWN][:, KNOWN], (2 * sigma) ** 2 * torch.eye(6).double()
    gain = torch.linalg.solve(Ck + noise, Ck)
    least = float((Ck - gain.T @ Ck).diagonal().mean().sqrt()) / 2
    assert error(0.0) == pytest.approx(sigma, rel=0.05)
    assert least < error(sigma) < 0.8 * sigma


def test_a_network_without_a_condition_is_its_denoiser() -> None:
    edm = EDM(size="tiny", resolution=8)
    net = edm.build(seed=0).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generators(0)[0]))
    x = torch.randn(2, 3, 8, 8, generator=generators(1)[0]).double()
    found = unconditional(edm, net)(x, 0.7)
    level = torch.full((2, 1, 1, 1), 0.7)
    wanted = edm.denoise(net, x.float(), level, torch.zeros(2, 3, 8, 8), torch.zeros(2, 9))
    assert found.dtype == x.dtype
    assert torch.equal(found.float(), wanted)
    refuses("target='residual'", unconditional, replace(edm, target="residual"), net)


def test_inputs_that_do_not_fit_are_refused() -> None:
    y = pictures(2, 2)
    refuses("1 generators for 2", QUICK.inpaint, gaussian, y, mask_of(y), generators=generators(0))
    for sigma in (-0.1, math.nan):
        with pytest.raises(ValueError, match=f"sigma={sigma} is no standard deviation"):
            QUICK.inpaint(gaussian, y, mask_of(y), generators=generators(0, 1), sigma=sigma)


def random_holes(n: int) -> tuple[Tensor, Tensor]:
    source = generators(5)[0]
    mask = torch.rand(n, 1, 9, 8, generator=source) < 0.6
    return torch.rand(n, 3, 9, 8, generator=source), mask.expand(n, 3, 9, 8)


def test_biharmonic_is_that_of_scikit_image_within_the_range() -> None:
    y, mask = random_holes(3)
    x = biharmonic(y * mask, mask)
    assert x.dtype == y.dtype
    assert torch.equal(x[mask], y[mask])
    for k in range(3):
        picture, erased = y[k].double().numpy(), ~mask[k, 0].numpy()
        wanted = inpaint_biharmonic(picture.transpose(1, 2, 0), erased, channel_axis=-1)
        assert np.allclose(x[k].numpy(), wanted.transpose(2, 0, 1).clip(0, 1), atol=1e-6)
    noisy = biharmonic(3 * y - 1, mask)
    assert ((noisy >= 0) & (noisy <= 1)).all()


def test_biharmonic_with_nothing_known_or_everything() -> None:
    y, mask = random_holes(2)
    mask = torch.stack([torch.zeros_like(mask[0]), torch.ones_like(mask[1])])
    x = biharmonic(y, mask)
    assert (x[0] == 0.5).all()
    assert torch.equal(x[1], y[1])
    mask[1, 0, 0, 0] = False
    refuses("channels of an image have different masks", biharmonic, y, mask)


needs_wavelets = pytest.mark.skipif(
    importlib.util.find_spec("pywt") is None,
    reason="PyWavelets is not installed; pip install PyWavelets",
)
NOISE = 0.1
KINDS = [pytest.param("nlm"), pytest.param("tv"), pytest.param("wavelet", marks=needs_wavelets)]


def smooth(n: int = 1, size: int = 24) -> Tensor:
    """`n` pictures without edges, each channel different."""
    y, x = np.mgrid[0:size, 0:size] / (size - 1)
    channels = [0.3 + 0.4 * x, 0.3 + 0.4 * y, 0.5 + 0.3 * np.sin(3 * x) * np.cos(3 * y)]
    return torch.tensor(np.stack([channels] * n), dtype=torch.float32)


def noisy(pictures: Tensor, sigma: float = NOISE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (pictures + sigma * torch.randn(pictures.shape, generator=generator)).clamp(0, 1)


def denoised(restorer: Classical, pictures: Tensor) -> Tensor:
    seeds, told = torch.zeros(len(pictures), dtype=torch.int64), list[float]()
    samples = restorer.restore(
        nn.Identity(), pictures, n_samples=7, seeds=seeds, progress=told.append
    )
    assert samples.shape == (1, *pictures.shape)
    assert told == pytest.approx([(k + 1) / len(pictures) for k in range(len(pictures))])
    return samples[0]


def error(a: Tensor, b: Tensor) -> float:
    return (a - b).square().mean().sqrt().item()


@pytest.mark.parametrize("kind", KINDS)
def test_noise_on_a_smooth_picture_is_reduced_in_every_channel(kind: str) -> None:
    clean = smooth()[..., 2:]  # they need not be square
    given = noisy(clean)
    result = denoised(Classical(kind=kind, sigma=NOISE), given)
    for channel in range(3):
        before = error(given[:, channel], clean[:, channel])
        assert error(result[:, channel], clean[:, channel]) < 0.6 * before
    assert 0 <= result.min() <= result.max() <= 1


@needs_wavelets
@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_is_estimated_per_picture(kind: str) -> None:
    clean = smooth(2)
    given = torch.cat([noisy(clean[:1], 0.02), noisy(clean[1:], 0.15)])
    result = denoised(Classical(kind=kind), given)
    for row in range(2):
        assert error(result[row], clean[row]) < 0.7 * error(given[row], clean[row])
        alone = denoised(Classical(kind=kind), given[row : row + 1])
        assert torch.equal(alone[0], result[row])


@needs_wavelets
@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_the_estimate_is_the_noise_that_was_added(sigma: float) -> None:
    given = 0.5 + 0 * smooth(1, 48)
    estimate = estimate_noise(noisy(given, sigma)[0].double().numpy().transpose(1, 2, 0))
    assert estimate == pytest.approx(sigma, rel=0.15)


@needs_wavelets
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_without_noise_is_given_back_as_it_is(kind: str) -> None:
    flat = torch.tensor([0.2, 0.5, 0.9])[:, None, None].expand(3, 16, 16)
    stripes = (torch.arange(16) % 4 / 4).expand(3, 16, 16)
    given = torch.stack([flat, stripes, torch.zeros(3, 16, 16)])
    assert torch.equal(denoised(Classical(kind=kind), given), given)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flat_picture_stays_flat_however_strong_the_noise_is_said_to_be(kind: str) -> None:
    flat = torch.tensor([0.2, 0.5, 0.9])[:, None, None].expand(1, 3, 16, 16).contiguous()
    result = denoised(Classical(kind=kind, sigma=0.3), flat)
    torch.testing.assert_close(result, flat, atol=1e-5, rtol=0)


def test_a_missing_package_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install PyWavelets"):
        denoised(Classical(kind="nlm"), smooth())

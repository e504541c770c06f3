"""What theory says of EDM: preconditioning, distributions sampling ends in, what training finds.

Data are one- or few-dimensional Gaussians and mixtures, whose denoisers are known in closed form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from recon_core.restore import CPU_TRAININGS
from recon_core.restore.edm import EDM, Constraint, Denoiser, heun
from recon_core.restore.examples import Examples
from recon_core.restore.fit import Fit
from recon_core.restore.inpaint import ancestral_step
from recon_core.restore.unet import UNET_SIZES, UNetSize
from tests.recon_core.drawing import generator, normal, refuses

SIGMA_DATA = EDM().sigma_data


@dataclass(frozen=True)
class Mixture:
    """sum_k weight_k N(mean_k, std_k^2) in one dimension."""

    weights: tuple[float, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]

    def denoiser(self, x: Tensor, sigma: float) -> Tensor:
        """E[y | y + sigma n = x]: the modes' posterior means, weighted by their evidence."""
        weights, means, stds = (
            torch.tensor(values, dtype=torch.float64)[:, None]
            for values in (self.weights, self.means, self.stds)
        )
        var = stds**2 + sigma**2
        posterior = torch.softmax(weights.log() - (x - means) ** 2 / (2 * var) - var.log() / 2, 0)
        return (posterior * (means + stds**2 / var * (x - means))).sum(0)

    def cdf(self, x: Tensor) -> Tensor:
        modes = zip(self.weights, self.means, self.stds, strict=True)
        return sum(w * torch.special.ndtr((x - m) / s) for w, m, s in modes)


def normal_quantiles(n: int) -> Tensor:
    """n standard normal numbers without any noise of sampling."""
    return torch.special.ndtri((torch.arange(n, dtype=torch.float64) + 0.5) / n)


def levels(n_steps: int) -> list[float]:
    return EDM(n_steps=n_steps).noise_levels().tolist()


@pytest.mark.parametrize(("mu", "std"), [(0.3, 0.2), (-0.8, 0.5), (0.0, 0.05)])
def test_sampling_with_the_exact_denoiser_of_a_gaussian_ends_in_it(mu: float, std: float) -> None:
    gaussian = Mixture((1.0,), (mu,), (std,))
    samples = heun(gaussian.denoiser, normal_quantiles(2001), levels(256))
    # Started from N(0, 80^2) where N(mu, std^2 + 80^2) were right, the ODE ends this far off.
    shrunk = std / math.hypot(std, 80)
    assert samples.mean().item() == pytest.approx(mu * (1 - shrunk), abs=1e-4)
    assert samples.std().item() == pytest.approx(80 * shrunk, rel=0.01)
    standardised = (samples - samples.mean()) / samples.std()
    assert standardised.pow(3).mean().item() == pytest.approx(0.0, abs=0.01)
    assert standardised.pow(4).mean().item() == pytest.approx(3.0, abs=0.05)


def test_sampling_with_the_exact_denoiser_of_a_mixture_ends_in_it() -> None:
    mixture = Mixture((0.3, 0.7), (-0.6, 0.5), (0.1, 0.2))
    samples = heun(mixture.denoiser, normal_quantiles(4001), levels(256))
    assert samples.mean().item() == pytest.approx(0.3 * -0.6 + 0.7 * 0.5, abs=0.01)
    second = 0.3 * (0.36 + 0.01) + 0.7 * (0.25 + 0.04)
    assert samples.square().mean().item() == pytest.approx(second, rel=0.02)
    left = samples[samples < -0.25]
    assert len(left) / len(samples) == pytest.approx(0.3, abs=0.005)
    assert left.mean().item() == pytest.approx(-0.6, abs=0.01)
    assert left.std().item() == pytest.approx(0.1, rel=0.05)
    # Kolmogorov and Smirnov's distance, of which these samples have no noise of their own.
    ranks = (torch.arange(len(samples), dtype=torch.float64) + 0.5) / len(samples)
    assert (mixture.cdf(samples.sort().values) - ranks).abs().max() < 0.006


def without_correction(denoise: Denoiser) -> Denoiser:
    """Makes `heun` take Euler's steps: its second slope of a step is the first one again."""
    last: list[Tensor] = []

    def answer(x: Tensor, sigma: float) -> Tensor:
        if last:
            return x - sigma * last.pop()
        D_x = denoise(x, sigma)
        last.append((x - D_x) / sigma)
        return D_x

    return answer


@pytest.mark.parametrize(("euler", "order"), [(False, 2), (True, 1)])
def test_halving_the_steps_costs_heun_a_factor_four_and_euler_two(euler: bool, order: int) -> None:
    # To sigma = .1 only: Heun's last step, to 0, is Euler's. A mixture makes the slopes curved.
    mixture = Mixture((0.3, 0.7), (-0.6, 0.5), (0.2, 0.3))
    start = EDM(sigma_max=20.0, sigma_min=0.1)
    noise = normal_quantiles(41)

    def end(n_steps: int, *, euler: bool) -> Tensor:
        sigmas = replace(start, n_steps=n_steps + 1).noise_levels().tolist()[:-1]
        denoiser = without_correction(mixture.denoiser) if euler else mixture.denoiser
        return heun(denoiser, noise, sigmas)

    fine = end(4096, euler=False)
    errors = [(end(n, euler=euler) - fine).norm().item() for n in (64, 128, 256)]
    orders = [math.log2(errors[i] / errors[i + 1]) for i in range(2)]
    assert orders == pytest.approx([order, order], abs=0.15)


N_INSIDE, SHAPE = 4, (3, 2, 2)
D = math.prod(SHAPE)
AXES = torch.linalg.qr(normal(D, D, seed=11)).Q.mT
INSIDE, OUTSIDE = AXES[:N_INSIDE], AXES[N_INSIDE:]
CENTRE = 0.1 * normal(D, seed=12)


def nearest(pictures: Tensor) -> Tensor:
    """Projects pictures in [0, 1] on CENTRE + span(INSIDE), which are in [-1, 1]."""
    x = (2 * pictures - 1).double().flatten(1) - CENTRE
    return (((x @ INSIDE.mT @ INSIDE + CENTRE).unflatten(1, SHAPE) + 1) / 2).to(pictures.dtype)


class Gaussian(nn.Module):
    """N(mean, covariance) of pictures as vectors, and as the optimal F of EDM."""

    def __init__(self, mean: Tensor, covariance: Tensor) -> None:
        super().__init__()
        self.mean, self.covariance = mean, covariance

    def denoiser(self, x: Tensor, sigma: float) -> Tensor:
        given = self.covariance + sigma**2 * torch.eye(D, dtype=torch.float64)
        gain = torch.linalg.solve(given, self.covariance)
        return (self.mean + (x.double().flatten(1) - self.mean) @ gain).view_as(x)

    def forward(self, inputs: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        sigma = (4 * c_noise[0].double()).exp()
        c_skip, c_out, c_in, _ = EDM().preconditioning(sigma)
        x = inputs[:, :3].double() / c_in
        return ((self.denoiser(x, float(sigma)) - c_skip * x) / c_out).float()

    def distance(self, samples: Tensor) -> float:
        """How many standard errors the samples' mean or covariance in INSIDE are off at most."""
        scale = torch.linalg.cholesky(INSIDE @ self.covariance @ INSIDE.mT)
        inside = (samples.double().flatten(1) - self.mean) @ INSIDE.mT
        white = torch.linalg.solve_triangular(scale, inside.mT, upper=False)
        n = len(samples)
        spread = torch.cov(white) - torch.eye(N_INSIDE)
        return max(
            float(white.mean(1).abs().max()) * n**0.5, float(spread.abs().max()) * (n / 2) ** 0.5
        )


def gaussian(*, inside: float = 0.2, outside: float = 0.2) -> Gaussian:
    """One whose parts inside and outside know nothing of each other, not centred on the plane."""
    mixed = inside * torch.tril(normal(N_INSIDE, N_INSIDE, seed=13) / 2 + torch.eye(N_INSIDE))
    covariance = INSIDE.mT @ mixed @ mixed.mT @ INSIDE + outside**2 * OUTSIDE.mT @ OUTSIDE
    return Gaussian(CENTRE + 0.2 * normal(D, seed=14), covariance)


def ancestral(denoise: Denoiser, noise: Tensor, sigmas: list[float]) -> Tensor:
    """What a sampler that adds noise at every step ends in."""
    x, draw, nothing = sigmas[0] * noise, generator(5), torch.zeros_like(noise, dtype=torch.bool)

    def drawn() -> Tensor:
        return torch.randn(x.shape, generator=draw, dtype=x.dtype)

    for t, s in itertools.pairwise(sigmas):
        x = ancestral_step(denoise(x, t), x, x, nothing, t=t, s=s, sigma_y=0.0, draw=drawn)
    return x


@pytest.mark.parametrize(("sampler", "n_steps"), [(heun, 64), (ancestral, 400)])
@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_kept_to_a_plane_a_gaussian_is_sampled_conditioned_on_it(
    sampler: Callable[[Denoiser, Tensor, list[float]], Tensor], n_steps: int, tolerance: float
) -> None:
    data, n = gaussian(outside=1.0), 4000
    kept = Constraint(nearest=nearest, tolerance=tolerance).on(data.denoiser)
    samples = sampler(kept, normal(n, *SHAPE, seed=15), levels(n_steps))
    assert data.distance(samples) < 4.5
    outside = (samples.flatten(1) - CENTRE) @ OUTSIDE.mT
    if tolerance == 0:
        assert float(outside.abs().max()) < 1e-6
        return
    variance = (2 * tolerance) ** 2  # in [-1, 1]; that of p(x0 | 0 = its outside + noise)
    expected = (data.mean - CENTRE) @ OUTSIDE.mT * variance / (1 + variance)
    assert torch.allclose(outside.mean(0), expected, atol=4.5 * (variance / n) ** 0.5)
    assert outside.var(0).mean().item() == pytest.approx(variance / (1 + variance), rel=0.06)


@pytest.mark.parametrize("target", ["image", "residual"])
def test_a_restorer_is_kept_to_the_plane_whatever_it_diffuses(
    target: Literal["image", "residual"],
) -> None:
    data, n = gaussian(inside=0.1), 1500
    condition = (CENTRE.view(SHAPE).float() + 1.3) / 2
    known = 2 * condition.flatten().double() - 1
    less = Gaussian(data.mean - known, data.covariance)
    net = data if target == "image" else less
    samples = EDM(target=target, n_steps=64).restore(
        net,
        condition.expand(n, -1, -1, -1),
        n_samples=2,
        seeds=torch.arange(n),
        constraint=Constraint(nearest=nearest),
    )
    drawn = samples.flatten(0, 1)
    assert samples.dtype == torch.float32
    assert torch.allclose(drawn, nearest(drawn), atol=1e-6)
    assert data.distance(2 * drawn - 1) < 4.5


def test_what_is_correlated_with_the_outside_is_nearer_than_if_projected_at_the_end() -> None:
    """Not exact: Heun's flow has fixed what is inside before noise shows what is outside."""
    mixed = 0.1 * (normal(D, D, seed=16) / 2 + torch.eye(D))
    data = Gaussian(CENTRE + 0.2 * normal(D, seed=14), mixed @ mixed.mT)
    across = INSIDE @ data.covariance @ OUTSIDE.mT
    gain = torch.linalg.solve(OUTSIDE @ data.covariance @ OUTSIDE.mT, across.mT)
    exact = INSIDE @ (data.mean - CENTRE) - (data.mean - CENTRE) @ OUTSIDE.mT @ gain
    kept = Constraint(nearest=nearest).on(data.denoiser)
    errors = [
        (((sampled.flatten(1) - CENTRE) @ INSIDE.mT).mean(0) - exact).norm().item()
        for sampled in (
            heun(denoise, normal(4000, *SHAPE, seed=15), levels(64))
            for denoise in (kept, data.denoiser)
        )
    ]
    assert 0.3 < errors[0] / errors[1] < 0.8


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, math.inf])
def test_a_tolerance_is_a_standard_deviation(tolerance: float) -> None:
    refuses(f"tolerance={tolerance} is no", Constraint, nearest=nearest, tolerance=tolerance)


MU, STD = 0.3, 0.2


def gaussian_examples(n: int, *, seed: int = 1, side: int = 8) -> Examples:
    y = MU + STD * torch.randn(n, 3, side, side, generator=generator(seed))
    return Examples(condition=torch.zeros_like(y), target=y, augment=torch.zeros(n, 9))


def distance_to_the_exact_denoiser(edm: EDM, net: nn.Module) -> float:
    """weight(sigma) |D(x; sigma) - E[y | x]|^2 per pixel, averaged over training's noise levels:
    by how much the network's loss is above the least one."""
    batch = gaussian_examples(256, seed=999, side=4)
    draw = generator(3)
    sigma = (edm.P_mean + edm.P_std * torch.randn(256, 1, 1, 1, generator=draw)).exp()
    x = batch.target + sigma * torch.randn(batch.target.shape, generator=draw)
    exact = (STD**2 * x + sigma**2 * MU) / (STD**2 + sigma**2)
    weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
    net.eval()
    with torch.no_grad():
        D_x = edm.denoise(net, x, sigma, batch.condition, batch.augment)
    return (weight * (D_x - exact) ** 2).mean().item()


def test_training_finds_the_denoiser_of_a_gaussian(monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = UNetSize(n_channels=32, channel_mult=(1,), n_blocks=1, attention_at=(), dropout=0.0)
    monkeypatch.setitem(UNET_SIZES, "tiny", smallest)
    edm = EDM(size="tiny", resolution=4)
    training = replace(
        CPU_TRAININGS["edm"], n_steps=100, batch_size=64, lr=4e-3, ema_halflife_images=1000
    )
    fit = Fit(edm, training, device="cpu")
    untrained = distance_to_the_exact_denoiser(edm, fit.net)
    for step in range(training.n_steps):
        fit.update(gaussian_examples(64, seed=1000 + step, side=4))
    assert untrained > 0.3  # what F = 0 costs: D is c_skip x there
    assert distance_to_the_exact_denoiser(edm, fit.ema) < 0.06 * untrained


def tiny_network(edm: EDM) -> nn.Module:
    """An untrained F that is not almost zero."""
    net = edm.build(seed=0).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter, generator=generator(parameter.numel()))
    return net


@pytest.mark.parametrize("zeroed", [True, False])
def test_only_the_network_knows_the_condition(zeroed: bool) -> None:
    edm = EDM(size="tiny", resolution=8)
    net = tiny_network(edm)
    if zeroed:
        nn.init.zeros_(net.conv_out.weight)
    draw = generator(4)
    x, condition = (torch.randn(2, 3, 8, 8, generator=draw, requires_grad=True) for _ in range(2))
    labels = torch.randn(2, 9, generator=draw, requires_grad=True)
    sigma = torch.tensor([0.05, 2.0]).view(2, 1, 1, 1)
    D_x = edm.denoise(net, x, sigma, condition, labels)
    by_x, by_condition, by_labels = torch.autograd.grad(D_x.sum(), (x, condition, labels))
    assert bool((by_condition == 0).all()) is zeroed
    assert bool((by_labels == 0).all()) is zeroed
    c_skip = (SIGMA_DATA**2 / (sigma**2 + SIGMA_DATA**2)).expand_as(by_x)
    assert torch.allclose(by_x, c_skip) is zeroed
    if not zeroed:  # what comes through the condition comes with c_out
        c_out = sigma * SIGMA_DATA / (sigma**2 + SIGMA_DATA**2).sqrt()
        inputs = torch.cat([x / (sigma**2 + SIGMA_DATA**2).sqrt(), condition / SIGMA_DATA], 1)
        c_noise = sigma.flatten().log() / 4
        (expected,) = torch.autograd.grad((c_out * net(inputs, c_noise, labels)).sum(), condition)
        assert torch.allclose(by_condition, expected, atol=1e-5)


EDM_PAPER = EDM()


class KnowsTheGaussian(nn.Module):
    """The optimal F for data N(mu, std^2) in every pixel; the condition times `shift` moves mu."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.batch_sizes: list[int] = []
        self.shift = shift

    def forward(self, inputs: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        self.batch_sizes.append(len(inputs))
        sigma = (4 * c_noise.double()).exp()[:, None, None, None]
        c_skip, c_out, c_in, _ = EDM_PAPER.preconditioning(sigma)
        x, mu = inputs[:, :3].double() / c_in, MU + self.shift * SIGMA_DATA * inputs[:, 3:].double()
        D_x = (STD**2 * x + sigma**2 * mu) / (STD**2 + sigma**2)
        return ((D_x - c_skip * x) / c_out).float()


@pytest.mark.parametrize(
    ("target", "shift", "ends"),
    [("image", 1.0, (MU - 0.5, MU + 0.5)), ("residual", 0.0, (MU - 0.5, MU + 0.5))],
)
def test_samples_end_where_the_condition_leads(
    target: Literal["image", "residual"], shift: float, ends: tuple[float, float]
) -> None:
    """Conditions of -.5 and .5 move the mean; a residual is what they lack."""
    condition = torch.cat([torch.full((32, 3, 8, 8), 0.25), torch.full((32, 3, 8, 8), 0.75)])
    edm, seeds = EDM(n_steps=64, target=target), torch.arange(64)
    samples = edm.restore(KnowsTheGaussian(shift), condition, n_samples=4, seeds=seeds)
    for half, end in zip((2 * samples - 1).split(32, dim=1), ends, strict=True):
        assert half.mean().item() == pytest.approx(end, abs=0.02)
        assert half.std().item() == pytest.approx(STD, rel=0.03)


def test_preconditioning_keeps_unit_variance_and_least_amplification() -> None:
    sigma = torch.logspace(-3, 2, 30, dtype=torch.float64)
    c_skip, c_out, c_in, c_noise = EDM_PAPER.preconditioning(sigma)
    variance = EDM_PAPER.sigma_data**2
    # The network's input and its target (y - c_skip (y + n)) / c_out both have variance 1.
    assert torch.allclose(c_in**2 * (variance + sigma**2), torch.ones_like(sigma))
    assert torch.allclose(
        ((1 - c_skip) ** 2 * variance + c_skip**2 * sigma**2) / c_out**2, torch.ones_like(sigma)
    )
    # c_skip minimises c_out: the derivative of what c_out^2 has to be vanishes.
    assert torch.allclose((1 - c_skip) * variance, c_skip * sigma**2)
    assert torch.allclose(c_noise.mul(4).exp(), sigma)


def test_the_analytic_denoiser_reaches_the_bayes_error() -> None:
    # E = E_sigma[ weight(sigma) * sigma^2 std^2 / (sigma^2 + std^2) ] per pixel.
    sigma = (1.2 * torch.randn(200_000, generator=generator(3)).double() - 1.2).exp()
    weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2
    bayes = (weight * sigma**2 * STD**2 / (sigma**2 + STD**2)).mean().item()
    loss = EDM_PAPER.loss(KnowsTheGaussian(), gaussian_examples(2048), generator=generator())
    assert loss.item() / (3 * 8 * 8) == pytest.approx(bayes, rel=0.03)


def test_a_residual_is_diffused_as_an_image_is() -> None:
    residual, n = replace(EDM_PAPER, target="residual"), 6
    condition = torch.randn(n, 3, 8, 8, generator=generator(2))
    batch = Examples(
        condition=condition,
        target=condition + gaussian_examples(n).target,
        augment=torch.zeros(n, 9),
    )
    lacking = replace(batch, target=batch.target - condition)
    losses = [
        edm.loss(KnowsTheGaussian(), examples, generator=generator())
        for edm, examples in ((residual, batch), (EDM_PAPER, lacking), (EDM_PAPER, batch))
    ]
    assert losses[0] == losses[1] < losses[2]


@pytest.mark.parametrize("target", ["image", "residual"])
def test_every_sample_goes_its_share_of_the_way(target: Literal["image", "residual"]) -> None:
    pictures = torch.rand(4, 3, 8, 8, generator=generator())
    whole, part, none = (
        EDM(n_steps=4, target=target, strength=strength).restore(
            KnowsTheGaussian(), pictures, n_samples=2, seeds=torch.arange(4)
        )
        for strength in (1.0, 0.25, 0.0)
    )
    assert torch.allclose(part, 0.75 * pictures + 0.25 * whole, atol=1e-6)
    assert torch.equal(none, pictures.expand(2, -1, -1, -1, -1))


def test_the_last_step_has_no_correction() -> None:
    calls: list[float] = []

    def denoise(x: Tensor, sigma: float) -> Tensor:
        calls.append(sigma)
        return torch.zeros_like(x)

    end = heun(denoise, torch.ones(1, dtype=torch.float64), EDM_PAPER.noise_levels().tolist())
    assert len(calls) == 2 * 18 - 1
    assert min(calls) == pytest.approx(0.002)
    assert end.item() == 0.0  # the final Euler step lands on D exactly


def test_noise_levels_follow_the_schedule() -> None:
    levels = EDM_PAPER.noise_levels()
    assert levels.dtype == torch.float64
    assert len(levels) == 19
    assert levels[0].item() == pytest.approx(80)
    assert levels[17].item() == pytest.approx(0.002)
    assert levels[18].item() == 0
    roots = levels[:18] ** (1 / 7)
    assert torch.allclose(roots.diff(), roots.diff()[0].expand(17))


def test_a_sample_depends_on_its_own_seed_and_picture_only() -> None:
    edm = EDM(size="tiny", n_steps=3, resolution=16)
    net = edm.build(seed=0)
    with torch.no_grad():
        net.conv_out.weight.normal_(0, 0.1, generator=generator())
    pictures = torch.rand(5, 3, 16, 16, generator=generator())
    seeds = torch.tensor([7, 11, 13, 17, 19])
    together = edm.restore(net, pictures, n_samples=2, seeds=seeds)
    again = edm.restore(net, pictures, n_samples=2, seeds=seeds)
    alone = edm.restore(net, pictures[3:4], n_samples=1, seeds=seeds[3:4])
    small = edm.restore(net, pictures, n_samples=2, seeds=seeds, batch_size=3)
    assert torch.equal(together, again)
    assert torch.allclose(together[0, 3], alone[0, 0], atol=1e-4)
    assert torch.allclose(together, small, atol=1e-4)
    assert (together[0] - together[1]).abs().max() > 0.1
    other = edm.restore(net, pictures, n_samples=1, seeds=seeds + 1)
    assert (together[0] - other[0]).abs().max() > 0.1


@pytest.mark.parametrize("target", ["image", "residual"])
def test_without_a_constraint_a_sample_is_heuns_to_the_bit(
    target: Literal["image", "residual"],
) -> None:
    edm = EDM(size="tiny", n_steps=3, resolution=16, target=target)
    pictures, seeds = torch.rand(2, 3, 16, 16, generator=generator()), torch.tensor([7, 11])
    net = edm.build(seed=0)
    with torch.no_grad():
        net.conv_out.weight.normal_(0, 0.1, generator=generator())
    restored = edm.restore(net, pictures, n_samples=1, seeds=seeds)[0]
    given, labels = 2 * pictures - 1, torch.zeros(2, 9)

    @torch.inference_mode()
    def denoise(x: Tensor, sigma: float) -> Tensor:
        level = torch.full((2, 1, 1, 1), sigma)
        return edm.denoise(net, x.float(), level, given, labels).double()

    noise = torch.stack([torch.randn(3, 16, 16, generator=generator(seed)) for seed in (7, 11)])
    drawn = heun(denoise, noise.double(), edm.noise_levels().tolist()).float()
    drawn = drawn + given if target == "residual" else drawn
    assert torch.equal(restored, (drawn + 1) / 2)


def test_restoring_batches_and_reports_progress() -> None:
    net, seen = KnowsTheGaussian(), []
    edm, pictures = EDM(n_steps=2), torch.rand(5, 3, 8, 8, generator=generator())
    edm.restore(
        net, pictures, n_samples=3, seeds=torch.arange(5), progress=seen.append, batch_size=8
    )
    assert net.batch_sizes == [8, 8, 8, 7, 7, 7]
    assert seen == pytest.approx([0.25, 0.5, 0.75, 1.0])
    nothing = edm.restore(net, pictures[:0], n_samples=2, seeds=torch.arange(0))
    assert nothing.shape == (2, 0, 3, 8, 8)

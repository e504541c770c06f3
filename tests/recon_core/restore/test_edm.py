"""EDM: preconditioning identities, the analytic Gaussian, the sampler's order, the condition."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from recon_core.restore.edm import EDM, heun
from recon_core.restore.examples import Examples
from tests.recon_core.drawing import generator

EDM_PAPER = EDM()
MU, STD = 0.3, 0.2  # of the Gaussian whose denoiser is known


class KnowsTheGaussian(nn.Module):
    """The optimal F for data N(mu, std^2) in every pixel; `condition_shift` moves mu by
    that times the condition. `factor` spoils it."""

    def __init__(self, factor: float = 1.0, condition_shift: float = 0.0) -> None:
        super().__init__()
        self.factor, self.condition_shift = factor, condition_shift
        self.batch_sizes: list[int] = []

    def forward(self, inputs: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        self.batch_sizes.append(len(inputs))
        sigma = (4 * c_noise.double()).exp()[:, None, None, None]
        c_skip, c_out, c_in, _ = EDM_PAPER.preconditioning(sigma)
        x, condition = inputs[:, :3].double() / c_in, inputs[:, 3:].double() * 0.5
        mu = MU + self.condition_shift * condition
        D_x = (STD**2 * x + sigma**2 * mu) / (STD**2 + sigma**2)
        return (self.factor * (D_x - c_skip * x) / c_out).float()


def gaussian_examples(n: int) -> Examples:
    return Examples(
        condition=torch.zeros(n, 3, 8, 8),
        target=MU + STD * torch.randn(n, 3, 8, 8, generator=generator(1)),
        augment=torch.zeros(n, 9),
    )


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


def test_the_condition_steers_the_samples() -> None:
    condition = torch.cat([torch.full((8, 3, 8, 8), 0.25), torch.full((8, 3, 8, 8), 0.75)])
    samples = EDM_PAPER.restore(
        KnowsTheGaussian(condition_shift=1.0), condition, n_samples=1, seeds=torch.arange(16)
    )
    dark, light = (2 * samples[0] - 1).flatten(1).mean(1).split(8)
    # Conditions of -.5 and +.5 move mu = .3 to -.2 and +.8.
    assert dark.mean().item() == pytest.approx(-0.2, abs=0.03)
    assert light.mean().item() == pytest.approx(0.8, abs=0.03)


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


def test_restorations_from_residuals_are_the_condition_and_what_it_lacks() -> None:
    condition = torch.cat([torch.full((32, 3, 8, 8), 0.25), torch.full((32, 3, 8, 8), 0.4)])
    edm = EDM(n_steps=64, target="residual")
    samples = edm.restore(KnowsTheGaussian(), condition, n_samples=4, seeds=torch.arange(64))
    lacked = 2 * samples - 1 - (2 * condition - 1)
    for half in lacked.split(32, dim=1):
        assert half.mean().item() == pytest.approx(MU, abs=0.01)
        assert half.std().item() == pytest.approx(STD, rel=0.02)


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

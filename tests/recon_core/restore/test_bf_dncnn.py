"""BF-DnCNN: its size, its homogeneity, its normalisation."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from recon_core.restore.bf_dncnn import BFDnCNN, BFDnCNNNet, BiasFreeBatchNorm, variance
from recon_core.restore.examples import Examples


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_some_statistics(restorer: BFDnCNN) -> torch.nn.Module:
    """A network whose gammas and running statistics are those of no initialisation."""
    net = restorer.build(seed=0)
    random = generator(4)
    with torch.no_grad():
        for norm in net.modules():
            if isinstance(norm, BiasFreeBatchNorm):
                norm.gamma.normal_(generator=random)
                norm.running_var.uniform_(0.2, 3.0, generator=random)
    return net.eval()


def test_the_paper_size_counts_convolutions_and_gammas() -> None:
    net = BFDnCNN().build(seed=0)
    convolutions = sum(p.numel() for p in net.parameters() if p.ndim == 4)
    gammas = sum(p.numel() for p in net.parameters() if p.ndim == 1)
    assert convolutions == 2 * 9 * 3 * 64 + 18 * 9 * 64 * 64 == 667_008
    assert gammas == 18 * 64
    # Those that the published network computes with. Its normalisation layers derive from torch's,
    # whose shifts they register, 18 * 64 more, and never add.
    assert convolutions + gammas == 668_160


def test_the_variance_is_torchs_with_its_gradient() -> None:
    y = torch.randn(3, 2, 4, 5, generator=generator(), dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(variance(y), y.var(dim=(0, 2, 3)))
    assert torch.autograd.gradcheck(variance, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_trains_in_any_precision_and_keeps_statistics_in_its_own(dtype: torch.dtype) -> None:
    norm = BiasFreeBatchNorm(2)
    norm.initialise(generator())
    if dtype is torch.float64:
        norm.double()
    y = (3 * torch.randn(8, 2, 6, 6, generator=generator(1))).to(dtype)
    norm.train()(y)
    expected = 0.9 + 0.1 * y.double().var(dim=(0, 2, 3))
    torch.testing.assert_close(norm.running_var.double(), expected, rtol=1e-5, atol=0)


def test_no_constant_is_added_anywhere() -> None:
    for name, _parameter in BFDnCNN(depth=4).build(seed=0).named_parameters():
        assert "bias" not in name
        assert "beta" not in name


@pytest.mark.parametrize("patch", [1, 2])
@pytest.mark.parametrize("scale", [0.01, 3.0, 100.0])
def test_the_network_is_homogeneous_in_eval_mode(patch: int, scale: float) -> None:
    net = with_some_statistics(BFDnCNN(depth=5, n_channels=8, patch=patch))
    x = torch.randn(2, 3, 16, 16, generator=generator(9))
    with torch.no_grad():
        plain, scaled = net(x), net(scale * x)
    assert torch.allclose(scaled, scale * plain, rtol=1e-4, atol=1e-6 * scale)
    assert (plain - x).std() > 0.1  # it does something


@pytest.mark.parametrize("patch", [1, 2])
def test_the_network_is_its_jacobian_times_its_input(patch: int) -> None:
    """Euler's theorem for degree one: whatever constant was added anywhere would be left over."""
    net = with_some_statistics(BFDnCNN(depth=5, n_channels=8, patch=patch)).double()
    x = torch.randn(1, 3, 6, 6, generator=generator(9), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(net, x).view(108, 108)
    assert isinstance(jacobian, torch.Tensor)
    expected = net(x).detach().flatten()
    assert torch.allclose(jacobian @ x.flatten(), expected, rtol=1e-9, atol=1e-12)
    assert (jacobian - torch.eye(108)).norm() > 1  # it is not x itself


def test_a_saved_and_loaded_network_is_still_homogeneous() -> None:
    restorer = BFDnCNN(depth=4, n_channels=8)
    net = with_some_statistics(restorer)
    saved = safetensors.torch.save({k: v.contiguous() for k, v in net.state_dict().items()})
    loaded = restorer.build(seed=1).eval()
    loaded.load_state_dict(safetensors.torch.load(saved))
    x = torch.randn(2, 3, 16, 16, generator=generator(9))
    with torch.no_grad():
        assert torch.equal(loaded(x), net(x))
        assert torch.allclose(loaded(7 * x), 7 * loaded(x), rtol=1e-4, atol=1e-5)
        assert torch.equal(loaded(torch.zeros_like(x)), torch.zeros_like(x))


def test_normalisation_divides_by_the_unbiased_deviation_and_keeps_the_mean() -> None:
    norm = BiasFreeBatchNorm(2)
    norm.initialise(generator())
    y = 5 + torch.randn(3, 2, 4, 4, generator=generator())
    var = y.transpose(0, 1).flatten(1).var(dim=1, unbiased=True)
    expected = y * (norm.gamma / (var.sqrt() + 1e-5))[:, None, None]
    assert torch.allclose(norm(y), expected)
    assert torch.allclose(norm.running_var, 0.9 + 0.1 * var)
    norm.eval()
    frozen = norm.running_var.clone()
    expected = y * (norm.gamma / (frozen.sqrt() + 1e-5))[:, None, None]
    assert torch.allclose(norm(y), expected)
    assert torch.equal(norm.running_var, frozen)


def test_gammas_start_small_and_of_both_signs() -> None:
    net = BFDnCNN().build(seed=0)
    gammas = torch.cat([p.flatten() for p in net.parameters() if p.ndim == 1])
    assert gammas.abs().max().item() == pytest.approx(0.025)
    assert 0.4 < (gammas > 0).float().mean() < 0.6


def test_the_loss_is_the_mean_squared_error() -> None:
    restorer = BFDnCNN(depth=3, n_channels=8)
    net = restorer.build(seed=0).eval()
    condition = torch.rand(2, 3, 16, 16, generator=generator()) * 2 - 1
    target = torch.rand(2, 3, 16, 16, generator=generator(1)) * 2 - 1
    batch = Examples(condition=condition, target=target, augment=torch.zeros(2, 9))
    loss = restorer.loss(net, batch, generator=generator())
    assert torch.allclose(loss, (net(condition) - target).square().mean())


def test_the_ssim_term_is_zero_for_a_perfect_restoration_only() -> None:
    plain = BFDnCNN(depth=3, n_channels=8)
    with_ssim = BFDnCNN(depth=3, n_channels=8, loss_terms="mse+ssim", ssim_weight=0.5)
    net = plain.build(seed=0).eval()
    condition = torch.rand(2, 3, 16, 16, generator=generator()) * 2 - 1
    restored = net(condition).detach()
    perfect = Examples(condition=condition, target=restored, augment=torch.zeros(2, 9))
    assert with_ssim.loss(net, perfect, generator=generator()).item() == pytest.approx(0, abs=1e-6)
    other = Examples(condition=condition, target=-restored, augment=torch.zeros(2, 9))
    terms = [r.loss(net, other, generator=generator()) for r in (with_ssim, plain)]
    assert terms[0] - terms[1] > 0.1
    terms[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_restoring_gives_one_picture_in_range() -> None:
    restorer = BFDnCNN(depth=4, n_channels=8)
    net = with_some_statistics(restorer)
    pictures = torch.rand(5, 3, 16, 16, generator=generator())
    seen: list[float] = []
    restored = restorer.restore(
        net, pictures, n_samples=20, seeds=torch.arange(5), progress=seen.append, batch_size=2
    )
    assert restored.shape == (1, 5, 3, 16, 16)
    assert restored.min() >= 0
    assert restored.max() <= 1
    assert seen == pytest.approx([0.4, 0.8, 1.0])
    alone = restorer.restore(net, pictures[2:3], n_samples=1, seeds=torch.arange(1))
    assert torch.allclose(alone[0, 0], restored[0, 2], atol=1e-5)


def test_a_network_of_one_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="depth=1 is too small"):
        BFDnCNN(depth=1)


def test_patches_widen_the_receptive_field() -> None:
    def reach(patch: int) -> int:
        net = BFDnCNNNet(depth=3, n_channels=4, patch=patch)
        net.initialise(generator())
        net.eval()
        for parameter in net.parameters():
            parameter.data.abs_()
        x = torch.ones(1, 3, 32, 32, requires_grad=True)
        net(x)[0, 0, 16, 16].backward()
        assert x.grad is not None
        return int((x.grad[0].abs().sum(0) > 0).any(0).sum())

    assert reach(1) == 7
    assert reach(2) == 14

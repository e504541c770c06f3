"""DDPM++, alone as a regression, and BF-DnCNN: sizes, what reaches what, homogeneity."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recon_core.restore.examples import Examples
from recon_core.restore.regression import (
    BFDnCNN,
    BFDnCNNNet,
    BiasFreeBatchNorm,
    RegressionUNet,
    variance,
)
from recon_core.restore.unet import (
    UNET_SIZES,
    SelfAttention,
    UNet,
    UNetSize,
    position_embedding,
)
from tests.recon_core.drawing import generator

SMALLEST = UNetSize(
    n_channels=8, channel_mult=(1, 2), n_blocks=1, attention_at=(8,), dropout=0.0, patch=1
)


def count(size: UNetSize, *, in_channels: int, n_labels: int) -> int:
    with torch.device("meta"):
        net = UNet(size, in_channels=in_channels, out_channels=3, n_labels=n_labels)
    return sum(p.numel() for p in net.parameters())


def built(size: UNetSize, *, seed: int = 0, resolution: int = 16) -> UNet:
    with torch.device("meta"):
        net = UNet(size, in_channels=6, out_channels=3, n_labels=9, resolution=resolution)
    net.to_empty(device="cpu")
    net.initialise(generator(seed))
    return net


@pytest.mark.parametrize(
    ("in_channels", "n_labels", "n"),
    [(3, 9, 55_733_891), (3, 0, 55_732_739), (6, 9, 55_733_891 + 3 * 3 * 3 * 128)],
)
def test_the_paper_size_has_the_published_number_of_parameters(
    in_channels: int, n_labels: int, n: int
) -> None:
    """EDM's unconditional CIFAR-10 network; the nine augmentation labels are part of the count. The
    condition adds three channels to the first convolution."""
    assert count(UNET_SIZES["paper"], in_channels=in_channels, n_labels=n_labels) == n


def test_attention_of_the_paper_size_is_where_edm_has_it() -> None:
    with torch.device("meta"):
        net = UNet(UNET_SIZES["paper"], in_channels=3, out_channels=3, n_labels=0)
    # Four blocks down at 16, one in the middle, the last of five blocks up at 16.
    assert sum(b.attention is not None for b in net.encoder) == 4
    assert [b.attention is not None for b in net.middle] == [True, False]
    assert sum(b.attention is not None for b in net.decoder) == 1
    assert (len(net.encoder), len(net.decoder)) == (14, 17)


def test_attention_is_the_softmax_of_scaled_products() -> None:
    attention = SelfAttention(8)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, generator=generator(parameter.numel()))
    x = torch.randn(2, 8, 3, 5, generator=generator(0))
    qkv = attention.qkv(attention.norm(x)).flatten(2)
    q, k, v = qkv[:, :8], qkv[:, 8:16], qkv[:, 16:]
    weights = torch.softmax(torch.einsum("ncq,nck->nqk", q, k) / math.sqrt(8), dim=2)
    expected = attention.proj(torch.einsum("nqk,nck->ncq", weights, v).view_as(x))
    assert torch.allclose(attention(x), expected, atol=1e-5)


@pytest.mark.parametrize("patch", [1, 2])
def test_an_untrained_network_gives_almost_zero_at_the_shape_of_the_image(patch: int) -> None:
    net = built(replace(SMALLEST, patch=patch))
    x = torch.randn(2, 6, 16, 16, generator=generator(0))
    with torch.no_grad():
        out = net(x, torch.zeros(2), torch.zeros(2, 9))
    assert out.shape == (2, 3, 16, 16)
    assert 0 < out.abs().max() < 1e-3


def test_every_input_and_every_parameter_reaches_the_output() -> None:
    net = built(SMALLEST)
    with torch.no_grad():  # undo the near-zero initialisation, which would hide whole branches
        for parameter in net.parameters():
            if parameter.ndim > 1:
                torch.nn.init.xavier_uniform_(
                    parameter, generator=torch.Generator().manual_seed(len(parameter))
                )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 16, 16, generator=generator).requires_grad_()
    c_noise = torch.randn(3, generator=generator).requires_grad_()
    labels = torch.randn(3, 9, generator=generator).requires_grad_()
    net(x, c_noise, labels).square().sum().backward()
    for tensor in (x, c_noise, labels):
        assert tensor.grad is not None
        per_entry = tensor.grad.abs().amax(dim=tuple(range(2, tensor.ndim)))
        assert (per_entry > 0).all()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_embedding_frequencies_run_from_one_to_one_ten_thousandth() -> None:
    embedding = position_embedding(torch.tensor([0.7]), 6)
    phases = [0.7, 0.7 / 100, 0.7 / 10_000]
    expected = [*(math.sin(p) for p in phases), *(math.cos(p) for p in phases)]
    assert torch.allclose(embedding, torch.tensor([expected]))


def test_a_resolution_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match=r"resolution=30 .* multiple of 4"):
        UNet(UNetSize(), in_channels=3, out_channels=3, n_labels=0, resolution=30)


def test_an_untrained_regression_answers_what_it_is_given() -> None:
    net = RegressionUNet(size="tiny", resolution=16).build(seed=0).eval()
    x = torch.rand(2, 3, 16, 16, generator=generator()) * 2 - 1
    assert (net(x) - x).abs().max() < 1e-3
    with torch.no_grad():
        net.unet.conv_out.weight.normal_(generator=generator(1))
    both, one = net(x), net(x[:1])
    assert torch.allclose(both[:1], one, atol=1e-4)
    assert (both - x).abs().max() > 0.1


def with_some_statistics(restorer: BFDnCNN | RegressionUNet) -> torch.nn.Module:
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


REGRESSIONS = pytest.mark.parametrize(
    "restorer",
    [BFDnCNN(depth=3, n_channels=8), RegressionUNet(size="tiny", resolution=16)],
    ids=lambda restorer: restorer.kind,
)


@REGRESSIONS
def test_the_loss_is_the_mean_squared_error(restorer: BFDnCNN | RegressionUNet) -> None:
    net = restorer.build(seed=0).eval()
    condition = torch.rand(2, 3, 16, 16, generator=generator()) * 2 - 1
    target = torch.rand(2, 3, 16, 16, generator=generator(1)) * 2 - 1
    batch = Examples(condition=condition, target=target, augment=torch.zeros(2, 9))
    loss = restorer.loss(net, batch, generator=generator())
    assert torch.allclose(loss, (net(condition) - target).square().mean())


@REGRESSIONS
def test_the_ssim_term_is_zero_for_a_perfect_restoration_only(
    restorer: BFDnCNN | RegressionUNet,
) -> None:
    plain, with_ssim = restorer, replace(restorer, loss_terms="mse+ssim", ssim_weight=0.5)
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


@REGRESSIONS
def test_restoring_gives_one_picture_in_range(restorer: BFDnCNN | RegressionUNet) -> None:
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


def test_a_mirrored_restoration_is_the_mean_of_both_sides() -> None:
    net = torch.nn.Conv2d(3, 3, 3, padding=1)  # which knows left from right, and is not clipped
    torch.nn.init.uniform_(net.weight, -0.05, 0.05, generator=generator(1))
    pictures = torch.rand(3, 3, 16, 16, generator=generator())

    def restored(x: Tensor, *, mirrored: bool) -> Tensor:
        one = RegressionUNet(mirrored=mirrored, strength=0.5)
        return one.restore(net, x, n_samples=1, seeds=torch.arange(3), batch_size=2)[0]

    plain, other = (restored(x, mirrored=False) for x in (pictures, pictures.flip(-1)))
    assert not torch.allclose(other.flip(-1), plain, atol=0.01)
    both = restored(pictures, mirrored=True)
    torch.testing.assert_close(both, (plain + other.flip(-1)) / 2)
    torch.testing.assert_close(both, restored(pictures.flip(-1), mirrored=True).flip(-1))


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

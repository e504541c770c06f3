"""DDPM++: published parameter counts, what reaches what, and the embedding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from recon_core.restore.unet import (
    UNET_SIZES,
    SelfAttention,
    UNet,
    UNetSize,
    position_embedding,
)

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
    net.initialise(torch.Generator().manual_seed(seed))
    return net


def test_the_paper_size_has_the_published_number_of_parameters() -> None:
    # EDM's unconditional CIFAR-10 network; the nine augmentation labels are part of the count.
    assert count(UNET_SIZES["paper"], in_channels=3, n_labels=9) == 55_733_891


def test_labels_add_one_bias_free_linear_map() -> None:
    paper = UNET_SIZES["paper"]
    without = count(paper, in_channels=3, n_labels=0)
    assert without == 55_732_739
    assert count(paper, in_channels=3, n_labels=9) - without == 9 * 128


def test_the_condition_adds_three_channels_to_the_first_convolution() -> None:
    paper = UNET_SIZES["paper"]
    extra = count(paper, in_channels=6, n_labels=9) - count(paper, in_channels=3, n_labels=9)
    assert extra == 3 * 3 * 3 * 128


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
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.randn(2, 8, 3, 5, generator=torch.Generator().manual_seed(0))
    qkv = attention.qkv(attention.norm(x)).flatten(2)
    q, k, v = qkv[:, :8], qkv[:, 8:16], qkv[:, 16:]
    weights = torch.softmax(torch.einsum("ncq,nck->nqk", q, k) / math.sqrt(8), dim=2)
    expected = attention.proj(torch.einsum("nqk,nck->ncq", weights, v).view_as(x))
    assert torch.allclose(attention(x), expected, atol=1e-5)


@pytest.mark.parametrize("patch", [1, 2])
def test_an_untrained_network_gives_almost_zero_at_the_shape_of_the_image(patch: int) -> None:
    net = built(replace(SMALLEST, patch=patch))
    x = torch.randn(2, 6, 16, 16, generator=torch.Generator().manual_seed(0))
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


def test_the_same_seed_gives_the_same_weights() -> None:
    first, again, other = built(SMALLEST), built(SMALLEST), built(SMALLEST, seed=1)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first.conv_in.weight, other.conv_in.weight)


def test_embedding_frequencies_run_from_one_to_one_ten_thousandth() -> None:
    embedding = position_embedding(torch.tensor([0.7]), 6)
    phases = [0.7, 0.7 / 100, 0.7 / 10_000]
    expected = [*(math.sin(p) for p in phases), *(math.cos(p) for p in phases)]
    assert torch.allclose(embedding, torch.tensor([expected]))


def test_a_resolution_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match=r"resolution=30 .* multiple of 4"):
        UNet(UNetSize(), in_channels=3, out_channels=3, n_labels=0, resolution=30)

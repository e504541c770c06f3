"""Split classifiers: torch's own layers, cuts, shared images, first weights, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recon_core.torchvision_compat import import_torchvision
from recon_core.victims.autoencoder import Weights
from recon_core.victims.split import (
    CutClassifier,
    LeNet5,
    SplitMLP,
    SplitModel,
    SplitNetwork,
    initial_weights,
)
from tests.recon_core.drawing import refuses
from tests.recon_core.victims.torch_nets import leaves_of, torch_split

R, N = 6, 3
LENETS: dict[str, tuple[SplitNetwork, tuple[int, int, int]]] = {
    f"lenet5-{cut}-{c}x{side}": (LeNet5(cut=cut), (c, side, side))
    for cut in (1, 2, 3, 4)
    for c, side in ((1, 28), (3, 32), (3, 17))
}
MLPS: dict[str, tuple[SplitNetwork, tuple[int, int, int]]] = {
    f"mlp-{cut}": (SplitMLP(widths=(30, 2, 7, 5), cut=cut, init="torch"), (1, 1, 10))
    for cut in (1, 2, 3, 4)
}
NETWORKS = LENETS | MLPS | {"mlp-images": (SplitMLP(widths=(9, 8), init="torch"), (3, 4, 5))}


def stack(model: SplitModel, dtype: torch.dtype = torch.float64, n: int = R) -> Weights:
    """Initial weights; those of narrow layers are such that some units are not dead."""
    generators = [torch.Generator().manual_seed(i) for i in range(n)]
    return initial_weights(model, generators, dtype=dtype)


def images(shape: tuple[int, int, int], q: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(q, N, *shape, generator=generator, dtype=torch.float64)


def both(
    model: SplitModel, weights: Weights, x: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """Features, logits, and the gradients of a sum of both in the weights and the images."""
    leaves = {name: t.clone().requires_grad_() for name, t in weights.items()}
    x = x.clone().requires_grad_()
    h = model.features(leaves, x)
    logits = model.classify(leaves, h)
    total = (logits * torch.arange(1, 1 + logits.shape[2]).to(x)).sum() + h.square().sum()
    *gradients, in_x = torch.autograd.grad(total, [*leaves.values(), x])
    return h.detach(), logits.detach(), dict(zip(leaves, gradients, strict=True)), in_x


@pytest.mark.parametrize("q", [1, R])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_that_of_torchs_layers(name: str, dtype: torch.dtype, q: int) -> None:
    """float32 on a CPU goes another way, through oneDNN."""
    settings, shape = NETWORKS[name]
    model = settings.on(shape, 4)
    weights, x = stack(model), images(shape, q)
    features, logits, gradients, in_x = both(
        model, {n: t.to(dtype) for n, t in weights.items()}, x.to(dtype)
    )
    assert features.dtype == logits.dtype == dtype
    assert features.shape == (R, N, model.n_features)
    rounding = 1e-4 if dtype == torch.float32 else 1e-10

    def same(ours: Tensor, theirs: Tensor) -> None:
        theirs = theirs.detach()
        scale = max(1.0, float(theirs.abs().max()))
        close = {"rtol": rounding, "atol": rounding / 10}
        torch.testing.assert_close(ours.double() / scale, theirs / scale, **close)

    total_in_x = torch.zeros_like(x)
    for r in range(R):
        leaves, own = leaves_of(weights, r), x[min(r, q - 1)].clone().requires_grad_()
        z, y = torch_split(settings, leaves, own)
        same(features[r], z)
        same(logits[r], y)
        total = (y * torch.arange(1, 5)).sum() + z.square().sum()
        *theirs, their_x = torch.autograd.grad(total, [*leaves.values(), own])
        for leaf, gradient in zip(leaves, theirs, strict=True):
            same(gradients[leaf][r], gradient)
        total_in_x[min(r, q - 1)] += their_x
    same(in_x, total_in_x)


def test_both_sizes_of_the_paper_have_400_features_at_its_cut() -> None:
    for shape in ((1, 28, 28), (3, 32, 32)):
        sizes = [LeNet5(cut=cut).on(shape, 10).n_features for cut in (1, 2, 3, 4)]
        assert sizes == [6 * 14 * 14, 400, 120, 84]
    assert LeNet5().on((1, 28, 28), 10).tensor_shapes == {
        "conv1.weight": (6, 1, 5, 5), "conv1.bias": (6,),
        "conv2.weight": (16, 6, 5, 5), "conv2.bias": (16,),
        "fc1.weight": (120, 400), "fc1.bias": (120,),
        "fc2.weight": (84, 120), "fc2.bias": (84,),
        "fc3.weight": (10, 84), "fc3.bias": (10,),
    }  # fmt: skip
    assert LeNet5().on((3, 28, 40), 10).n_features == 16 * 4 * 7  # not the paper's: no padding


def test_the_papers_first_weights_are_normal_around_a_mean_of_the_layer() -> None:
    model = SplitMLP(widths=(100, 40), alpha=0.25).on((1, 1, 50), 10)
    weights = stack(model, n=300)
    u = weights["fc1.weight"].mean((1, 2))
    assert float(u.std()) == pytest.approx(0.5, rel=0.15)
    assert abs(float(u.mean())) < 0.1
    within = weights["fc1.weight"] - u[:, None, None]
    assert float(within.std()) == pytest.approx(1, rel=0.01)
    torch.testing.assert_close(weights["fc1.bias"].mean(1), u, rtol=0, atol=0.45)
    assert float(torch.corrcoef(torch.stack([u, weights["fc1.bias"].mean(1)]))[0, 1]) > 0.95
    other = weights["fc2.weight"].mean((1, 2))
    assert abs(float(torch.corrcoef(torch.stack([u, other]))[0, 1])) < 0.2
    none = stack(SplitMLP(widths=(100, 40), alpha=0.0).on((1, 1, 50), 10), n=1)
    assert abs(float(none["fc1.weight"].mean())) < 0.05


@pytest.mark.parametrize(
    "model",
    [LeNet5().on((3, 32, 32), 10), SplitMLP(widths=(200, 50), init="torch").on((1, 1, 90), 4)],
    ids=["lenet5", "mlp"],
)
def test_torchs_first_weights_follow_from_their_own_generator(model: SplitModel) -> None:
    shapes, together = model.tensor_shapes, stack(model, torch.float32, n=2)
    alone = initial_weights(model, [torch.Generator().manual_seed(1)], dtype=torch.float64)
    for name, tensor in together.items():
        assert tensor.shape == (2, *shapes[name])
        assert torch.equal(tensor[1:], alone[name].float())
        assert not torch.equal(tensor[0], tensor[1])
        bound = 1 / math.sqrt(math.prod(shapes[name.replace("bias", "weight")][1:]))
        assert float(tensor.abs().max()) <= bound
        if tensor.numel() > 2000:
            assert float(tensor.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
            assert abs(float(tensor.mean())) < 0.05 * bound


@pytest.mark.parametrize(
    ("message", "network", "settings"),
    [
        (r"cut=0 is outside \[1, 4\]", LeNet5, {"cut": 0}),
        (r"cut=3 is no hidden layer.*give 1 to 2", SplitMLP, {"widths": (5, 5), "cut": 3}),
        (r"widths=.*at least one hidden layer", SplitMLP, {"widths": (), "cut": 1}),
        (r"widths=.*at least one hidden layer", SplitMLP, {"widths": (5, 0), "cut": 1}),
        (r"15x20 are too small.*16x16", LeNet5().on, {"shape": (1, 15, 20), "n_classes": 10}),
        ("n_classes=1; a classifier needs", LeNet5().on, {"shape": (1, 16, 16), "n_classes": 1}),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(
    message: str, network: Callable[..., object], settings: dict[str, Any]
) -> None:
    refuses(message, network, **settings)


def test_torchvisions_classifiers_are_cut_at_a_module() -> None:
    torch.manual_seed(0)
    net = import_torchvision().models.resnet18(weights=None, num_classes=5).eval()
    x = torch.rand(2, 3, 32, 32, requires_grad=True)
    z = net.bn1(net.conv1(x))
    expected = {"bn1": z, "layer1": net.layer1(net.maxpool(z.relu()))}
    for name, value in expected.items():
        h = CutClassifier(net, name)(x)
        assert h.shape == (2, value[0].numel())
        torch.testing.assert_close(h, value.flatten(1))
        (ours,) = torch.autograd.grad(h.square().sum(), x, retain_graph=True)
        (theirs,) = torch.autograd.grad(value.square().sum(), x, retain_graph=True)
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(CutClassifier(net, "fc")(x), net(x))  # and no hook is left behind
    assert not net.bn1._forward_hooks


class Odd(nn.Module):
    """Modules that are cut badly."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.row = nn.Identity(), nn.Identity()
        self.rnn, self.twice = nn.GRU(4, 3, batch_first=True), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        self.row(x.sum(0))
        a = self.twice(x.flatten(2)[:, 0].unsqueeze(1))
        return self.twice(self.rnn(a)[0] - 1)


def test_cuts_that_give_no_features_are_refused_with_the_fix() -> None:
    net, x = Odd(), torch.randn(2, 1, 2, 2)
    refuses(r"training mode.*eval", CutClassifier(net, "rnn"), x)
    net.eval()
    refuses("'bn7'; there are unused, row, rnn, twice", CutClassifier, net, "bn7")
    refuses("never calls its module 'unused'", CutClassifier(net, "unused"), x)
    for name in ("rnn", "row"):
        refuses(f"{name!r} does not give one tensor with a row", CutClassifier(net, name), x)
    assert not net.rnn._forward_hooks
    torch.testing.assert_close(CutClassifier(net, "twice")(x), x.flatten(1).relu())

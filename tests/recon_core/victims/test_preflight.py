"""Preflight: numbers against autograd and planted solutions, words against known victims."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor

from recon_core.victims.diagnostics import (
    all_rivals,
    best_multipliers,
    channel_scales,
    explained,
    gram_systems,
    homogeneity_gap,
    margin_gradients,
    spectrum,
)
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Conv, Network, Parameters
from recon_core.victims.preflight import Preflight, preflight
from tests.recon_core.drawing import generator, normal, refuses

SHAPE = (1, 5, 5)
NETWORKS = [
    Network(widths=(6, 4)),
    Network(widths=(6,), bias="first"),
    Network(widths=(6, 5, 4), bias="all", activation="leaky_relu", leak=0.2),
    Network(widths=(6,), bias="all", activation="gelu"),
    Network(widths=(6,), conv=Conv(kernel=3, channels=2), bias="all"),
]


def network_and_images(
    network: Network, n_outputs: int = 1, n: int = 7, shape: tuple[int, int, int] = SHAPE
) -> tuple[Architecture, Parameters, Tensor]:
    architecture = dataclasses.replace(network, init_std_first=None).on(shape, n_outputs)
    parameters = architecture.initial([generator()], dtype=torch.float64)
    parameters = parameters.map(lambda t: t + 0.1 * torch.randn(t.shape, generator=generator(1)))
    x = torch.randn(n, architecture.d, generator=generator(2), dtype=torch.float64)
    return architecture, parameters, x


def labels_for(n_outputs: int, n: int) -> Tensor:
    return torch.arange(n) % n_outputs if n_outputs > 1 else torch.arange(n) % 2 * 2 - 1


@pytest.mark.parametrize("n_outputs", [1, 3])
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_gram_systems_are_those_of_autograd_s_gradients(network: Network, n_outputs: int) -> None:
    architecture, parameters, x = network_and_images(network, n_outputs)
    labels = labels_for(n_outputs, len(x))
    leaves = [t.clone().requires_grad_() for t in parameters.tensors()]
    output = architecture.forward(parameters.like(leaves), x[None]).output[0]
    loss = Loss(kind="ce" if n_outputs > 1 else "bce")
    margins = loss.margins(output[None], labels[None])[0]
    rows = [torch.autograd.grad(m, leaves, retain_graph=True) for m in margins]
    gradients = margin_gradients(output.detach(), labels)
    systems = gram_systems(architecture, parameters, x, gradients)
    assert len(systems) == architecture.n_layers
    place = 0
    for layer, (gram, target, square) in enumerate(systems):
        n_tensors = 2 if architecture.has_bias(layer) else 1
        here = slice(place, place + n_tensors)
        place += n_tensors
        g = torch.stack([torch.cat([t.flatten() for t in row[here]]) for row in rows])
        theta = torch.cat([t.flatten() for t in leaves[here]]).detach()
        torch.testing.assert_close(gram, g @ g.T, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(target, g @ theta, rtol=1e-10, atol=1e-12)
        assert square == pytest.approx(float(theta @ theta), rel=1e-12)


def test_every_rival_is_one_row() -> None:
    classes = torch.tensor([0, 2])
    expected = [[1, -1, 0], [1, 0, -1], [-1, 0, 1], [0, -1, 1]]
    assert all_rivals(classes, 3).tolist() == expected
    output = torch.tensor([[5.0, 1, 2], [3, 4, 9]])
    assert margin_gradients(output, classes).tolist() == [expected[1], expected[3]]


def test_multiplier_search_equals_plain_nnls_and_least_squares() -> None:
    g, theta = normal(9, 40), normal(40, seed=1)
    expected, _norm = nnls(g.T.numpy(), theta.numpy())
    lam, free = (best_multipliers(g @ g.T, g @ theta, free_sign=sign) for sign in (False, True))
    torch.testing.assert_close(lam, torch.from_numpy(expected), rtol=1e-8, atol=1e-10)
    assert (lam == 0).any()
    torch.testing.assert_close(free, torch.linalg.lstsq(g.T, theta[:, None]).solution[:, 0])


def planted(n: int = 4) -> tuple[Architecture, Parameters, Tensor, Tensor]:
    """A network that is exactly sum_i lam_i y_i grad phi(x_i) with lam = 1.

    Unit k sees image k, the k-th basis vector, and nothing else: w_k = s_k x_k, v_k = s_k y_k.
    """
    architecture = Network(widths=(n,)).on((1, 4, 4))
    x, y = torch.eye(16, dtype=torch.float64)[:n], labels_for(1, n).double()
    sizes = torch.linspace(1, 2, n, dtype=torch.float64)
    return (
        architecture,
        Parameters((sizes.diag()[None] @ x, (sizes * y)[None, None]), (None, None)),
        x,
        y,
    )


@pytest.mark.parametrize("free_sign", [False, True])
def test_a_planted_kkt_point_is_explained_completely(free_sign: bool) -> None:
    architecture, parameters, x, y = planted()
    signs = torch.ones_like(y) if free_sign else y
    found = explained(
        gram_systems(architecture, parameters, x, signs[:, None]), free_sign=free_sign
    )
    assert found.residual == pytest.approx(0, abs=1e-12)
    assert found.first_layer == pytest.approx(0, abs=1e-12)
    assert max(found.layer_residuals) < 1e-12
    torch.testing.assert_close(found.lam, y if free_sign else torch.ones_like(y))
    assert found.n_support(len(y)) == len(y)


def test_what_is_not_explained_is_measured() -> None:
    """Noise orthogonal to the images, with as much energy as the signal in W, is half of W."""
    architecture, parameters, x, y = planted()
    w = parameters.weights[0]
    across = normal(*w.shape, seed=3)
    across[..., : len(x)] = 0
    across *= w.norm() / across.norm()
    noisy = Parameters((w + across, parameters.weights[1]), (None, None))
    found = explained(gram_systems(architecture, noisy, x, y[:, None]), free_sign=False)
    assert found.first_layer == pytest.approx(0.5)
    assert found.layer_residuals == pytest.approx((0.5, 0.0), abs=1e-12)
    assert found.residual == pytest.approx(1 / 3)
    wrong = explained(gram_systems(architecture, noisy, x, -y[:, None]), free_sign=False)
    assert wrong.residual == pytest.approx(1.0)
    assert wrong.n_support(len(y)) == 0


@pytest.mark.parametrize(
    ("network", "homogeneous"),
    [
        (Network(widths=(6, 4)), True),
        (Network(widths=(6, 4), bias="first", activation="leaky_relu"), True),
        (Network(widths=(6,), conv=Conv(kernel=3, channels=2), bias="first"), True),
        (Network(widths=(6, 4), bias="all"), False),
        (Network(widths=(6, 4), activation="gelu"), False),
    ],
    ids=str,
)
def test_homogeneity_is_measured(network: Network, homogeneous: bool) -> None:
    architecture, parameters, _x = network_and_images(network)
    assert architecture.homogeneous == homogeneous
    gap = homogeneity_gap(architecture, parameters)
    assert gap < 1e-12 if homogeneous else gap > 0.01
    subject = preflight(architecture, parameters).findings[0]
    assert (subject.subject, subject.level) == ("homogeneity", "ok" if homogeneous else "warning")


@pytest.mark.parametrize("shape", [(64, 200), (200, 64), (128, 128)])
def test_the_spectrum_separates_planted_signal_from_noise(shape: tuple[int, int]) -> None:
    noise = 0.01 * normal(*shape)
    found = spectrum(noise)
    assert (found.n_signal, found.signal_share) == (0, 0.0)
    assert found.noise_std == pytest.approx(0.01, rel=0.02)
    u, v = (torch.linalg.qr(normal(side, 5, seed=side + k))[0] for k, side in enumerate(shape))
    signal = (u * torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5])) @ v.T
    found = spectrum(noise + signal)
    assert found.n_signal == 5
    assert found.noise_std == pytest.approx(0.01, rel=0.05)
    share = float(signal.square().sum() / (noise + signal).square().sum())
    assert found.signal_share == pytest.approx(share, abs=0.01)
    assert found.largest == pytest.approx(8, rel=0.01)
    assert spectrum(signal).n_signal == 5
    assert spectrum(torch.zeros(shape)).signal_share == 0


def victim(
    *, small_first: bool, weight_decay: float = 0.0, epochs: int = 400, gain: float = 1.0
) -> tuple[Architecture, Parameters, Tensor, Tensor]:
    """A binary classifier 768-64-64-1 of ten random images."""
    network = Network(
        widths=(64, 64), init_rest="torch", init_std_first=1e-4 if small_first else None
    )
    architecture = network.on((3, 16, 16))
    x = torch.rand(10, 768, generator=generator(5))
    x, y = x - x.mean(0), labels_for(1, 10).float()
    start = architecture.initial([generator(6)], dtype=torch.float32)
    leaves = [(t * gain).requires_grad_() for t in start.tensors()]
    optimiser = torch.optim.Adadelta(leaves, weight_decay=weight_decay)
    for _ in range(epochs):
        optimiser.zero_grad()
        output = architecture.forward(start.like(leaves), x[None]).output[0, :, 0]
        torch.nn.functional.softplus(-y * output).mean().backward()
        optimiser.step()
    return architecture, start.like([t.detach() for t in leaves]), x, y


def by_subject(result: Preflight) -> dict[str, str]:
    return {finding.subject: finding.level for finding in result.findings}


def test_a_victim_that_leaks_is_called_good() -> None:
    architecture, parameters, x, y = victim(small_first=True)
    blind, known = (
        preflight(architecture, parameters, **given) for given in ({}, {"images": x, "labels": y})
    )
    for found in (blind, known):
        assert (found.outlook, found.stopped) == ("good", False)
        assert found.verdict.startswith("An attack can work")
    assert blind.numbers["signal_share"] > 0.99
    assert blind.numbers["layer_imbalance"] > 2
    assert by_subject(blind)["balance of the layers"] == "ok"
    assert known.numbers["train_accuracy"] == 1
    assert known.numbers["first_layer_unexplained"] < 0.35
    assert 1 <= known.numbers["n_near_margin"] <= 10
    assert known.numbers["margin_min"] <= known.numbers["margin_max"]
    assert by_subject(known)["fit and margins"] == "ok"
    assert all(math.isfinite(value) for value in known.numbers.values())
    guessed = preflight(architecture, parameters, images=x)
    assert guessed.numbers == pytest.approx(known.numbers)


def test_wrong_images_and_wrong_labels_are_noticed() -> None:
    architecture, parameters, x, y = victim(small_first=True)
    others = torch.rand(10, 768, generator=generator(9)) - 0.5
    wrong = preflight(architecture, parameters, images=others, labels=y)
    assert wrong.outlook == "poor"
    assert "another mean" in wrong.findings[-1].text
    flipped = preflight(architecture, parameters, images=x, labels=-y)
    assert flipped.numbers["train_accuracy"] == 0
    assert by_subject(flipped)["fit"] == "warning"
    one_wrong = preflight(architecture, parameters, images=x, labels=torch.cat([-y[:1], y[1:]]))
    assert one_wrong.numbers["first_layer_unexplained"] < 0.35
    assert one_wrong.outlook == "open"
    with pytest.raises((ValueError, TypeError), match="labels"):  # tests check shapes first
        preflight(architecture, parameters, images=x, labels=y[:9])


def test_a_standard_start_without_weight_decay_is_called_poor() -> None:
    architecture, parameters, x, y = victim(small_first=False, epochs=100, gain=1.5)
    blind = preflight(architecture, parameters)
    known = preflight(architecture, parameters, images=x, labels=y)
    assert (blind.outlook, known.outlook) == ("poor", "poor")
    assert "unlikely" in blind.verdict
    assert by_subject(blind)["first layer is mostly noise"] == "warning"
    decayed = preflight(*victim(small_first=False, weight_decay=3e-3, epochs=1500)[:2])
    assert decayed.outlook == "good"
    assert by_subject(decayed)["balance of the layers"] == "ok"
    assert decayed.numbers["layer_imbalance"] < 2


def test_an_untrained_network_is_stopped_and_two_at_a_time_are_refused() -> None:
    architecture = Network(widths=(32,)).on((3, 8, 8))
    parameters = architecture.initial([generator()], dtype=torch.float32)
    result = preflight(architecture, parameters)
    assert result.stopped
    assert result.verdict == "An attack cannot work here: first layer is pure noise."
    two = architecture.initial([generator(), generator(1)], dtype=torch.float32)
    refuses("one network at a time, got 2", preflight, architecture, two)


def test_broken_weights_and_unknown_layers_are_stopped() -> None:
    """Of broken weights nothing else is asked."""
    architecture, parameters, x, y = victim(small_first=True, epochs=1)
    nan = parameters.map(lambda t: t.clone())
    nan.weights[1][0, 0, 0] = torch.nan
    result = preflight(architecture, nan, images=x, labels=y)
    assert by_subject(result) == {"weights that are not finite": "stop"}
    dead = Parameters((parameters.weights[0] * 0, *parameters.weights[1:]), parameters.biases)
    assert by_subject(preflight(architecture, dead, images=x)) == {"a dead layer": "stop"}
    unknown = [("bn1", "normalisation"), ("bn2", "normalisation"), ("pos", "other")]
    result = preflight(architecture, parameters, unknown_layers=unknown)
    assert result.stopped
    assert "bn1" in result.reason
    assert "normalisation layers, unknown tensors" in result.verdict


def test_channel_scales_are_read_off_a_layer_made_of_the_images() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 49, generator=generator)
    x -= x.mean(0)  # one direction less than there are images
    std = torch.tensor([0.1, 0.25, 0.6])
    weight = torch.randn(20, 6, generator=generator) @ (x / std[:, None]).flatten(1)
    scales = channel_scales(weight, x.flatten(1), 3)
    assert scales is not None
    torch.testing.assert_close(scales / scales[0], (std / 0.1).double(), rtol=1e-4, atol=0)
    noise = torch.randn(20, 147, generator=generator)
    assert channel_scales(noise, x.flatten(1), 3) is None
    assert channel_scales(weight, x.flatten(1).repeat(5, 1), 3) is None  # too many images


def test_several_outputs_regression_and_convolutions() -> None:
    architecture, parameters, x = network_and_images(NETWORKS[0], n_outputs=3)
    refuses("need labels", preflight, architecture, parameters, images=x)
    output = architecture.forward(parameters, x[None]).output[0]
    labels = output.argmax(1)
    pairs = all_rivals(labels, 3)
    systems = gram_systems(architecture, parameters, x.repeat_interleave(2, 0), pairs)
    expected = explained(systems, free_sign=False).residual
    hard = gram_systems(architecture, parameters, x, margin_gradients(output, labels))
    assert expected < explained(hard, free_sign=False).residual
    found = preflight(architecture, parameters, images=x, labels=labels)
    assert found.numbers["unexplained"] == pytest.approx(expected)
    assert found.numbers["train_accuracy"] == 1
    architecture, parameters, x = network_and_images(NETWORKS[4], shape=(1, 12, 12))
    targets = architecture.forward(parameters, x[None]).output[0, :, 0]
    fitted = preflight(architecture, parameters, condition="regression", images=x, labels=targets)
    assert fitted.numbers["train_loss"] == pytest.approx(0)
    assert by_subject(fitted)["fit"] == "ok"
    off = preflight(architecture, parameters, condition="regression", images=x, labels=-targets)
    assert by_subject(off)["fit"] == "warning"
    blind = preflight(architecture, parameters, condition="regression", images=x)
    assert "train_loss" not in blind.numbers
    assert blind.numbers["unexplained"] == pytest.approx(fitted.numbers["unexplained"])


@pytest.mark.parametrize(
    ("network", "subject"),
    [
        (Network(widths=(24,), activation="gelu"), "homogeneity"),
        (Network(widths=(24,), conv=Conv(kernel=3, channels=2)), "a convolution"),
    ],
    ids=["gelu", "conv"],
)
def test_harder_networks_are_never_called_good(network: Network, subject: str) -> None:
    architecture, parameters, _x = network_and_images(network, shape=(1, 12, 12))
    dense = 0 if network.conv is None else 1
    size = parameters.weights[dense].shape
    signal = torch.linalg.qr(torch.randn(size[2], 3, generator=generator(1)).double())[0].T
    mixed = torch.randn(size[1], 3, generator=generator(2)).double() @ signal
    weights = list(parameters.weights)
    weights[dense] = mixed[None]
    result = preflight(architecture, Parameters(tuple(weights), parameters.biases))
    assert result.numbers["signal_share"] > 0.99
    assert result.outlook == "open"
    assert by_subject(result)[subject] == "warning"
    assert subject in result.verdict

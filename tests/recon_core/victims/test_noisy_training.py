"""Private and dropped-out steps against autograd, one image at a time, and against Opacus."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recon_core.optimisers import Optimiser
from recon_core.types import seeded_generator
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Conv, Parameters
from recon_core.victims.noisy_training import (
    Noise,
    poisson_sample,
    squared_norms,
)
from recon_core.victims.training import Trained, Training
from tests.recon_core.drawing import refuses
from tests.recon_core.victims.small_victims import (
    ADAM,
    GD,
    N,
    R,
    architecture,
    assert_close,
    data,
    of,
    order,
    trained,
    victims,
    wild,
)
from tests.recon_core.victims.torch_nets import torch_loss, torch_net

STEP = Optimiser(rule="gd", lr=1.0)
ONE = Training(epochs=1, optimiser=STEP)
CONV = Conv(kernel=3, channels=3)
NETS = pytest.mark.parametrize(
    ("bias", "conv"),
    [("none", None), ("first", None), ("all", None), ("none", CONV), ("all", CONV)],
    ids=["dense", "dense, first bias", "dense, biases", "conv", "conv, biases"],
)
LOSSES = pytest.mark.parametrize("kind", ["bce", "ce", "mse"])


def gradients_of_each(
    arch: Architecture,
    parameters: Parameters,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    *,
    masks: list[Tensor] | None = None,
    run: int = 0,
) -> list[list[Tensor]]:
    """One victim's gradients of the loss of every image alone, by autograd; x (n, d), y (n)."""
    net = torch_net(arch, parameters, run)
    gradients = []
    for i in range(len(x)):
        a = x[i : i + 1]
        hidden = iter(masks or [])
        for layer in net:
            a = layer(a)
            # The activation's units, flat: of a convolution they are flattened one layer later.
            if masks and isinstance(layer, (nn.ReLU, nn.GELU, nn.LeakyReLU)):
                a = a * next(hidden)[i].view_as(a)
        value = torch_loss(loss, a, y[i : i + 1])
        gradients.append(list(torch.autograd.grad(value, list(net.parameters()))))
    return gradients


def gradient_norms(
    arch: Architecture, parameters: Parameters, x: Tensor, y: Tensor, loss: Loss
) -> Tensor:
    """Norm of the gradient of every image's own loss over all parameters (R, n)."""
    passed = arch.forward(parameters, x)
    errors = arch.errors(parameters, passed, loss.gradient(passed.output, y) * y.shape[1])
    return squared_norms(arch, passed, errors).sqrt()


def norm(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


def clipped_sum(gradients: list[list[Tensor]], clip: float) -> list[Tensor]:
    total = [torch.zeros_like(g) for g in gradients[0]]
    for own in gradients:
        factor = min(1.0, clip / max(norm(own), 1e-300))
        total = [t + factor * g for t, g in zip(total, own, strict=True)]
    return total


def moved(before: Parameters, after: Parameters, run: int = 0) -> list[Tensor]:
    """A victim's way in one step at rate 1: the gradient."""
    pairs = zip(before.tensors(), after.tensors(), strict=True)
    return [old[run] - new[run] for old, new in pairs]


def stepped(arch: Architecture, noise: Noise, training: Training = ONE, **more: Any) -> Parameters:
    return trained(arch, training, noise, **more).parameters


def assert_all_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-10) -> None:
    """To a share of the largest: a kernel whose ReLUs are all off has a gradient of 0."""
    largest = max(float(expected.abs().max()) for expected in theirs)
    assert largest > 1e-3
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine, expected.view_as(mine), rtol=tolerance, atol=tolerance * largest
        )


@NETS
@pytest.mark.parametrize("rule", [Optimiser(rule="gd", lr=0.3), GD, ADAM, Optimiser()])
def test_without_noise_it_is_ordinary_training(
    rule: Optimiser, bias: str, conv: Conv | None
) -> None:
    arch = architecture(bias=bias, conv=conv)
    training = Training(epochs=5, optimiser=rule, weight_decay=0.01)
    ordinary = trained(arch, training)
    fractions: list[float] = []
    ours = trained(arch, training, Noise(), progress=fractions.append)
    assert_close(ours.parameters, ordinary.parameters, 1e-11)
    for name in ("loss", "accuracy", "margins", "margin_min", "epochs_done", "diverged"):
        torch.testing.assert_close(getattr(ours, name), getattr(ordinary, name))
    assert (fractions[-1], fractions) == (1.0, sorted(fractions))
    # A bound that no gradient reaches changes nothing, either.
    bounded = stepped(arch, Noise(clip=1e9), training)
    assert_close(bounded, ordinary.parameters, 1e-11)


@NETS
@LOSSES
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu"])
def test_norms_are_those_of_autograd(
    activation: str, kind: str, bias: str, conv: Conv | None
) -> None:
    n_outputs = 3 if kind == "ce" else 1
    arch = architecture(n_outputs, bias=bias, conv=conv, activation=activation)
    parameters, (x, y), loss = victims(arch), data(n_outputs), Loss(kind=kind)  # type: ignore[arg-type]
    norms = gradient_norms(arch, parameters, x, y, loss)
    for run in range(R):
        each = gradients_of_each(arch, parameters, x[run], y[run], loss, run=run)
        expected = torch.tensor([norm(own) for own in each], dtype=torch.float64)
        torch.testing.assert_close(norms[run], expected, rtol=1e-10, atol=0)


@NETS
@LOSSES
def test_a_step_takes_the_mean_of_clipped_gradients(
    kind: str, bias: str, conv: Conv | None
) -> None:
    n_outputs = 3 if kind == "ce" else 1
    arch = architecture(n_outputs, bias=bias, conv=conv)
    parameters, (x, y), loss = victims(arch), data(n_outputs), Loss(kind=kind)  # type: ignore[arg-type]
    clip = float(gradient_norms(arch, parameters, x, y, loss).median())
    after = stepped(arch, Noise(clip=clip), replace(ONE, loss=loss))
    for run in range(R):
        each = gradients_of_each(arch, parameters, x[run], y[run], loss, run=run)
        expected = [total / N for total in clipped_sum(each, clip)]
        assert_all_close(moved(parameters, after, run), expected)


@NETS
@pytest.mark.parametrize("kind", ["bce", "ce"])
def test_a_step_is_that_of_opacus(kind: str, bias: str, conv: Conv | None) -> None:
    """To 1e-4, as Opacus adds 1e-6 to a norm before it divides by it."""
    opacus = pytest.importorskip("opacus", reason="the reference of private training")
    optimizers = pytest.importorskip("opacus.optimizers")
    n_outputs = 3 if kind == "ce" else 1
    arch = architecture(n_outputs, bias=bias, conv=conv)
    parameters, (x, y), loss = victims(arch), data(n_outputs), Loss(kind=kind)  # type: ignore[arg-type]
    clip = float(gradient_norms(arch, parameters, x, y, loss).median())
    after = stepped(arch, Noise(clip=clip), replace(ONE, loss=loss))
    for run in range(R):
        net = opacus.GradSampleModule(torch_net(arch, parameters, run))
        optimiser = optimizers.DPOptimizer(
            torch.optim.SGD(net.parameters(), lr=1.0),
            noise_multiplier=0.0,
            max_grad_norm=clip,
            expected_batch_size=N,
        )
        before = [leaf.detach().clone() for leaf in net.parameters()]
        images = x[run].clone().requires_grad_()  # its hooks warn without
        torch_loss(loss, net(images), y[run]).backward()
        optimiser.step()
        theirs = [old - new.detach() for old, new in zip(before, net.parameters(), strict=True)]
        assert_all_close(moved(parameters, after, run), theirs, 1e-4)


@NETS
def test_no_image_changes_the_sum_by_more_than_the_bound(bias: str, conv: Conv | None) -> None:
    """Data sets that differ in one image, however far out it is."""
    arch, clip = architecture(bias=bias, conv=conv, activation="leaky_relu"), 0.03
    parameters, (x, y) = victims(arch), data()
    x = x.clone()
    x[:, 0] *= 1e4
    squares = replace(ONE, loss=Loss(kind="mse"))  # steep, on either side
    whole = stepped(arch, Noise(clip=clip), squares, given=(x, y))
    for left_out in range(N):
        kept = [i for i in range(N) if i != left_out]
        rest = (x[:, kept], y[:, kept])
        less = stepped(arch, Noise(clip=clip), squares, given=rest)
        for run in range(R):
            with_it = [N * g for g in moved(parameters, whole, run)]
            without = [(N - 1) * g for g in moved(parameters, less, run)]
            change = norm([a - b for a, b in zip(with_it, without, strict=True)])
            assert change <= clip * (1 + 1e-9)
            assert left_out or change == pytest.approx(clip)  # the bound is reached


def test_noise_has_the_stated_deviation() -> None:
    arch = architecture(bias="all", conv=CONV)
    calm = stepped(arch, Noise(clip=0.5))
    draws: list[Tensor] = []
    for seed in range(30):
        own = [seeded_generator(seed, run, "noise") for run in range(R)]
        noisy = stepped(arch, Noise(clip=0.5, noise_multiplier=3.0), generators=own)
        change = zip(calm.tensors(), noisy.tensors(), strict=True)
        draws.append(torch.cat([N * (a - b).flatten(1) for a, b in change], 1))
    noise = torch.stack(draws) / 1.5  # seeds, victims, parameters
    assert noise.shape[2] == arch.n_parameters
    count = noise.numel()
    assert abs(float(noise.mean())) < 5 / math.sqrt(count)
    assert float(noise.std()) == pytest.approx(1.0, abs=5 / math.sqrt(2 * count))
    by_parameter = noise.flatten(0, 1).std(0)
    assert float(by_parameter.min()) > 0.6
    assert float(by_parameter.max()) < 1.5
    assert abs(float((noise[:, 0] * noise[:, 1]).mean())) < 5 / math.sqrt(count / R)
    assert abs(float((noise[1:] * noise[:-1]).mean())) < 5 / math.sqrt(count)


def masks_of(arch: Architecture, n: int, share: float, generator: torch.Generator) -> list[Tensor]:
    """The masks as they are drawn: every unit's own number, image by image, layer by layer."""
    widths = [fan_in for fan_in, _fan_out in arch.layer_sizes[1:]]
    return [
        (torch.rand(n, width, generator=generator) >= share).double() / (1 - share)
        for width in widths
    ]


@NETS
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_dropout_is_autograds_with_the_same_masks(
    activation: str, clip: float | None, bias: str, conv: Conv | None
) -> None:
    arch = architecture(bias=bias, conv=conv, activation=activation)
    parameters, (x, y) = victims(arch), data()
    after = stepped(arch, Noise(dropout=0.4, clip=clip))
    for run, generator in enumerate(order()):
        masks = masks_of(arch, N, 0.4, generator)
        each = gradients_of_each(arch, parameters, x[run], y[run], Loss(), masks=masks, run=run)
        expected = [total / N for total in clipped_sum(each, clip or math.inf)]
        assert_all_close(moved(parameters, after, run), expected)


def test_dropout_keeps_the_mean_of_activations() -> None:
    """A last layer of 0 has the same output and slope for every mask, so that its gradient is
    linear in what it reads."""
    arch = architecture(widths=(7,), bias="first")
    parameters, training = victims(arch), replace(ONE, loss=Loss(kind="mse"))
    parameters.weights[-1].zero_()
    (expected,) = stepped(arch, Noise(), training, parameters=parameters).weights[1:]
    found = []
    for seed in range(400):
        own = [seeded_generator(seed, run, "masks") for run in range(R)]
        given: dict[str, Any] = {"parameters": parameters, "generators": own}
        found.append(stepped(arch, Noise(dropout=0.5), training, **given).weights[1])
    drawn = torch.stack(found)
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert float(error.max()) > 1e-4
    assert bool(((drawn.mean(0) - expected).abs() < 5 * error + 1e-12).all())


def test_results_are_those_of_the_whole_network() -> None:
    arch = architecture(bias="all")
    (x, y), ended = data(), trained(arch, Training(epochs=7, optimiser=GD), Noise(dropout=0.5))
    phi = arch.forward(ended.parameters, x).output
    torch.testing.assert_close(ended.margins, Loss().margins(phi, y))
    torch.testing.assert_close(ended.loss, Loss().value(phi, y))
    assert torch.equal(ended.margin_min, ended.margins.amin(1))


def trained_by_the_book(
    arch: Architecture, parameters: Parameters, run: int, training: Training, noise: Noise
) -> list[Tensor]:
    """One victim of `data` after gradient descent with weight decay, image by image."""
    (x, y), generator, size = data(), order()[run], training.batch_size or N
    current = parameters.rows(slice(run, run + 1))
    for _ in range(training.epochs * math.ceil(N / size)):
        rows = torch.arange(N)
        if size < N:
            rows = (torch.rand(N, generator=generator) < size / N).nonzero().squeeze(1)
        masks = masks_of(arch, len(rows), noise.dropout, generator) if noise.dropout else None
        each = gradients_of_each(
            arch, current, x[run, rows], y[run, rows], training.loss, masks=masks
        )
        like = list(current.tensors())
        nothing = [torch.zeros_like(t[0]) for t in like]
        sums = clipped_sum(each, noise.clip or math.inf) if each else nothing
        sums = [s.view_as(t) for s, t in zip(sums, nothing, strict=True)]
        if noise.noise_multiplier:
            deviation = noise.noise_multiplier * (noise.clip or 0)
            sums = [
                s + deviation * torch.randn(s.shape, generator=generator).double() for s in sums
            ]
        rate, decay = training.optimiser.lr, training.weight_decay
        current = current.like(
            [t - rate * (s / size + decay * t) for t, s in zip(like, sums, strict=True)]
        )
    return [t[0] for t in current.tensors()]


@pytest.mark.parametrize("batch_size", [1, 3, None])
@pytest.mark.parametrize("conv", [None, CONV], ids=["dense", "conv"])
@pytest.mark.parametrize(
    "noise",
    [
        Noise(),
        Noise(dropout=0.3),
        Noise(clip=0.1, noise_multiplier=0.5),
        Noise(dropout=0.3, clip=0.1, noise_multiplier=0.5),
    ],
    ids=["none", "dropout", "private", "both"],
)
def test_epochs_are_those_of_the_book(
    noise: Noise, conv: Conv | None, batch_size: int | None
) -> None:
    """Images, masks and noise drawn in this order, and sums divided by the expected batch."""
    arch = architecture(bias="all", conv=conv)
    training = Training(
        epochs=3, optimiser=replace(STEP, lr=0.3), batch_size=batch_size, weight_decay=0.01
    )
    ours = stepped(arch, noise, training)
    for run in range(R):
        expected = trained_by_the_book(arch, victims(arch), run, training, noise)
        assert_all_close([t[run] for t in ours.tensors()], expected)


def test_every_image_is_drawn_at_the_stated_rate() -> None:
    n, probability, n_steps = 50, 0.13, 2000
    generators = [seeded_generator(0, run, "images") for run in range(R)]
    counts, sizes = torch.zeros(R, n), []
    for _ in range(n_steps):
        index, meant = poisson_sample(n, probability, generators)
        assert index.shape == meant.shape == (R, max(1, int(meant.sum(1).max())))
        for run in range(R):
            rows = index[run, meant[run]]
            assert len(rows.unique()) == len(rows)
            counts[run, rows] += 1
        sizes.append(meant.sum(1))
    error = math.sqrt(probability * (1 - probability) / n_steps)
    rates = counts / n_steps
    assert bool(((rates - probability).abs() < 5 * error).all())
    variance = torch.stack(sizes).double().var(0)  # of a binomial: images are drawn independently
    assert torch.allclose(variance, torch.tensor(n * probability * (1 - probability)).double(), 0.2)
    index, meant = poisson_sample(n, 0.0, generators)
    assert (index.tolist(), meant.tolist()) == ([[0]] * R, [[False]] * R)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("optimiser", [GD, ADAM, Optimiser()], ids=["gd", "adam", "adadelta"])
def test_a_victim_does_not_depend_on_those_beside_it(
    optimiser: Optimiser, batch_size: int | None, dtype: torch.dtype
) -> None:
    arch = architecture(bias="first", activation="gelu")  # smooth: rounding stays rounding
    parameters, (x, y) = victims(arch, dtype), data(dtype=dtype)
    training = Training(epochs=20, optimiser=optimiser, batch_size=batch_size)
    noise = Noise(dropout=0.2, clip=0.3, noise_multiplier=0.1)

    def of_runs(p: Parameters, runs: slice) -> tuple[Trained, list[torch.Generator]]:
        own = order()[runs]
        given: dict[str, Any] = {"given": (x[runs], y[runs]), "generators": own}
        return trained(arch, training, noise, parameters=p, **given), own

    together, generators = of_runs(parameters, slice(0, R))
    beside, _ = of_runs(wild(parameters, 1), slice(0, R))
    tolerance = 1e-3 if dtype == torch.float32 else 1e-10
    for run in range(R):
        only = slice(run, run + 1)
        alone, own = of_runs(parameters.rows(only), only)
        assert_close(of(together, run), alone.parameters, tolerance)
        assert torch.equal(generators[run].get_state(), own[0].get_state())
        if run != 1:
            assert_close(of(beside, run), of(together, run), tolerance)
    assert beside.diverged.tolist() == [False, True, False]
    assert beside.epochs_done.tolist() == [20] * R  # with a bound nobody ends before the others


def test_refuses_what_does_not_fit_together() -> None:
    private, arch = Noise(clip=1.0), architecture()
    refused: list[tuple[str, Noise, dict[str, Any]]] = [
        (r"stop_loss=0.1 with clip=1.0.*use stop_loss=None", private, {"stop_loss": 0.1}),
        ("diverged_above=9.0 with clip=1.0", private, {"diverged_above": 9.0}),
        ("span=True, but .*use span=False or 'auto'", Noise(), {"span": True}),
    ]
    for message, noise, settings in refused:
        refuses(message, trained, arch, replace(ONE, **settings), noise)
    refuses("1 generators for 3 victims", trained, arch, ONE, Noise(), generators=order()[:1])
    trained(arch, replace(ONE, span="auto"), private)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("conv", [None, CONV], ids=["dense", "conv"])
def test_on_a_gpu(conv: Conv | None, batch_size: int | None) -> None:
    arch = architecture(bias="all", conv=conv, activation="gelu")
    parameters, (x, y) = victims(arch), data()
    training = Training(epochs=20, optimiser=GD, batch_size=batch_size)
    noise = Noise(dropout=0.2, clip=0.3, noise_multiplier=0.1)
    here, cuda = stepped(arch, noise, training), parameters.map(lambda t: t.cuda())
    there = stepped(arch, noise, training, parameters=cuda, given=(x.cuda(), y.cuda()))
    assert_close(there.map(lambda t: t.cpu()), here, 1e-9)

"""Training against torch's own, alone, stacked and in the span of the images; ends, resuming."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from recon_core.optimisers import Optimiser
from recon_core.victims.losses import Loss
from recon_core.victims.network import Conv
from recon_core.victims.noisy_training import Noise
from recon_core.victims.training import Training, train
from tests.recon_core.drawing import refuses
from tests.recon_core.victims.small_victims import (
    ADAM,
    GD,
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
from tests.recon_core.victims.torch_nets import torch_gradients, torch_trained


@pytest.mark.parametrize("kind", ["bce", "ce", "mse", "power", "huber"])
@pytest.mark.parametrize("conv", [None, Conv(kernel=3, channels=3)], ids=["dense", "conv"])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu"])
@pytest.mark.parametrize("bias", ["none", "first", "all"])
def test_a_step_is_the_gradient(bias: str, activation: str, conv: Conv | None, kind: str) -> None:
    """With gradient descent at rate 1, one epoch moves the weights by the gradient."""
    loss = Loss(kind=kind)  # type: ignore[arg-type]
    n_outputs = 3 if kind == "ce" else 1
    arch = architecture(n_outputs, bias=bias, activation=activation, conv=conv)
    parameters, (x, y) = victims(arch), data(n_outputs)
    training = Training(epochs=1, optimiser=Optimiser(rule="gd"), loss=loss)
    trained = train(arch, parameters, x, y, training=training).parameters
    expected = torch_gradients(arch, parameters, x, y, loss)
    triples = zip(parameters.tensors(), trained.tensors(), expected, strict=True)
    for before, after, gradient in triples:
        assert gradient.abs().max() > 1e-5
        torch.testing.assert_close(before - after, gradient, rtol=1e-10, atol=1e-14)


CASES = {
    "gd": Training(optimiser=Optimiser(rule="gd", lr=0.3)),
    "momentum and weight decay": Training(optimiser=GD, weight_decay=0.01),
    "adadelta": Training(),
    "adadelta with weight decay": Training(weight_decay=0.01),
    "adam": Training(optimiser=ADAM),
    "minibatches": Training(optimiser=GD, batch_size=3),
    "minibatches, adam, weight decay": Training(optimiser=ADAM, batch_size=4, weight_decay=0.1),
    "minibatches of one": Training(optimiser=Optimiser(rule="gd", lr=0.03), batch_size=1),
    "regression": Training(optimiser=GD, loss=Loss(kind="mse"), batch_size=3, weight_decay=7e-4),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_torch(case: str) -> None:
    training = replace(CASES[case], epochs=150 if CASES[case].batch_size is None else 30)
    arch = architecture(bias="all")
    theirs = torch_trained(arch, victims(arch), *data(), training, order())
    for before, after in zip(victims(arch).tensors(), theirs.tensors(), strict=True):
        assert (after - before).abs().max() > 0.01
    assert_close(trained(arch, training).parameters, theirs, 1e-9)


@pytest.mark.parametrize("n_outputs", [1, 3])
def test_reports_how_it_ended_and_leaves_its_arguments_alone(n_outputs: int) -> None:
    arch = architecture(n_outputs, activation="leaky_relu", leak=0.1)
    parameters, (x, y) = victims(arch, torch.float32), data(n_outputs, torch.float32)
    given = (*parameters.tensors(), x, y)
    copies = [tensor.clone() for tensor in given]
    loss = Loss(kind="ce" if n_outputs > 1 else "bce")
    training = Training(epochs=300, loss=loss)
    fractions: list[float] = []
    trained = train(arch, parameters, x, y, training=training, progress=fractions.append)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, given, strict=True))
    assert (fractions[-1], fractions) == (1.0, sorted(fractions))
    assert 20 < len(fractions) < 80
    assert trained.accuracy.tolist() == [1.0] * R
    assert bool((trained.margin_min > 1).all())
    phi = arch.forward(trained.parameters, x).output
    torch.testing.assert_close(trained.margins, loss.margins(phi, y))
    torch.testing.assert_close(trained.loss, loss.value(phi, y))
    assert torch.equal(trained.margin_min, trained.margins.amin(1))
    assert trained.epochs_done.tolist() == [300] * R
    assert not bool(trained.diverged.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["adadelta", "adam", "minibatches"])
def test_a_victim_does_not_depend_on_those_beside_it(case: str, dtype: torch.dtype) -> None:
    arch, training = architecture(bias="first"), replace(CASES[case], epochs=30)
    parameters, (x, y) = victims(arch, dtype), data(dtype=dtype)
    strangers = parameters.map(lambda w: torch.cat([-w[:1], w[1:2], 2 * w[2:]]))
    together, elsewhere = (trained(arch, training, parameters=p) for p in (parameters, strangers))
    assert_close(of(elsewhere, 1), of(together, 1), 0.0)
    assert not torch.equal(elsewhere.parameters.weights[0][2], together.parameters.weights[0][2])
    # In a stack of another size, other kernels run: equal to rounding only.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    for run in range(R):
        only = slice(run, run + 1)
        given: dict[str, Any] = {"parameters": parameters.rows(only), "given": (x[only], y[only])}
        alone = trained(arch, training, generators=order()[only], **given).parameters
        for stack, single in zip(of(together, run).tensors(), alone.tensors(), strict=True):
            torch.testing.assert_close(stack, single, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stop_every", [1, 7, 100])
def test_a_diverging_victim_disturbs_nobody(stop_every: int) -> None:
    """Nor does it matter when it leaves the stack (here: after 1, 7, or all 30 epochs)."""
    arch = architecture(bias="all")
    parameters = victims(arch, torch.float32)
    training = Training(epochs=30, optimiser=GD, stop_every=stop_every)
    calm, other = (trained(arch, training, parameters=p) for p in (parameters, wild(parameters)))
    assert other.diverged.tolist() == [False, True, False]
    assert other.epochs_done.tolist() == [30, min(stop_every, 30), 30]
    assert not bool(other.parameters.isfinite()[1])
    for run in (0, 2):
        assert_close(of(other, run), of(calm, run), 1e-5)
        torch.testing.assert_close(calm.loss[run], other.loss[run])


@pytest.mark.parametrize("noise", [None, Noise(dropout=0.2)], ids=["plain", "dropout"])
def test_a_loss_above_the_limit_is_divergence(noise: Noise | None) -> None:
    arch = architecture(bias="all" if noise else "none")
    training = Training(epochs=50, stop_every=5, optimiser=GD if noise else Optimiser())
    limit = float(trained(arch, replace(training, epochs=5), noise).loss.median())
    ended = trained(arch, replace(training, diverged_above=limit), noise)
    assert ended.diverged.sum() == 1
    assert ended.epochs_done[ended.diverged].tolist() == [5]
    assert ended.epochs_done[~ended.diverged].tolist() == [50, 50]
    assert bool(ended.parameters.isfinite().all())
    assert float(ended.loss[ended.diverged]) > limit


def test_all_may_diverge() -> None:
    training = Training(epochs=300, stop_every=10, optimiser=Optimiser(rule="gd", lr=1e20))
    arch, fractions = architecture(), list[float]()
    start = victims(arch, torch.float32)
    ended = trained(arch, training, parameters=start, progress=fractions.append)
    assert ended.diverged.tolist() == [True] * R
    assert ended.epochs_done.tolist() == [10] * R
    assert fractions[-1] == 1.0


@pytest.mark.parametrize(
    ("case", "noise"),
    [
        *((case, None) for case in ("adadelta", "momentum and weight decay", "adam")),
        ("minibatches", None),
        ("momentum and weight decay", Noise(dropout=0.2)),
    ],
)
def test_victims_stop_where_their_loss_is_low_and_others_go_on(
    case: str, noise: Noise | None
) -> None:
    arch = architecture(bias="all")
    plain = replace(CASES[case], epochs=60, stop_every=5)
    plain = replace(plain, weight_decay=0.0) if noise else plain
    losses = [trained(arch, replace(plain, epochs=5 * k), noise).loss for k in range(1, 13)]
    # The limit that the fastest reaches first and the slowest never.
    limit = float(losses[-1].sort().values[1:].mean())
    first = [
        int((column < limit).nonzero()[0]) if (column < limit).any() else 11
        for column in torch.stack(losses).T
    ]
    expected = [5 * (place + 1) for place in first]
    assert len(set(expected)) > 1, "all ended at once, so nothing was compacted"
    stopped = trained(arch, replace(plain, stop_loss=limit), noise)
    assert stopped.epochs_done.tolist() == expected
    assert not bool(stopped.diverged.any())
    for run, epochs in enumerate(expected):
        alone = trained(arch, replace(plain, epochs=epochs), noise)
        assert_close(of(stopped, run), of(alone, run), 1e-10)
        torch.testing.assert_close(stopped.margins[run], alone.margins[run], rtol=1e-10, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES])
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu(case: str, graphs: bool) -> None:
    arch = architecture(bias="all")
    parameters, (x, y) = victims(arch), data()
    training = replace(CASES[case], epochs=60)
    here = train(arch, parameters, x, y, training=training, generators=order())
    there = train(
        arch,
        parameters.map(lambda tensor: tensor.cuda()),
        x.cuda(),
        y.cuda(),
        training=training,
        generators=order(),
        graphs=graphs,
    )
    assert_close(there.parameters.map(lambda tensor: tensor.cpu()), here.parameters, 1e-9)


def test_refuses_what_does_not_fit_together() -> None:
    arch, (x, y) = architecture(), data()
    one, batches = Training(epochs=1), Training(epochs=1, batch_size=2)
    several = Training(epochs=1, loss=Loss(kind="ce"))
    for message, training, given in (
        (r"3 victims of 20 inputs came with .*\(2, 8, 20\)", one, (x[:2], y[:2])),
        (r"torch.float32.*torch.float64.*all the same", one, (x.float(), y.float())),
        ("'bce' needs -1 and", one, (x, y + 1)),
        ("'ce' needs one per class", several, (x, y)),
    ):
        for noise in (None, Noise()):
            refuses(message, trained, arch, training, noise, given=given)
    message = r"a generator for each of 3 victims.*got 1"
    refuses(message, trained, arch, batches, generators=order()[:1])


PLAIN_GD = Optimiser(rule="gd", lr=0.1)
DIRECT = Training(epochs=300, optimiser=PLAIN_GD)

SPAN_CASES = {
    "gd": DIRECT,
    "momentum": replace(DIRECT, optimiser=Optimiser(rule="gd", lr=0.03, momentum=0.9)),
    "weight decay": replace(DIRECT, weight_decay=0.01),
    "momentum and weight decay": replace(
        DIRECT, optimiser=Optimiser(rule="gd", lr=0.03, momentum=0.9), weight_decay=0.01
    ),
    "regression": replace(DIRECT, loss=Loss(kind="mse"), weight_decay=1e-3),
    "minibatches": replace(DIRECT, epochs=100, batch_size=3),
    "minibatches, momentum and weight decay": replace(
        DIRECT,
        epochs=100,
        batch_size=4,
        optimiser=Optimiser(rule="gd", lr=0.03, momentum=0.9),
        weight_decay=0.01,
    ),
}


@pytest.mark.parametrize("bias", ["none", "first", "all"])
@pytest.mark.parametrize("case", SPAN_CASES)
def test_equals_direct_training(case: str, bias: str) -> None:
    arch = architecture(bias=bias)
    direct = trained(arch, SPAN_CASES[case])
    in_span = trained(arch, replace(SPAN_CASES[case], span=True))
    for theirs, before in zip(direct.parameters.tensors(), victims(arch).tensors(), strict=True):
        assert (theirs - before).abs().max() > 0.01
    assert_close(in_span.parameters, direct.parameters, 1e-10)
    torch.testing.assert_close(in_span.margins, direct.margins, rtol=1e-10, atol=1e-12)


def test_a_victim_that_ends_leaves_its_weights() -> None:
    """Compaction takes rows of everything, the images' inner products included."""
    arch = architecture(bias="all")
    losses = trained(arch, replace(DIRECT, epochs=60)).loss
    stop = replace(DIRECT, epochs=60, stop_every=5, stop_loss=float(losses.max()) * 1.001)
    direct, ours = (trained(arch, replace(stop, span=span)) for span in (False, True))
    assert ours.epochs_done.tolist() == direct.epochs_done.tolist()
    assert len(set(ours.epochs_done.tolist())) > 1
    assert_close(ours.parameters, direct.parameters, 1e-10)


@pytest.mark.parametrize(
    ("optimiser", "conv", "n", "spans"),
    [
        (PLAIN_GD, None, 19, True),
        (PLAIN_GD, None, 20, False),  # not cheaper with as many images as pixels
        (Optimiser(), None, 8, False),
        (Optimiser(rule="adam"), None, 8, False),
        (PLAIN_GD, Conv(kernel=2, channels=2), 8, False),
    ],
)
def test_auto_is_the_span_where_it_can_be_and_is_cheaper(
    optimiser: Optimiser, conv: Conv | None, n: int, spans: bool
) -> None:
    arch = architecture(conv=conv)
    x, y = torch.randn(R, n, 20).double(), torch.ones(R, n).double()
    training = Training(epochs=3, optimiser=optimiser)

    def first(span: bool | str) -> torch.Tensor:
        how = replace(training, span=span)  # type: ignore[arg-type]
        return train(arch, victims(arch), x, y, training=how).parameters.weights[0]

    assert torch.equal(first("auto"), first(spans))
    if spans:
        assert not torch.equal(first("auto"), first(False))
    elif optimiser == PLAIN_GD and conv is not None:
        refuses("the first layer is a convolution", first, True)

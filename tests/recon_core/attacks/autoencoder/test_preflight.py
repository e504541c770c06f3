"""Preflight of a black box: numbers against true Jacobians, words against networks made for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recon_core.attacks.autoencoder.preflight import (
    Samples,
    autoencoder_preflight,
    reconstruction_errors,
    row_dependence,
    spectral_radii,
)
from recon_core.victims.autoencoder import FullyConnected, initial_weights
from tests.recon_core.drawing import generator, generators

SHAPE = (1, 2, 3)
D = 6


def draw(n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(n, *SHAPE, generator=generator(seed), dtype=dtype)


def linear(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: (x.flatten(1) @ matrix.mT.to(x)).view_as(x)


def radius(matrix: Tensor) -> float:
    return float(torch.linalg.eigvals(matrix).abs().max())


@pytest.mark.parametrize("activation", ["softplus", "leaky_relu"])
def test_the_radius_is_that_of_the_true_jacobian(activation: str) -> None:
    model = FullyConnected(depth=3, width=16, activation=activation).on(SHAPE)  # type: ignore[arg-type]
    weights = initial_weights(model, generators(1), dtype=torch.float64)
    weights = {name: 2 * tensor for name, tensor in weights.items()}

    def f(x: Tensor) -> Tensor:
        return model.forward(weights, x.unsqueeze(0)).squeeze(0)

    x = draw(4, 0)
    found = spectral_radii(f, x, generators(4), n_steps=400)
    for image, value in zip(x, found.tolist(), strict=True):
        jacobian = torch.func.jacrev(lambda z: f(z.view(1, *SHAPE)).flatten())(image.flatten())
        assert value == pytest.approx(radius(jacobian), rel=2e-2)


def test_a_matrix_that_is_not_symmetric_and_float32() -> None:
    matrix = torch.diag(torch.tensor([1.5, 0.5, 0.2, 0.1, 0.1, 0.0])) + torch.ones(D, D).triu(1)
    found = spectral_radii(linear(matrix), draw(3, 2, torch.float32), generators(3))
    assert found.tolist() == pytest.approx([1.5] * 3, rel=2e-3)


def test_a_constant_has_radius_zero_and_bad_calls_are_refused() -> None:
    constant = draw(1, 0)
    found = spectral_radii(constant.expand_as, draw(2, 1), generators(2))
    assert float(found.max()) < 1e-100
    with pytest.raises(ValueError, match="1 generators for 2 images"):
        spectral_radii(lambda x: x, draw(2, 1), generators(1))
    with pytest.raises(ValueError, match="f gives"):
        reconstruction_errors(lambda x: x[:, :, :1], draw(2, 1))


def test_rows_that_depend_on_each_other_are_found() -> None:
    x = draw(3, 0)
    assert row_dependence(lambda x: 0.5 * x, x) == 0
    assert row_dependence(lambda x: x - x.mean(0, keepdim=True), x) > 0.1


def memory(images: Tensor) -> Callable[[Tensor], Tensor]:
    """Gives the nearest of its images, and hardly anything of what it is given."""

    def f(x: Tensor) -> Tensor:
        nearest = torch.cdist(x.flatten(1), images.flatten(1).to(x)).argmin(1)
        return images.to(x)[nearest] + 1e-3 * (x - images.to(x)[nearest])

    return f


def preflight_of(f: Callable[[Tensor], Tensor], *, train: bool = True, control: bool = True):
    images = draw(5, 10)
    samples = Samples(
        images=images if train else None,
        control=draw(5, 11) if control else None,
        noise=draw(8, 12),
        generators=generators,
    )
    found = autoencoder_preflight(f, samples, remedy="Try softplus.")
    return found, {finding.subject: finding for finding in found.findings}


def test_a_memory_is_good() -> None:
    found, _subjects = preflight_of(memory(draw(5, 10)))
    assert found.outlook == "good"
    assert {finding.level for finding in found.findings} == {"ok"}
    assert found.numbers["radius_train_max"] == pytest.approx(1e-3, rel=1e-2)
    assert found.numbers["control_over_train"] > 1e6


def test_the_identity_is_poor() -> None:
    found, subjects = preflight_of(lambda x: 0.999 * x)
    assert found.outlook == "poor"
    assert not found.stopped
    assert subjects["little is memorised"].level == "warning"
    assert subjects["close to the identity"].level == "warning"


@pytest.mark.parametrize(
    ("f", "subject", "said"),
    [
        (lambda x: 0 * x, "reconstruction", "Try softplus."),
        (lambda x: x * torch.nan, "not finite", "NaN"),
        (lambda x: 0.9 * x + 0.1 * x.mean(0, keepdim=True), "rows depend on each other", "eval()"),
        (lambda x: x + 0.01 * torch.randn_like(x), "rows depend on each other", "dropout"),
    ],
)
def test_what_cannot_work_is_a_stop(f: Callable[[Tensor], Tensor], subject: str, said: str) -> None:
    found, subjects = preflight_of(f)
    assert found.stopped
    assert subjects[subject].level == "stop"
    assert said in subjects[subject].text


def test_reservations() -> None:
    found, subjects = preflight_of(memory(draw(5, 10)), control=False)
    assert (found.outlook, subjects["no control"].level) == ("open", "warning")
    found, subjects = preflight_of(memory(draw(5, 10)), train=False)
    assert "train_loss" not in found.numbers
    blurred = memory(draw(5, 10) + 0.05)
    _found, subjects = preflight_of(blurred)
    assert subjects["reconstruction"].level == "warning"
    _found, subjects = preflight_of(lambda x: torch.where(x > 0.9, x + 3, x), train=False)
    assert subjects["range"].level == "warning"
    images = draw(5, 10)
    unstable = memory(images)
    _found, subjects = preflight_of(lambda x: unstable(x) + 1.5 * (x - unstable(x)))
    assert subjects["contraction"].level == "warning"

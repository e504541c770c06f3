"""Every loss against `torch.nn.functional`, its gradient against autograd, and both at extremes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.victims.losses import Loss

R, N, C = 3, 6, 4
Torchs = Callable[[Tensor, Tensor], Tensor]

BINARY: dict[str, tuple[Loss, Torchs]] = {
    "bce": (Loss(), lambda phi, y: F.binary_cross_entropy_with_logits(phi, (y + 1) / 2)),
    "mse": (Loss(kind="mse"), F.mse_loss),
    "power 2.5": (Loss(kind="power"), lambda phi, y: (phi - y).abs().pow(2.5).mean()),
    "power 4": (Loss(kind="power", power=4.0), lambda phi, y: (phi - y).pow(4).mean()),
    "huber 1": (Loss(kind="huber"), F.huber_loss),
    "huber .3": (
        Loss(kind="huber", delta=0.3),
        lambda phi, y: F.huber_loss(phi, y, delta=0.3),
    ),
}
CE = Loss(kind="ce")


def binary() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    phi = 2 * torch.randn(R, N, 1, generator=generator, dtype=torch.float64)
    return phi, torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(N // 2).expand(R, N)


def classes() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    phi = 2 * torch.randn(R, N, C, generator=generator, dtype=torch.float64)
    return phi, torch.randint(C, (R, N), generator=generator)


@pytest.mark.parametrize("name", BINARY)
def test_value_and_gradient_equal_torchs(name: str) -> None:
    loss, theirs = BINARY[name]
    phi, y = binary()
    phi.requires_grad_()
    expected = torch.stack([theirs(phi[run, :, 0], y[run]) for run in range(R)])
    (gradient,) = torch.autograd.grad(expected.sum(), phi)
    torch.testing.assert_close(loss.value(phi, y), expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(loss.gradient(phi.detach(), y), gradient, rtol=1e-12, atol=1e-16)


def test_cross_entropy_equals_torchs() -> None:
    phi, y = classes()
    phi.requires_grad_()
    expected = torch.stack([F.cross_entropy(phi[run], y[run]) for run in range(R)])
    (gradient,) = torch.autograd.grad(expected.sum(), phi)
    torch.testing.assert_close(CE.value(phi, y), expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(CE.gradient(phi.detach(), y), gradient, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("name", [*BINARY, "ce"])
def test_gradient_is_the_derivative_of_the_value(name: str) -> None:
    loss = CE if name == "ce" else BINARY[name][0]
    phi, y = classes() if name == "ce" else binary()
    phi.requires_grad_()
    (expected,) = torch.autograd.grad(loss.value(phi, y).sum(), phi)
    torch.testing.assert_close(loss.gradient(phi.detach(), y), expected, rtol=1e-12, atol=1e-16)


def test_two_classes_are_the_binary_case() -> None:
    phi, y = binary()
    pair = torch.cat([torch.zeros_like(phi), phi], 2)
    labels = (y > 0).long()
    torch.testing.assert_close(CE.value(pair, labels), Loss().value(phi, y), rtol=1e-13, atol=0)
    torch.testing.assert_close(CE.margins(pair, labels), Loss().margins(phi, y))
    torch.testing.assert_close(
        CE.gradient(pair, labels)[..., 1:], Loss().gradient(phi, y), rtol=1e-12, atol=1e-16
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [-2000.0, -80.0, -21.0, 60.0, 80.0, 2000.0])
def test_exact_where_outputs_are_large(margin: float, dtype: torch.dtype) -> None:
    """log(1 + e^-m) is e^-m for large m and -m for small; its derivative -e^-m and -1."""
    value = math.exp(-margin) if margin > 0 else math.log1p(math.exp(margin)) - margin
    slope = math.exp(-margin) if margin > 0 else 1.0
    tiny = float(torch.finfo(dtype).tiny)
    for y in (-1.0, 1.0):
        phi, labels = (
            torch.full((1, 1, 1), y * margin, dtype=dtype),
            torch.full((1, 1), y).to(dtype),
        )
        rounding = 1e-5 if dtype == torch.float32 else 1e-13
        assert float(Loss().value(phi, labels)) == pytest.approx(value, rel=rounding, abs=tiny)
        gradient = float(Loss().gradient(phi, labels))
        assert gradient == pytest.approx(-y * slope, rel=1e-5, abs=tiny)
    # Three classes: the own one ahead of two others by the same margin, so twice as much is left.
    phi = torch.tensor([[[margin, 0.0, 0.0]]], dtype=dtype)
    labels = torch.tensor([[0]])
    twice = 2 * value if margin > 0 else value + math.log(2)
    assert float(CE.value(phi, labels)) == pytest.approx(twice, rel=1e-5, abs=tiny)
    gradient = CE.gradient(phi, labels).flatten().tolist()
    half = slope if margin > 0 else 0.5
    assert gradient == pytest.approx([-2 * half, half, half], rel=1e-5, abs=tiny)
    assert sum(gradient) == pytest.approx(0, abs=1e-7 * half)


def test_margins() -> None:
    phi = torch.tensor([[[1.0, 5.0, 2.0], [1.0, 5.0, 2.0], [7.0, 7.0, 0.0]]])
    assert CE.margins(phi, torch.tensor([[1, 2, 0]])).tolist() == [[3.0, -3.0, 0.0]]
    y = torch.tensor([[1.0, -1.0, -1.0]])
    assert Loss().margins(phi[..., :1], y).tolist() == [[1.0, -1.0, -7.0]]


def test_nonfinite_outputs_give_no_finite_loss() -> None:
    phi = torch.full((1, 2, 1), torch.nan)
    y = torch.tensor([[-1.0, 1.0]])
    for loss, _ in BINARY.values():
        assert not bool(loss.value(phi, y).isfinite().any())
    assert not bool(CE.value(phi.expand(1, 2, 3), torch.tensor([[0, 2]])).isfinite().any())


@pytest.mark.parametrize(
    ("loss", "y", "n_outputs", "message"),
    [
        (Loss(), [0.0, 1.0], 1, r"labels are \[0.0, 1.0\]"),
        (Loss(), [-1, 1], 1, r"torch.int64\); 'bce' needs -1 and \+1"),
        (Loss(), [-1.0, 1.0], 2, "loss 'bce' on 2 outputs"),
        (Loss(kind="huber"), list(range(10)), 1, r"labels are \[0, 1, 2, 3, 4, 5, 6, 7\] and more"),
        (CE, [0, 1], 1, "loss 'ce' on 1 outputs"),
        (CE, [0, 3], 3, "integer classes from 0 to 2"),
        (CE, [-1, 1], 3, r"labels are \[-1, 1\]"),
        (CE, [0.0, 1.0], 3, "torch.float32"),
    ],
)
def test_refuses_labels(loss: Loss, y: list[float], n_outputs: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss.check(torch.tensor([y]), n_outputs)


def test_accepts_labels() -> None:
    Loss(kind="mse").check(torch.tensor([[-1.0, 1.0]]), 1)
    CE.check(torch.tensor([[0, 2]]), 3)


@pytest.mark.parametrize("settings", [{"power": 1.0}, {"power": math.nan}, {"delta": 0.0}])
def test_refuses_settings(settings: dict[str, float]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name}="):
        Loss(**settings)  # type: ignore[arg-type]

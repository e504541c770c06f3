"""What inputs were normalised by comes out of their span."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from recon_core.attacks.span.learning import metric_of
from recon_core.attacks.span.normalisation import channel_scales, undone
from recon_core.attacks.span.separator import Card, Separator
from tests.recon_core.drawing import generator

SIDE, N_PUBLIC, N = 16, 1500, 60


def _images(channels: int) -> Tensor:
    """Bars of different brightness on a dark ground; of three channels in a few soft colours."""
    draw = generator(3)
    n = N_PUBLIC + N
    light = 0.1 * torch.rand(n, 1, 1, 1, generator=draw).expand(n, 1, SIDE, SIDE).clone()
    for picture in light:
        for row, column, length in torch.randint(0, 10, (4, 3), generator=draw).tolist():
            picture[0, row : row + 3, column : column + 2 + length // 2] = float(
                torch.rand(1, generator=draw)
            )
    if channels == 1:
        return light
    colours = 1 + 0.1 * torch.randn(n, 3, 2, 2, generator=draw)
    return (light * interpolate(colours, SIDE, mode="bilinear")).clamp(0, 1)


def _separator(public: Tensor, *, centred: bool) -> Separator:
    c = public.shape[1]
    card = Card(
        shape=(c, SIDE, SIDE), widths=(8,), patch=2, centred=centred, mirrored=False,
        shifted=0, floor=1e-3, source="tiles", n_pictures=len(public), sha256="",
        n_steps=1, alone=0.0, spread=1.0,
    )  # fmt: skip
    mean = public.mean(0)
    seen = public - mean if centred else public
    return Separator(
        card, torch.nn.Identity(), metric_of(seen, floor=1e-3, mirrored=False), mean.flatten()
    )


def _mixed(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """(directions of inputs (n, c, h, w) with biases, the matrix that unmixes them)."""
    n = len(inputs)
    mixing = torch.randn(n, n, generator=generator(6)) + 4 * torch.eye(n)
    whole = torch.cat([inputs.flatten(1), torch.ones(n, 1)], 1)
    return mixing @ whole, torch.linalg.inv(mixing)


IMAGENET = (torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225]))
CASES = {
    "as they are": (torch.zeros(3), torch.ones(3)),
    "imagenet": IMAGENET,
    "half": (torch.full((3,), 0.5), torch.full((3,), 0.5)),
    "channels apart": (torch.tensor([0.5, 0.4, 0.4]), torch.tensor([0.2, 0.25, 0.35])),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("centred", [False, True])
def test_colour_is_told(case: str, centred: bool) -> None:
    images, (s, t) = _images(3), CASES[case]
    separator, private = _separator(images[:N_PUBLIC], centred=centred), images[N_PUBLIC:]
    rows, unmixing = _mixed((private - s[:, None, None]) / t[:, None, None])
    scales = channel_scales(separator, rows).float()
    assert torch.allclose(scales, t / t.log().mean().exp(), rtol=0.01)
    seen = unmixing @ undone(separator, rows, scales)
    assert _distance(seen, private.flatten(1) - (separator.mean if centred else 0)) < 0.05


def test_grey_is_told() -> None:
    images = _images(1)
    separator, private = _separator(images[:N_PUBLIC], centred=False), images[N_PUBLIC:]
    mean = separator.mean.view(1, SIDE, SIDE)
    planted = [(s, t) for s in (torch.zeros(1), mean.mean(), torch.tensor(0.5)) for t in (1, 0.31)]
    for s, t in [*planted, (mean, 1)]:
        rows, unmixing = _mixed((private - s) / t)
        seen = unmixing @ undone(separator, rows, torch.ones(1))
        assert _distance(seen, private.flatten(1)) < 0.07
        assert not s.any() or _distance(unmixing @ rows[:, :-1], private.flatten(1)) > 0.2


def test_rows_without_biases_are_only_scaled() -> None:
    images = _images(3)
    separator = _separator(images[:N_PUBLIC], centred=True)
    rows, scales = images[N_PUBLIC:].flatten(1), torch.tensor([1.0, 2.0, 0.5])
    wanted = images[N_PUBLIC:] * scales[:, None, None]
    assert torch.equal(undone(separator, rows, scales), wanted.flatten(1))
    untrained = torch.cat([rows, torch.zeros(N, 1)], 1)
    assert torch.equal(undone(separator, untrained, scales), wanted.flatten(1))


def _distance(found: Tensor, truth: Tensor) -> float:
    """Relative to the truth, at the best common factor."""
    factor = (found * truth).sum() / found.square().sum()
    return float((factor * found - truth).norm() / truth.norm())

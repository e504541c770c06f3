"""Images by descent: exact where the rest is known, near where it is noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recon_core.attacks.instahide.descent import Descent, descend, in_one_sign
from recon_core.attacks.instahide.mixing import Encodings, InstaHide, mixture


def case(n: int = 12, d: int = 60, k_pub: int = 2) -> tuple[torch.Tensor, torch.Tensor, Encodings]:
    drawn = torch.Generator().manual_seed(0)
    private = torch.randn(n, d, generator=drawn).mul(0.4).clamp(-1, 1)
    public = torch.randn(50, d, generator=drawn).mul(0.4).clamp(-1, 1)
    return private, public, InstaHide(k_pub=k_pub).encode(private, public, generator=drawn)


def test_without_public_images_a_spectral_start_finds_every_pixel_up_to_its_sign() -> None:
    private, _public, e = case(k_pub=0)
    found = descend(
        e.y, e.private, e.private_weights, 12, generator=torch.Generator().manual_seed(2)
    )
    sign = (found * private).sum(0).sign()
    near = ((found * sign - private).abs().amax(0) < 1e-2).float().mean()
    assert near > 0.8


def test_unknown_public_images_leave_an_approximation_that_knowing_their_spread_improves() -> None:
    private, public, e = case()
    spread = float(mixture(public, e.public, e.public_weights).std())
    likeness = []
    for s in (0.0, spread):
        found = descend(
            e.y,
            e.private,
            e.private_weights,
            12,
            generator=torch.Generator().manual_seed(2),
            how=Descent(spread=s),
        )
        sign = (found * private).sum(0).sign()
        both = torch.stack([(found * sign).flatten(), private.flatten()])
        likeness.append(float(torch.corrcoef(both)[0, 1]))
    assert likeness[0] > 0.5
    assert likeness[1] > likeness[0]


def test_more_starts_never_leave_more() -> None:
    _private, _public, e = case(k_pub=0)
    left = []
    for k in (1, 4):
        drawn, how = torch.Generator().manual_seed(2), Descent(n_starts=k, n_steps=60)
        found = descend(e.y, e.private, e.private_weights, 12, generator=drawn, how=how)
        off = mixture(found, e.private, e.private_weights).abs() - e.y
        left.append(float(off.square().sum()))
    assert left[1] <= left[0] + 1e-6


def test_unknown_encodings_and_images_without_any_are_nan() -> None:
    _private, _public, e = case(k_pub=0)
    edges = e.private.clone()
    edges[(edges == 3).any(1)] = -1
    found = descend(
        e.y,
        edges,
        e.private_weights,
        12,
        generator=torch.Generator().manual_seed(2),
        how=Descent(n_steps=3),
    )
    assert bool(found[3].isnan().all())
    assert not bool(found[4:].isnan().any())


def test_signs_of_pixels_are_one_where_neighbours_agree() -> None:
    drawn = torch.Generator().manual_seed(0)
    smooth = torch.randn(30, 3, 1, 1, generator=drawn) + torch.linspace(0, 1, 8)
    images = (smooth + 0.1 * torch.randn(30, 3, 8, 8, generator=drawn)).flatten(1)
    smooth_only = (torch.randn(30, 1, generator=drawn) + 0.2 * images).clone()
    hidden = smooth_only * (torch.randint(0, 2, (192,), generator=drawn) * 2 - 1)
    found = in_one_sign(hidden, (3, 8, 8))
    sign = (found * smooth_only).sum().sign()
    torch.testing.assert_close(found * sign, smooth_only)


def test_total_variation_makes_images_smoother() -> None:
    drawn = torch.Generator().manual_seed(0)
    private, public = torch.rand(8, 64, generator=drawn), torch.rand(30, 64, generator=drawn)
    e = InstaHide(k_pub=2, n_epochs=10).encode(private, public, generator=drawn)
    rough = []
    for weight in (0.0, 3.0):
        how = Descent(n_steps=40, n_smooth=1, total_variation=weight)
        found = descend(
            e.y, e.private, e.private_weights, 8, generator=drawn, shape=(1, 8, 8), how=how
        )
        rough.append(float(found.reshape(8, 8, 8).diff(dim=-1).abs().mean()))
    assert rough[1] < 0.7 * rough[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_steps": 0}, "n_steps=0"),
        ({"lr": 0.0}, r"lr=0\.0"),
        ({"low": 1.0}, r"low=1\.0"),
        ({"spread": -1.0}, r"spread=-1\.0"),
        ({"n_smooth": -1}, "n_smooth=-1"),
        ({"total_variation": 1.0}, "n_smooth=0"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(Descent(), **changes)


def test_edges_and_shapes_that_do_not_fit_are_errors() -> None:
    _private, _public, e = case()
    drawn = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="n - 1 = 4"):
        descend(e.y, e.private, e.private_weights, 5, generator=drawn)
    with pytest.raises(ValueError, match="60 pixels"):
        descend(e.y, e.private, e.private_weights, 12, generator=drawn, how=Descent(n_smooth=1))

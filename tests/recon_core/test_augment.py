"""The augmentation pipe: identity, exact flips, each of the nine parameters, the wavelet filter."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from recon_core import augment
from recon_core.augment import (
    AugmentParameters,
    apply_augmentation,
    augment_images,
    draw_parameters,
    mirrored_labels,
    resample,
)
from tests.recon_core.drawing import generator, refuses

SIDE = 32


def picture(n: int = 1, seed: int = 0) -> Tensor:
    """Smooth uint8 images, so that band-limited resampling has something it can represent."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 6, 6, generator=generator)
    smooth = torch.nn.functional.interpolate(
        coarse, size=(SIDE, SIDE), mode="bicubic", align_corners=True
    )
    return (smooth * 255).round().clamp(0, 255).to(torch.uint8)


def blob(x: float, y: float, *, sigma_x: float = 2.0, sigma_y: float = 2.0) -> Tensor:
    """A Gaussian spot, x to the right and y downwards in pixels from the image's centre."""
    axis = torch.arange(SIDE) - (SIDE - 1) / 2
    spot = torch.exp(
        -((axis[:, None] - y) ** 2) / (2 * sigma_y**2) - (axis[None, :] - x) ** 2 / (2 * sigma_x**2)
    )
    return (200 * spot).round().to(torch.uint8).expand(1, 3, SIDE, SIDE).clone()


def moments(image: Tensor) -> tuple[float, float, float, float]:
    """Centroid (x, y) in pixels from the centre and the standard deviations along x and y."""
    axis = torch.arange(SIDE) - (SIDE - 1) / 2
    mass = image[0, 0].double()
    total = mass.sum()
    x, y = (mass.sum(0) * axis).sum() / total, (mass.sum(1) * axis).sum() / total
    var_x = (mass.sum(0) * (axis - x) ** 2).sum() / total
    var_y = (mass.sum(1) * (axis - y) ** 2).sum() / total
    return float(x), float(y), float(var_x.sqrt()), float(var_y.sqrt())


def parameters(n: int = 1, **changed: Tensor) -> AugmentParameters:
    fields = {
        "xflip": torch.zeros(n, dtype=torch.bool),
        "yflip": torch.zeros(n, dtype=torch.bool),
        "scale": torch.zeros(n),
        "angle": torch.zeros(n),
        "aniso": torch.zeros(n),
        "aniso_angle": torch.zeros(n),
        "shift": torch.zeros(n, 2),
    }
    return AugmentParameters(**(fields | changed))


def test_p_zero_is_the_identity_with_zero_labels() -> None:
    images = torch.randint(0, 256, (16, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator())
    augmented, labels = augment_images(images, p=0.0, generator=generator(1))
    assert torch.equal(augmented, images)
    assert torch.equal(labels, torch.zeros(16, 9))


def test_the_wavelet_filter_is_orthonormal_with_six_vanishing_moments() -> None:
    taps = np.array(augment._SYM6)
    assert taps.sum() == pytest.approx(math.sqrt(2), abs=1e-9)
    for shift in range(6):
        product = (taps[2 * shift :] * taps[: len(taps) - 2 * shift]).sum()
        assert product == pytest.approx(float(shift == 0), abs=1e-9)
    k = np.arange(12)
    for moment in range(6):
        assert abs(((-1.0) ** k * (k / 11) ** moment * taps).sum()) < 1e-8


def test_resampling_by_the_identity_reproduces_any_image() -> None:
    noise = torch.rand(2, 3, 12, 16, generator=generator(), dtype=torch.float64)
    identity = torch.eye(2, 3, dtype=torch.float64).expand(2, 2, 3)
    assert torch.allclose(resample(noise, identity), noise, atol=1e-9)


def test_flips_are_exact() -> None:
    images = torch.randint(0, 256, (3, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator())
    flipped = apply_augmentation(
        images,
        parameters(
            3, xflip=torch.tensor([True, False, True]), yflip=torch.tensor([False, True, True])
        ),
    )
    assert torch.equal(flipped[0], images[0].flip(2))
    assert torch.equal(flipped[1], images[1].flip(1))
    assert torch.equal(flipped[2], images[2].flip(1).flip(2))


def test_translation_by_whole_pixels_equals_shifting_the_mirrored_image() -> None:
    image = picture()
    # 1 unit is 1/8 of 32 pixels: 4 to the right, 8 upwards.
    moved = apply_augmentation(image, parameters(shift=torch.tensor([[1.0, -2.0]])))
    padded = torch.nn.functional.pad(image.float(), (4, 0, 0, 8), mode="reflect")
    assert (moved.float() - padded[:, :, 8:, :SIDE]).abs().max() <= 1


def test_a_far_translation_keeps_reflecting() -> None:
    image = picture()
    # One period of the mirrored image is 62 pixels: 15.5 units bring everything back.
    moved = apply_augmentation(image, parameters(shift=torch.tensor([[15.5, -31.0]])))
    assert (moved.int() - image.int()).abs().max() <= 1


QUARTER = math.pi / 2
LARGER, SMALLER = 2**0.4, 2**-0.4
MOVED: dict[str, tuple[float, dict[str, list[object]], tuple[float, float, float, float]]] = {
    "octaves enlarge": (0, {"scale": [2.0]}, (0, 0, LARGER, LARGER)),
    "rotation is counter-clockwise": (6, {"angle": [QUARTER]}, (0, -6, 1, 1)),
    "by 30 degrees": (6, {"angle": [math.pi / 6]}, (5.196, -3, 1, 1)),
    "stretched along x": (0, {"aniso": [2.0], "aniso_angle": [0.0]}, (0, 0, LARGER, SMALLER)),
    "along y": (0, {"aniso": [2.0], "aniso_angle": [QUARTER]}, (0, 0, SMALLER, LARGER)),
    "moved after the rest": (6, {"angle": [QUARTER], "shift": [[1.0, 0.0]]}, (4, -6, 1, 1)),
}
"""A spot's x, what is done to it, and its centre and the factors of its deviations then."""


@pytest.mark.parametrize("case", MOVED)
def test_a_spot_goes_where_the_parameters_say(case: str) -> None:
    at, changed, expected = MOVED[case]
    tensors = {name: torch.tensor(value) for name, value in changed.items()}
    x, y, sigma_x, sigma_y = moments(apply_augmentation(blob(at, 0), parameters(**tensors)))
    before = moments(blob(0, 0))[2]
    assert (x, y) == pytest.approx(expected[:2], abs=0.05)
    assert (sigma_x / before, sigma_y / before) == pytest.approx(expected[2:], rel=0.03)


def test_labels_in_edm_order() -> None:
    labels = parameters(
        xflip=torch.tensor([True]),
        scale=torch.tensor([0.7]),
        angle=torch.tensor([math.pi / 3]),
        aniso=torch.tensor([2.0]),
        aniso_angle=torch.tensor([math.pi / 6]),
        shift=torch.tensor([[0.3, -0.4]]),
    ).labels()
    expected = [1, 0, 0.7, -0.5, math.sqrt(3) / 2, math.sqrt(3), 1.0, 0.3, -0.4]
    assert torch.allclose(labels, torch.tensor([expected]), atol=1e-6)


def test_nine_labels_say_all_that_was_done_to_an_image() -> None:
    """For a stretch, of which the sign of `aniso` is 1: (-a, phi + pi) would have its labels."""
    drawn = augment.draw_parameters(64, p=1.0, generator=generator(8))
    drawn = dataclasses.replace(drawn, aniso=drawn.aniso.abs())
    x, y, scale, cos, sin, a_cos, a_sin, right, down = drawn.labels().unbind(1)
    told = AugmentParameters(
        xflip=x > 0,
        yflip=y > 0,
        scale=scale,
        angle=torch.atan2(sin, cos + 1),
        aniso=torch.hypot(a_cos, a_sin),
        aniso_angle=torch.atan2(a_sin, a_cos),
        shift=torch.stack([right, down], dim=1),
    )
    images = picture(64)
    again, first = apply_augmentation(images, told), apply_augmentation(images, drawn)
    assert (again.int() - first.int()).abs().max() <= 1
    assert (first != images).flatten(1).any(dim=1).all()


def test_each_label_is_drawn_as_often_as_stated() -> None:
    labels = augment.draw_parameters(40_000, p=0.12, generator=generator()).labels()
    changed = (labels != 0).float().mean(0)
    expected = torch.tensor([0.5, 0.06, 0.12, 0.12, 0.12, 0.12, 0.06, 0.12, 0.12])
    assert torch.allclose(changed, expected, atol=0.01)
    scale = labels[:, 2][labels[:, 2] != 0]
    assert scale.std() == pytest.approx(1.0, abs=0.05)


def test_labels_and_images_belong_together() -> None:
    images = picture(64)
    augmented, labels = augment_images(images, p=0.12, generator=generator(5))
    untouched = (labels == 0).all(dim=1)
    assert 0 < untouched.sum() < 64
    assert torch.equal(augmented[untouched], images[untouched])
    changed = (augmented != images).flatten(1).any(dim=1)
    assert torch.equal(changed, ~untouched)


def test_the_stream_of_draws_does_not_depend_on_p() -> None:
    first, second = generator(2), generator(2)
    augment_images(picture(4), p=0.0, generator=first)
    augment_images(picture(4), p=1.0, generator=second)
    assert torch.equal(first.get_state(), second.get_state())


def test_a_probability_above_one_is_refused() -> None:
    refuses(r"p=1\.5 is not a probability", augment_images, picture(), p=1.5, generator=generator())


def test_a_flip_at_the_end_is_one_at_the_beginning_and_the_mirror_image_of_the_rest() -> None:
    images = picture(24)
    drawn = draw_parameters(24, p=0.7, generator=generator(3))
    mirrored = dataclasses.replace(
        drawn,
        xflip=~drawn.xflip,
        angle=-drawn.angle,
        aniso_angle=-drawn.aniso_angle,
        shift=drawn.shift * torch.tensor([-1.0, 1.0]),
    )
    flipped = apply_augmentation(images, drawn).flip(3).float()
    other_way = apply_augmentation(images, mirrored).float()
    # The samples of the wavelet filter lie elsewhere in a mirrored picture, hence not exactly.
    assert (flipped - other_way).square().mean().sqrt() < 2
    assert (flipped - apply_augmentation(images, drawn).float()).square().mean().sqrt() > 30
    torch.testing.assert_close(mirrored_labels(drawn.labels()), mirrored.labels())
    torch.testing.assert_close(mirrored_labels(mirrored_labels(drawn.labels())), drawn.labels())

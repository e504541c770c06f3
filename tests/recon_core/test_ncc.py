"""Normalised distances are held to eq. 16 written out, on ordinary and on degenerate images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recon_core import metrics as ncc
from recon_core.matching import best_per_target
from recon_core.metrics import ncc_matrix, unit_vectors
from tests.recon_core.correlation import correlation_matrix

SIZES = pytest.mark.parametrize("half_size", [False, True])


def _images(n: int, seed: int, shape: tuple[int, int, int] = (3, 12, 10)) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


def _equation_16(x: Tensor, y: Tensor, half_size: bool) -> float:
    """One distance, literally: normalise, subtract, square, divide by D."""

    def normalised(v: Tensor) -> np.ndarray:
        image = v.double().numpy()
        if half_size:
            image = np.stack([_halved(channel) for channel in image])
        mean = image.mean(axis=(1, 2), keepdims=True)
        return (image - mean) / image.std(axis=(1, 2), ddof=1, keepdims=True)

    difference = normalised(x) - normalised(y)
    return float((difference**2).sum() / difference.size)


def _halved(channel: np.ndarray) -> np.ndarray:
    """Keys' cubic with a = -3/4 half way between pixels, edges repeated: no antialiasing."""
    taps = np.array([-0.09375, 0.59375, 0.59375, -0.09375])

    def along(image: np.ndarray) -> np.ndarray:
        padded = np.pad(image, ((0, 0), (1, 1)), mode="edge")
        return np.stack(
            [padded[:, j : j + 4] @ taps for j in range(0, image.shape[1] - 1, 2)], axis=1
        )

    return along(along(channel).T).T


@SIZES
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_distances_are_those_of_equation_16(
    half_size: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncc, "ROWS", chunk)
    a, b = _images(7, 0) - 0.5, _images(4, 1)
    a[3] = 1e-6 * (b[2] + 0.05 * a[3])
    expected = [[_equation_16(x, y, half_size) for y in b] for x in a]
    actual = ncc_matrix(a, b, half_size=half_size)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-9)


@SIZES
def test_distance_and_correlation_rank_alike(half_size: bool) -> None:
    a, b = _images(20, 2), _images(5, 3)
    distance = ncc_matrix(a, b, half_size=half_size)
    rho = correlation_matrix(a, b, half_size=half_size)
    n = 30 if half_size else 120
    torch.testing.assert_close(distance, 2 * (1 - 1 / n) * (1 - rho))
    assert rho.min() >= -1
    assert rho.max() <= 1


def test_no_rounding_makes_a_distance_negative() -> None:
    a = _images(100, 19)
    itself = ncc_matrix(a, torch.cat([a, -a]))
    assert itself.min() == 0
    assert itself.max() <= 4
    assert correlation_matrix(a.double(), a.double()).max() == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(-37, 37))
def test_scale_offset_and_the_float32_range_do_not_matter(seed: int, exponent: float) -> None:
    image = _images(1, seed) - 0.5
    scaled = image * 10.0**exponent
    assert ncc_matrix(scaled, image).item() < 1e-12
    assert ncc_matrix(3 * image + 0.25, image).item() < 1e-12
    assert correlation_matrix(-scaled, image).item() == -1
    assert ncc_matrix(-scaled, image).item() == pytest.approx(4 * (1 - 1 / 120))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7e-5, 1e30])
@SIZES
def test_a_constant_image_is_unrelated_to_everything(value: float, half_size: bool) -> None:
    flat, image = torch.full((1, 3, 12, 10), value), _images(3, 7)
    both = torch.cat([flat, image])
    rho = correlation_matrix(flat, both, half_size=half_size)
    assert rho.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    distance = ncc_matrix(flat, both, half_size=half_size)
    assert distance.min() > 1.9
    assert unit_vectors(flat).count_nonzero() == 0


def test_rounding_is_not_structure_but_a_tiny_candidate_is() -> None:
    image = _images(1, 8)
    rounded = 0.5 + 2e-7 * image
    tiny = 1e-30 * (image - 0.5)
    assert 2 <= rounded.unique().numel() <= 5
    assert correlation_matrix(rounded, image).item() == 0
    assert correlation_matrix(tiny, image).item() == pytest.approx(1)


def test_a_constant_channel_leaves_an_image_like_itself() -> None:
    image, other = _images(1, 9), _images(1, 10)
    image[:, 1] = 0.7
    assert ncc_matrix(image, 2 * image).item() < 1e-12
    varying = image.clone()
    varying[:, 1] = other[:, 1]
    assert correlation_matrix(image, varying).item() == pytest.approx((2 / 3) ** 0.5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@SIZES
def test_a_bad_pixel_spoils_its_own_image_only_and_never_wins(bad: float, half_size: bool) -> None:
    a, b = _images(5, 11), _images(3, 12)
    clean = ncc_matrix(a, b, half_size=half_size)
    a[2, 1, 3, 3] = bad
    b[0, 0, 11, 9] = bad
    spoilt = ncc_matrix(a, b, half_size=half_size)
    assert spoilt[2].isnan().all()
    assert spoilt[:, 0].isnan().all()
    keep = [0, 1, 3, 4]
    torch.testing.assert_close(spoilt[keep][:, 1:], clean[keep][:, 1:])
    nearest, _ = best_per_target(-spoilt)
    assert nearest[0] == -1
    assert 2 not in nearest[1:]


def test_half_size_of_odd_sides_rounds_down() -> None:
    a = _images(2, 13, (3, 9, 7))
    assert unit_vectors(a, half_size=True).shape == (2, 3 * 4 * 3)
    assert ncc_matrix(a, a, half_size=True).diagonal().max() < 1e-12


def test_no_images_give_an_empty_matrix() -> None:
    a, none = _images(3, 15), _images(0, 15)
    for half_size in (False, True):
        assert ncc_matrix(none, a, half_size=half_size).shape == (0, 3)
        assert ncc_matrix(a, none, half_size=half_size).shape == (3, 0)


def test_bad_arguments_are_named() -> None:
    a = _images(1, 16)
    with pytest.raises(ValueError, match="12x1 cannot be halved"):
        ncc_matrix(a[..., :1], a[..., :1], half_size=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@SIZES
def test_distances_are_the_same_on_a_gpu(half_size: bool) -> None:
    a, b = _images(30, 17), _images(7, 18)
    on_gpu = ncc_matrix(a.cuda(), b.cuda(), half_size=half_size)
    on_cpu = ncc_matrix(a, b, half_size=half_size)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-6, rtol=1e-6)

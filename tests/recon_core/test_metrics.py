"""SSIM beside scikit-image, normalised distances beside eq. 16, HaarPSI's properties."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import structural_similarity
from torch import Tensor

from recon_core import metrics
from recon_core import metrics as ncc
from recon_core.matching import best_per_target
from recon_core.metrics import (
    SSIMConvention,
    haarpsi_pairs,
    ncc_matrix,
    ssim_matrix,
    ssim_pairs,
    unit_vectors,
)
from tests.recon_core.drawing import refuses


def correlation_matrix(a: Tensor, b: Tensor, *, half_size: bool = False) -> Tensor:
    """Of every image of `a` with every image of `b`, in [-1, 1]."""
    left, right = (unit_vectors(x, half_size=half_size) for x in (a, b))
    return (left @ right.T).clamp(-1, 1).float()


def skimage_ssim(x: Tensor, y: Tensor) -> float:
    return float(
        structural_similarity(
            x.permute(1, 2, 0).double().numpy(),
            y.permute(1, 2, 0).double().numpy(),
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=1,
            channel_axis=-1,
        )
    )


def _images(n: int, seed: int, side: int = 32) -> Tensor:
    """Random images, then the awkward ones: flat, black, white, nearly flat near white, a step."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 3, side, side, generator=generator)
    images[0] = 1.0
    images[1] = 0.0
    images[2] = 0.5
    images[3] = 1.0 - 1e-3 * images[3]
    images[4] = 0.0
    images[4, :, :, side // 2 :] = 1.0
    return images


def _kornia_window3(x: Tensor, y: Tensor) -> float:
    """SSIM as kornia's window_size=3 defines it, written out with numpy loops."""
    a, b = (np.pad(v.double().numpy(), ((0, 0), (1, 1), (1, 1)), mode="reflect") for v in (x, y))
    side = np.exp(-0.5 * (np.arange(-1, 2) / 1.5) ** 2)
    weights = np.outer(side, side) / np.outer(side, side).sum()
    values = []
    for c in range(a.shape[0]):
        for i in range(x.shape[1]):
            for j in range(x.shape[2]):
                p, q = a[c, i : i + 3, j : j + 3], b[c, i : i + 3, j : j + 3]
                mu_p, mu_q = (weights * p).sum(), (weights * q).sum()
                var_p, var_q = (weights * (p - mu_p) ** 2).sum(), (weights * (q - mu_q) ** 2).sum()
                cov = (weights * (p - mu_p) * (q - mu_q)).sum()
                luminance = (2 * mu_p * mu_q + 1e-4) / (mu_p**2 + mu_q**2 + 1e-4)
                values.append(luminance * (2 * cov + 9e-4) / (var_p + var_q + 9e-4))
    return float(np.mean(values))


def _degenerate(side: int) -> Tensor:
    """What breaks formulas: no contrast, hardly any, all of it, one pixel, one channel."""
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(3, side, side, generator=generator)
    board = ((torch.arange(side)[:, None] + torch.arange(side)) % 2).float().expand(3, -1, -1)
    one_bright, one_dark, one_flat = torch.zeros(3, side, side), torch.ones(3, side, side), base * 1
    one_bright[:, side // 2, side // 2] = 1.0
    one_dark[0, 0, 0] = 0.0
    one_flat[1] = 0.7
    constant = [torch.full((3, side, side), value) for value in (0.0, 1.0, 0.3)]
    contrast = [offset + scale * base for offset, scale in ((0.9, 1e-3), (0.5, 1e-7), (0.0, 1e-6))]
    saturated = [(base > 0.5).float(), (8 * base - 4).clamp(0, 1), board, 1 - board]
    ramp = torch.linspace(0, 1, side).expand(3, side, side)
    return torch.stack(
        [*constant, *contrast, *saturated, one_bright, one_dark, one_flat, ramp, base]
    )


@pytest.mark.parametrize(
    ("convention", "reference", "side"),
    [("gaussian11", skimage_ssim, 17), ("gaussian3", _kornia_window3, 7)],
)
def test_degenerate_images_score_as_in_the_reference(
    convention: SSIMConvention,
    reference: Callable[[Tensor, Tensor], float],
    side: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every degenerate image with every other, by both functions, in any chunks, within 1e-6."""
    images = _degenerate(side)
    n = len(images)
    expected = np.array([[reference(x, y) for y in images] for x in images])
    assert np.isfinite(expected).all()
    matrix = ssim_matrix(images, images, convention=convention)
    np.testing.assert_allclose(matrix.numpy(), expected, atol=1e-6)
    left, right = images.repeat_interleave(n, dim=0), images.repeat(n, 1, 1, 1)
    pairs = ssim_pairs(left, right, convention=convention).reshape(n, n)
    np.testing.assert_allclose(pairs.numpy(), expected, atol=1e-6)
    for chunk in (1, 13, 1000):
        monkeypatch.setattr(metrics, "_CPU_CHUNK", chunk)
        matrix = ssim_matrix(images, images, convention=convention)
        np.testing.assert_allclose(matrix.numpy(), expected, atol=1e-6)


@pytest.mark.gpu
def test_all_pairs_ssim_is_the_same_on_a_gpu() -> None:
    a, b = _images(9, 0), _images(6, 1)
    on_gpu = ssim_matrix(a.cuda(), b.cuda()).cpu()
    torch.testing.assert_close(on_gpu, ssim_matrix(a, b), atol=2e-6, rtol=0)


def test_one_channel_and_oblong_images() -> None:
    generator = torch.Generator().manual_seed(7)
    a, b = torch.rand(2, 1, 12, 20, generator=generator), torch.rand(3, 1, 12, 20)
    expected = [[skimage_ssim(x, y) for y in b] for x in a]
    np.testing.assert_allclose(ssim_matrix(a, b).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_pixel_spoils_its_own_image_only(bad: float) -> None:
    a, b = _images(6, 8), _images(6, 9)
    clean = ssim_matrix(a, b)
    a[5, 1, 3, 3] = bad
    b[2, 0, 31, 31] = bad
    scores = ssim_matrix(a, b)
    assert scores[5].isnan().all()
    assert scores[:, 2].isnan().all()
    rest = [0, 1, 3, 4, 5]
    torch.testing.assert_close(scores[:5][:, rest], clean[:5][:, rest], atol=1e-6, rtol=0)
    assert ssim_pairs(a, b).isnan().tolist() == [False, False, True, False, False, True]


def test_no_images_give_an_empty_matrix() -> None:
    a, none = _images(5, 0), torch.zeros(0, 3, 32, 32)
    assert haarpsi_pairs(none, none).shape == (0,)
    for matrix in (ssim_matrix, ncc_matrix):
        assert (matrix(none, a).shape, matrix(a, none).shape) == ((0, 5), (5, 0))


def test_bad_arguments_are_named() -> None:
    a = torch.zeros(1, 3, 32, 32)
    refuses("smaller than the 11x11 window", ssim_matrix, a[..., :8], a[..., :8])
    refuses(r"needs \[0, 1\]", haarpsi_pairs, a + 2, a)
    refuses("at least 16x16", haarpsi_pairs, a[..., :12], a[..., :12])
    refuses("12x1 cannot be halved", ncc_matrix, a[..., :12, :1], a[..., :12, :1], half_size=True)


def test_haarpsi_is_one_for_equal_images_symmetric_and_falls_with_noise() -> None:
    images = torch.nn.functional.interpolate(_images(6, 1, side=8), scale_factor=4.0)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(images.shape, generator=generator)
    little, much = ((images + s * noise).clamp(0, 1) for s in (0.05, 0.5))
    torch.testing.assert_close(haarpsi_pairs(images, images), torch.ones(6))
    torch.testing.assert_close(haarpsi_pairs(images, much), haarpsi_pairs(much, images))
    assert (haarpsi_pairs(images, little) > haarpsi_pairs(images, much)).all()


def test_haarpsi_without_contrast_or_without_numbers() -> None:
    black, bad = torch.zeros(1, 3, 32, 32), torch.full((1, 3, 32, 32), torch.nan)
    scores = haarpsi_pairs(torch.cat([black, bad]), torch.cat([black, black]))
    assert scores[0] == 1.0
    assert scores[1].isnan()


def test_piq_loads_in_a_fresh_interpreter() -> None:
    """The compatibility import has to work in every worker process, with warnings as errors."""
    code = (
        "from recon_core.torchvision_compat import import_piq, import_torchvision;"
        "import torch; import_torchvision(); import_torchvision();"
        "x = torch.rand(1, 3, 16, 16); print(float(import_piq().haarpsi(x, x)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(1.0, abs=1e-5)


SIZES = pytest.mark.parametrize("half_size", [False, True])


def _noise_images(n: int, seed: int, shape: tuple[int, int, int] = (3, 12, 10)) -> Tensor:
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
    a, b = _noise_images(7, 0) - 0.5, _noise_images(4, 1)
    a[3] = 1e-6 * (b[2] + 0.05 * a[3])
    expected = [[_equation_16(x, y, half_size) for y in b] for x in a]
    actual = ncc_matrix(a, b, half_size=half_size)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-9)


@SIZES
def test_distance_and_correlation_rank_alike(half_size: bool) -> None:
    a, b = _noise_images(20, 2), _noise_images(5, 3)
    distance = ncc_matrix(a, b, half_size=half_size)
    rho = correlation_matrix(a, b, half_size=half_size)
    n = 30 if half_size else 120
    torch.testing.assert_close(distance, 2 * (1 - 1 / n) * (1 - rho))
    assert rho.min() >= -1
    assert rho.max() <= 1


def test_no_rounding_makes_a_distance_negative() -> None:
    a = _noise_images(100, 19)
    itself = ncc_matrix(a, torch.cat([a, -a]))
    assert itself.min() == 0
    assert itself.max() <= 4
    assert correlation_matrix(a.double(), a.double()).max() == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(-37, 37))
def test_scale_offset_and_the_float32_range_do_not_matter(seed: int, exponent: float) -> None:
    image = _noise_images(1, seed) - 0.5
    scaled = image * 10.0**exponent
    assert ncc_matrix(scaled, image).item() < 1e-12
    assert ncc_matrix(3 * image + 0.25, image).item() < 1e-12
    assert correlation_matrix(-scaled, image).item() == -1
    assert ncc_matrix(-scaled, image).item() == pytest.approx(4 * (1 - 1 / 120))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7e-5, 1e30])
@SIZES
def test_a_constant_image_is_unrelated_to_everything(value: float, half_size: bool) -> None:
    flat, image = torch.full((1, 3, 12, 10), value), _noise_images(3, 7)
    both = torch.cat([flat, image])
    rho = correlation_matrix(flat, both, half_size=half_size)
    assert rho.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    distance = ncc_matrix(flat, both, half_size=half_size)
    assert distance.min() > 1.9
    assert unit_vectors(flat).count_nonzero() == 0


def test_rounding_is_not_structure_but_a_tiny_candidate_is() -> None:
    image = _noise_images(1, 8)
    rounded = 0.5 + 2e-7 * image
    tiny = 1e-30 * (image - 0.5)
    assert 2 <= rounded.unique().numel() <= 5
    assert correlation_matrix(rounded, image).item() == 0
    assert correlation_matrix(tiny, image).item() == pytest.approx(1)


def test_a_constant_channel_leaves_an_image_like_itself() -> None:
    image, other = _noise_images(1, 9), _noise_images(1, 10)
    image[:, 1] = 0.7
    assert ncc_matrix(image, 2 * image).item() < 1e-12
    varying = image.clone()
    varying[:, 1] = other[:, 1]
    assert correlation_matrix(image, varying).item() == pytest.approx((2 / 3) ** 0.5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@SIZES
def test_a_bad_pixel_spoils_its_own_image_only_and_never_wins(bad: float, half_size: bool) -> None:
    a, b = _noise_images(5, 11), _noise_images(3, 12)
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


@pytest.mark.gpu
@SIZES
def test_distances_are_the_same_on_a_gpu(half_size: bool) -> None:
    a, b = _noise_images(30, 17), _noise_images(7, 18)
    on_gpu = ncc_matrix(a.cuda(), b.cuda(), half_size=half_size)
    on_cpu = ncc_matrix(a, b, half_size=half_size)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-6, rtol=1e-6)

"""Masks of missing pixels: what is known, that they draw what they say; noise; bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from recon_core.degradation import (
    MASKS,
    check_degraded,
    degrade,
    mask_from_picture,
    mask_pattern,
)
from tests.recon_core.drawing import generator, generators, refuses

KNOWN = {
    "random": (0.28, 0.32),
    "blocks": (0.4, 0.5),
    "stripes": (0.35, 0.6),
    "text": (0.3, 0.9),
    "half": (0.5, 0.5),
    "window": (0.25, 0.4),
}
DRAWN = ("random", "blocks", "stripes", "text")


def pattern(name: str, side: int = 32, seed: int = 0) -> Tensor:
    return mask_pattern(name, side, side, generator=generator(seed))


@pytest.mark.parametrize("size", [(4, 4), (8, 8), (32, 32), (48, 48), (24, 40)])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_leaves_the_share_that_it_should(name: str, size: tuple[int, int]) -> None:
    low, high = KNOWN[name]
    for seed in range(5):
        mask = mask_pattern(name, *size, generator=generator(seed))
        assert mask.shape == size
        assert mask.dtype == torch.bool
        assert low <= float(mask.float().mean()) <= high


@pytest.mark.parametrize("name", DRAWN)
def test_a_mask_follows_from_its_generator(name: str) -> None:
    assert torch.equal(pattern(name, seed=3), pattern(name, seed=3))
    assert not torch.equal(pattern(name, seed=3), pattern(name, seed=4))


def test_half_is_the_lower_half_and_the_window_is_central() -> None:
    half = pattern("half")
    assert half[:16].all()
    assert not half[16:].any()
    for side in (8, 32, 33):
        window = pattern("window", side)
        rows, columns = window.any(1), window.any(0)
        assert torch.equal(window, rows.unsqueeze(1) & columns)
        first, last = int(rows.nonzero().min()), int(rows.nonzero().max())
        assert 0 <= (side - 1 - last) - first <= 1


def test_stripes_are_whole_rows_and_columns() -> None:
    stripes = pattern("stripes")
    rows, columns = stripes.any(1), stripes.any(0)
    assert torch.equal(stripes, rows.unsqueeze(1) & columns)
    for known in (rows, columns):
        assert 0.25 < float((~known).float().mean()) < 0.4
        changes = known.view(-1, 2)
        assert torch.equal(changes[:, 0], changes[:, 1]), "bands are two pixels wide at 32"


def test_what_is_missing_of_blocks_is_made_of_squares() -> None:
    missing = ~pattern("blocks")
    squares = torch.nn.functional.max_pool2d((~missing)[None].float(), 4, stride=1)[0] == 0
    covered = torch.zeros_like(missing)
    for top, left in squares.nonzero().tolist():
        covered[top : top + 4, left : left + 4] = True
    assert torch.equal(covered, missing)
    assert squares.any()


def test_text_has_lines_with_gaps_and_grows_with_the_image() -> None:
    text = pattern("text")
    assert text[5::6].all(), "lines are apart"
    assert text[:, 3::4].all(), "glyphs are apart"
    ink = ~text[:5]
    n_glyphs = len({tuple(map(tuple, ink[:, i : i + 3].tolist())) for i in range(0, 32, 4)})
    assert n_glyphs > 3, "glyphs differ"
    large = pattern("text", 64)
    assert torch.equal(large, text.repeat_interleave(2, 0).repeat_interleave(2, 1))


def test_unknown_masks_and_tiny_images_are_refused() -> None:
    refuses(r"no mask 'stripe'.*random, blocks, stripes", pattern, "stripe")
    refuses(r"3x3.*4x4", pattern, "random", 3)


def images(n: int = 3) -> Tensor:
    return torch.rand(n, 2, 8, 8, generator=generator(9)) * 0.8 + 0.1


def test_missing_pixels_are_zero_in_all_channels_and_others_unchanged() -> None:
    x, mask = images(), pattern("random", 8)
    y = degrade(x, mask)
    assert torch.equal(y[:, :, mask], x[:, :, mask])
    assert (y[:, :, ~mask] == 0).all()
    assert torch.equal(torch.stack([degrade(x[i : i + 1], mask)[0] for i in range(3)]), y)


def test_every_image_may_have_its_own_mask() -> None:
    x = images()
    masks = torch.stack([pattern(name, 8) for name in ("random", "half", "window")])
    y = degrade(x, masks)
    for i in range(3):
        assert torch.equal(y[i], degrade(x[i : i + 1], masks[i])[0])


def test_noise_has_its_level_everywhere_and_is_not_clipped() -> None:
    x = torch.ones(20, 3, 16, 16)
    mask = pattern("half", 16)
    noise = degrade(x, mask, sigma=0.1, generators=generators(20)) - x * mask
    for part in (noise[:, :, mask], noise[:, :, ~mask]):
        assert float(part.std()) == pytest.approx(0.1, rel=0.03)
        assert abs(float(part.mean())) < 0.005
    y = noise + x * mask
    assert float((y[:, :, ~mask] < 0).float().mean()) == pytest.approx(0.5, abs=0.03)
    assert float((y[:, :, mask] > 1).float().mean()) == pytest.approx(0.5, abs=0.03)


def test_noise_does_not_depend_on_the_batch_nor_on_the_type() -> None:
    x, mask = images(), pattern("random", 8)
    y = degrade(x, mask, sigma=0.2, generators=generators(3))
    alone = [degrade(x[i : i + 1], mask, sigma=0.2, generators=[generator(i)]) for i in range(3)]
    assert torch.equal(torch.cat(alone), y)
    double = degrade(x.double(), mask, sigma=0.2, generators=generators(3))
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), y)
    unused = generators(3)
    degrade(x, mask, generators=unused)
    assert torch.equal(unused[0].get_state(), generator().get_state())


def test_degrade_refuses_what_does_not_fit() -> None:
    x, mask = images(), pattern("half", 8)
    refuses(r"mask is torch.bool \(7, 8\).*\(8, 8\), or \(3, 8, 8\)", degrade, x, mask[:7])
    refuses(r"mask is torch.float32", degrade, x, mask.float())
    for bad in (-0.1, float("nan"), float("inf")):
        refuses(f"sigma={bad}", degrade, x, mask, sigma=bad)
    refuses(r"one generator per image: 2", degrade, x, mask, sigma=0.1, generators=generators(2))
    refuses(r"images have pixels from .*\[0, 1\].*255", degrade, x * 255, mask)
    refuses("images have NaN", degrade, torch.full_like(x, torch.nan), mask)


def test_check_degraded_takes_what_degrade_gives_and_refuses_the_rest() -> None:
    x, mask = images(), pattern("random", 8)
    check_degraded(degrade(x, mask), 0.0)
    noisy = degrade(x, mask, sigma=0.02, generators=generators(3))
    for sigma in (0.02, None):
        check_degraded(noisy, sigma)
    check_degraded(degrade(x, mask, sigma=2.0, generators=generators(3)), 2.0)
    refuses(r"from -0.*in \[0, 1\]; .*give sigma", check_degraded, noisy, 0.0)
    for sigma in (0.02, None, 0.0):
        refuses("255", check_degraded, x * 255, sigma)
        for bad in (torch.nan, torch.inf):
            with pytest.raises(ValueError, match="NaN or infinite"):
                check_degraded(x.index_fill(0, torch.tensor([1]), bad), sigma)
    for wrong in (x[0], x.to(torch.uint8), x[:0]):
        refuses(r"expected floats \(n, c, h, w\)", check_degraded, wrong, 0.0)
    refuses("sigma=-1", check_degraded, x, -1.0)


@pytest.mark.parametrize("channels", [(), (1,), (3,)])
def test_a_picture_gives_its_mask(channels: tuple[int, ...]) -> None:
    mask = pattern("text", 16)
    picture = (mask.numpy() * 255).astype(np.uint8).reshape(16, 16, *[1] * len(channels))
    picture = np.broadcast_to(picture, (16, 16, *channels)).copy()
    picture[0, 0] = 200  # a smoothed corner or two are put up with
    mask[0, 0] = True
    assert torch.equal(mask_from_picture(picture, 16, 16), mask)
    picture[0, 0] = 127
    assert not mask_from_picture(picture, 16, 16)[0, 0]


def test_pictures_of_no_mask_are_refused() -> None:
    picture = (pattern("half").numpy() * 255).astype(np.uint8)
    refuses(r"picture is 32x32, the images are 32x64", mask_from_picture, picture, 32, 64)
    photograph = np.arange(1024, dtype=np.uint32).reshape(32, 32).astype(np.uint8)
    refuses(r"of 1024 pixels .* neither black nor white", mask_from_picture, photograph, 32, 32)
    red = np.zeros((32, 32, 3), np.uint8)
    red[..., 0] = picture
    refuses(r"512 of 1024 pixels .* neither black nor white", mask_from_picture, red, 32, 32)
    refuses("all white, no pixel is", mask_from_picture, np.full((8, 8), 255, np.uint8), 8, 8)
    refuses("all black, every pixel is", mask_from_picture, np.zeros((8, 8), np.uint8), 8, 8)
    for wrong in (np.zeros((8, 8, 4), np.uint8), np.zeros((8, 8)), np.zeros(8, np.uint8)):
        refuses(r"expected uint8 \(h, w\)", mask_from_picture, wrong, 8, 8)

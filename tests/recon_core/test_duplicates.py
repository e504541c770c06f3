"""Near copies are found through recompression, recolouring and mirroring; skies and frames are not
taken for them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from recon_core import duplicates
from recon_core.duplicates import near_duplicates
from tests.recon_core.tiles import photograph_tiles


def _tiles() -> Tensor:
    """Tiles with something on them."""
    tiles = photograph_tiles(32, shrink=2)
    return tiles[tiles.float().std(dim=(1, 2, 3)) > 25]


def _recompressed(image: Tensor, quality: int) -> Tensor:
    content = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(content, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(content))).permute(2, 0, 1)


def _recoloured(image: Tensor) -> Tensor:
    factors = torch.tensor([0.7, 0.8, 0.9])[:, None, None]
    return (image * factors + 20).round().to(torch.uint8)


def _sky(seed: int) -> Tensor:
    """A blue gradient with a small dark thing of its own, and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.linspace(110, 200, 32)[:, None].expand(32, 32)
    image = torch.stack([0.5 * down, 0.8 * down, down + 40])
    i, j = 7 + 5 * (seed % 4), 8 + 6 * (seed // 4)
    image[:, i : i + 2, j : j + 3] -= 45
    return (image + 2 * torch.randn(3, 32, 32, generator=generator)).clamp(0, 255).to(torch.uint8)


def _framed(image: Tensor) -> Tensor:
    framed = torch.full_like(image, 255)
    framed[:, 2:-2, 2:-2] = image[:, 2:-2, 2:-2]
    return framed


def test_copies_are_found_and_nothing_else() -> None:
    tiles = _tiles()
    others = tiles[10:]
    images = torch.cat(
        [
            tiles[:10],
            torch.stack([_recompressed(others[3], 60), _recompressed(others[5], 60).flip(2)]),
            torch.stack([_recoloured(others[7]), others[9]]),
        ]
    )
    found = near_duplicates(images, others)
    assert found.rows.tolist() == [10, 11, 12, 13]
    assert found.nearest.tolist() == [3, 5, 7, 9]
    assert found.correlation[3] == 1
    assert (found.correlation[:3] > 0.8).all()
    whole = near_duplicates(images.float() / 255, others.float() / 255)
    assert whole.nearest.tolist() == [3, 5, 7, 9]
    assert torch.allclose(whole.correlation, found.correlation, atol=1e-4)
    unmirrored = near_duplicates(images, others, mirrored=False)
    assert unmirrored.nearest.tolist() == [3, 7, 9]


def test_skies_are_not_copies_of_each_other() -> None:
    skies = torch.stack([_sky(seed) for seed in range(12)])
    unit = (skies.float() / 255).flatten(1)
    unit = unit - unit.mean(dim=1, keepdim=True)
    assert torch.corrcoef(unit)[0, 1:].min() > 0.9  # pixels alone take them for one
    assert len(near_duplicates(skies[:6], skies[6:]).rows) == 0
    again = torch.stack([_recompressed(skies[0], 90)])
    assert near_duplicates(again, skies).nearest.tolist() == [0]


def test_a_common_frame_does_not_make_copies() -> None:
    framed = torch.stack([_framed(tile) for tile in _tiles()[:12]])
    edges = duplicates._blurred(framed.float() / 255) - framed.float() / 255
    assert torch.corrcoef(edges.flatten(1))[0, 1:].max() > 0.5  # detail with the border does
    assert len(near_duplicates(framed[:6], framed[6:]).rows) == 0
    assert near_duplicates(framed[:1], framed).nearest.tolist() == [0]


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = _tiles()
    steps: list[float] = []
    whole = duplicates.most_alike(tiles[:9], tiles[5:30])
    monkeypatch.setattr(duplicates, "IMAGE_ROWS", 4)
    monkeypatch.setattr(duplicates, "OTHER_ROWS", 7)
    parts = duplicates.most_alike(tiles[:9], tiles[5:30], progress=steps.append)
    assert torch.equal(parts.row, whole.row)
    assert torch.equal(parts.mirrored, whole.mirrored)
    assert torch.allclose(parts.correlation, whole.correlation, atol=1e-6)
    assert whole.row[5:].tolist() == [0, 1, 2, 3]
    assert steps[-1] == 1
    assert len(steps) == 3 * 4


def test_an_image_of_nothing_is_like_nothing_but_its_exact_copy() -> None:
    grey = torch.full((1, 3, 32, 32), 90, dtype=torch.uint8)
    found = duplicates.most_alike(grey, torch.cat([grey + 1, _tiles()[:8]]))
    assert found.correlation.item() <= 0
    found = duplicates.most_alike(grey, torch.cat([_tiles()[:8], grey + 1, grey]))
    assert (found.row.item(), found.correlation.item()) == (9, 1)
    assert not found.mirrored
    turned = torch.cat([grey, _tiles()[:1].flip(3)])
    found = duplicates.most_alike(_tiles()[:1], turned)
    assert (found.row.item(), found.mirrored.item(), found.correlation.item()) == (1, True, 1)


def test_detail_that_is_only_rounding_is_none() -> None:
    ramp = (torch.arange(64) * 3).expand(1, 3, 64, 64).to(torch.uint8)
    noise = torch.where(torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) > 0.5, 1, 0)
    same = ramp.float() / 255
    nearly = same * (1 + noise * torch.finfo(torch.float32).eps)
    assert not torch.equal(same, nearly)
    assert duplicates.most_alike(same, nearly).correlation.item() == 0


def test_the_same_detail_on_another_picture_is_no_copy() -> None:
    detail = 12 * torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))
    down = torch.linspace(60, 190, 32)[:, None].expand(3, 32, 32)
    one, other = ((ramp + detail).round().to(torch.uint8)[None] for ramp in (down, down.flip(1)))
    unit = [duplicates._directions(image)[1] for image in (one, other)]
    assert (unit[0] @ unit[1].T).item() > 0.95
    assert len(near_duplicates(one, other).rows) == 0


def test_without_others_there_is_no_copy() -> None:
    tiles = _tiles()
    found = duplicates.most_alike(tiles[:2], tiles[:0])
    assert found.row.tolist() == [-1, -1]
    assert len(near_duplicates(tiles[:0], tiles).rows) == 0


def test_bad_input_says_how_to_mend_it() -> None:
    tiles = _tiles()
    with pytest.raises(ValueError, match=r"threshold=1\.0.*below 1, such as 0\.6"):
        near_duplicates(tiles, tiles, threshold=1.0)
    with pytest.raises(ValueError, match=r"torch\.uint8 and others torch\.float32; give both"):
        near_duplicates(tiles, tiles.float())
    with pytest.raises(ValueError, match=r"7x7 are too small .* at least 8x8"):
        near_duplicates(tiles[:, :, :7, :7], tiles[:, :, :7, :7])
    broken = tiles.float() / 255
    broken[3, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"others\[3\] has a NaN"):
        near_duplicates(tiles.float() / 255, broken)

"""Near copies are found and skies are not; planted pictures rank first without originals."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from recon_core import duplicates, ranking
from recon_core.duplicates import near_duplicates
from recon_core.ranking import (
    agreement,
    clusters,
    consistency,
    rank_runs,
)
from tests.recon_core.drawing import refuses
from tests.recon_core.test_metrics import correlation_matrix
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
    refuses(r"threshold=1\.0.*below 1, such as 0\.6", near_duplicates, tiles, tiles, threshold=1.0)
    refuses(r"torch\.uint8 and others torch\.float32; give", near_duplicates, tiles, tiles.float())
    refuses(r"7x7 are too small .* at", near_duplicates, tiles[:, :, :7, :7], tiles[:, :, :7, :7])
    broken = tiles.float() / 255
    broken[3, 0, 0, 0] = torch.nan
    refuses(r"others\[3\] has a NaN", near_duplicates, tiles.float() / 255, broken)


N_ATTACKS, N_FOUND, N_JUNK = 4, 6, 14


def _planted(seed: int = 0, noise: float = 0.05) -> tuple[Tensor, Tensor, Tensor]:
    """(pictures, attack, which image, -1 for junk): every attack finds every image, noisily.

    Junk is smoothed noise: as structured as a photograph, but different in every attack.
    """
    generator = torch.Generator().manual_seed(seed)
    tiles = photograph_tiles(16, shrink=4).float() / 255
    images = tiles[tiles.flatten(1).std(dim=1).argsort(descending=True)[:N_FOUND]]
    pictures, attack, image = [], [], []
    for number in range(N_ATTACKS):
        noisy = images + noise * torch.randn(images.shape, generator=generator)
        coarse = torch.rand(N_JUNK, 3, 8, 8, generator=generator)
        junk = torch.nn.functional.interpolate(coarse, size=16, mode="bilinear")
        pictures.append(torch.cat([noisy, junk]).clamp(0, 1))
        attack.append(torch.full((N_FOUND + N_JUNK,), number))
        image.append(torch.cat([torch.arange(N_FOUND), torch.full((N_JUNK,), -1)]))
    order = torch.randperm(len(torch.cat(attack)), generator=generator)
    return torch.cat(pictures)[order], torch.cat(attack)[order], torch.cat(image)[order]


def _plain_agreement(scores: Tensor, attack: Tensor) -> Tensor:
    """Agreement from the full matrix of scores, one candidate at a time."""
    values = []
    for i in range(len(attack)):
        others = [a for a in attack.unique() if a != attack[i]]
        best = torch.stack([scores[i, attack == a].max() for a in others])
        values.append(best.mean())
    return torch.stack(values)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_agreement_is_its_definition_in_any_chunks(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "ROWS", chunk)
    pictures, attack, _ = _planted(1)
    pictures, attack = pictures[::3], attack[::3] * 10 - 3
    full = correlation_matrix(pictures, pictures)
    value = agreement(pictures, attack)
    torch.testing.assert_close(value, _plain_agreement(full, attack), atol=2e-6, rtol=0)


def test_bad_and_constant_pictures_agree_with_nobody() -> None:
    pictures, attack, _ = _planted()
    clean = agreement(pictures, attack)
    spoilt = pictures.clone()
    spoilt[3, 0, 0, 0] = torch.nan
    spoilt[4, 1, 1, 1] = torch.inf
    value = agreement(spoilt, attack)
    assert value[3] == value[4] == -1
    assert (value <= clean + 1e-6).all()
    assert (value > -1).sum() == len(value) - 2
    flat = torch.full((4, 3, 16, 16), 0.5)
    attacks = torch.tensor([0, 0, 1, 1])
    assert agreement(flat, attacks).tolist() == [0.0] * 4
    groups = clusters(spoilt, attack)
    assert groups.label[[3, 4]].tolist() == [-1, -1]
    assert (groups.label.sort().values[2:] >= 0).all()


def test_an_attack_that_diverged_is_no_disagreement() -> None:
    pictures, attack, _ = _planted()
    lost = attack == 2
    value = agreement(pictures.where(~lost[:, None, None, None], torch.nan), attack)
    expected = agreement(pictures[~lost], attack[~lost])
    torch.testing.assert_close(value[~lost], expected)


def test_consistency_is_high_for_what_arrived_and_low_for_what_wanders() -> None:
    generator = torch.Generator().manual_seed(5)
    arrived = torch.rand(5, 3, 12, 12, generator=generator)
    wandering = torch.rand(3, 5, 3, 12, 12, generator=generator)
    steps = torch.tensor([0.2, 0.1, 0.0])[:, None, None, None, None]
    near = arrived + steps * torch.randn(wandering.shape, generator=generator)
    saved = torch.cat([near, wandering], dim=1)
    saved[1, 9] = torch.nan
    value = consistency(saved)
    assert value[:5].min() > 0.7
    assert value[5:].max() < 0.4
    assert value[9] == -1
    pair = consistency(saved[1:, :9])
    assert pair.argsort(descending=True)[:5].sort().values.tolist() == list(range(5))
    both = correlation_matrix(saved[2], torch.cat([saved[0, :1], saved[1, :1]]))[0]
    torch.testing.assert_close(consistency(saved)[0], both.mean())


def _literal_clusters(
    rho: Tensor, attack: Tensor, threshold: float
) -> list[tuple[int, int, float, int, list[int]]]:
    """(n_attacks, n_members, cohesion, representative, members) from the full matrix, in order."""
    n = len(attack)
    near = [[j for j in range(n) if j != i and rho[i, j] >= threshold] for i in range(n)]

    def support(i: int) -> tuple[int, int, float, int]:
        mean = float(rho[i, near[i]].mean()) if near[i] else 0.0
        return -len({int(attack[j]) for j in [i, *near[i]]}), -len(near[i]), -round(mean, 5), i

    left, groups = set(range(n)), []
    for seed in sorted(range(n), key=support):
        if seed in left:
            others = [j for j in near[seed] if j in left]
            left -= {seed, *others}
            cohesion = float(rho[seed, others].mean()) if others else -1.0
            n_attacks = len({int(attack[j]) for j in [seed, *others]})
            groups.append((n_attacks, 1 + len(others), cohesion, seed, sorted([seed, *others])))
    return sorted(groups, key=lambda g: (-g[0], -g[1], -round(g[2], 5), g[3]))


@pytest.mark.parametrize("seed", range(8))
def test_clusters_are_the_greedy_procedure(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of few pixels, so that groups overlap, and some exact copies, so that some tie."""
    monkeypatch.setattr(ranking, "ROWS", 11)
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(40, 1, 2, 3, generator=generator)
    pictures[10:14] = pictures[3]
    attack = torch.randint(4, (40,), generator=generator) * 5
    groups = clusters(pictures, attack, threshold=0.7)
    rho = correlation_matrix(pictures, pictures)
    expected = _literal_clusters(rho, attack, 0.7)
    assert groups.representative.tolist() == [g[3] for g in expected]
    assert groups.n_attacks.tolist() == [g[0] for g in expected]
    assert groups.n_members.tolist() == [g[1] for g in expected]
    np.testing.assert_allclose(groups.cohesion.numpy(), [g[2] for g in expected], atol=1e-5)
    members = [(groups.label == k).nonzero().squeeze(1).tolist() for k in range(len(expected))]
    assert members == [g[4] for g in expected]


def test_runs_are_ranked_by_residual_and_the_diverged_come_last() -> None:
    residual = torch.tensor([0.3, torch.nan, 0.1, torch.inf, 0.3, 0.0])
    assert rank_runs(residual).tolist() == [5, 2, 0, 4, 1, 3]
    many = torch.arange(1000).flip(0) // 100
    expected = sorted(range(1000), key=lambda i: (int(many[i]), i))
    assert rank_runs(many.float()).tolist() == expected


def test_nothing_in_nothing_out() -> None:
    none, attack = torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.int64)
    assert agreement(none, attack).shape == (0,)
    assert clusters(none, attack).representative.shape == (0,)
    bad = clusters(torch.full((2, 3, 8, 8), torch.nan), torch.arange(2))
    assert bad.label.tolist() == [-1, -1]
    assert len(bad.representative) == 0


def test_bad_thresholds_and_single_saves_are_named() -> None:
    pictures, attack = torch.zeros(3, 3, 8, 8), torch.arange(3)
    refuses("threshold=1", clusters, pictures, attack, threshold=1.0)
    refuses("at least two", consistency, pictures[None])

"""Planted pictures, found by several attacks among junk, rank first without their originals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from recon_core import ranking
from recon_core.ranking import (
    agreement,
    clusters,
    consistency,
    rank_runs,
)
from tests.recon_core.correlation import correlation_matrix
from tests.recon_core.tiles import photograph_tiles

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


def test_bad_arguments_are_named() -> None:
    pictures, attack = torch.zeros(3, 3, 8, 8), torch.arange(3)
    with pytest.raises(ValueError, match="threshold=1"):
        clusters(pictures, attack, threshold=1.0)
    with pytest.raises(ValueError, match="at least two"):
        consistency(pictures[None])

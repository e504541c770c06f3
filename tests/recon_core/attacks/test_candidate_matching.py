"""From saved candidates to pairs: the rules again, candidate by candidate, in plain loops."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from recon_core.attacks import candidate_matching as pairing
from recon_core.attacks.candidate_matching import pairs_of
from recon_core.matching import fit_to_range
from recon_core.metrics import ssim_matrix, ssim_pairs
from recon_core.types import Pairs
from tests.recon_core.tiles import digits, photograph_tiles

N, SIDE = 4, 12
ITERATIONS = (10, 200, 3000)
TARGETS = photograph_tiles(SIDE, shrink=8)[:N]
MEAN = TARGETS.float().mean(0) / 255
CENTRED = TARGETS.float() / 255 - MEAN
A_TO_B, NOISE, COPY, BETWEEN, CONSTANT = range(5)
RULE = {"threshold": 0.4, "gap": 0.05}


def saved() -> Tensor:
    """(3 iterations, 5 candidates): what a candidate may do."""
    noise = torch.randn(8, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) / 5
    x = torch.zeros(3, 5, 3, SIDE, SIDE)
    x[0, A_TO_B], x[1, A_TO_B] = noise[0], CENTRED[0] + noise[1] / 4
    x[2, A_TO_B] = 0.25 * CENTRED[0] + 0.75 * CENTRED[1] + noise[2] / 8
    x[:, NOISE] = noise[3:6]
    x[:, COPY] = 1e-4 * CENTRED[2]
    x[:, BETWEEN] = (CENTRED[2] + CENTRED[3]) / 2 + noise[6:7]
    return x


def pairs(x: Tensor, keep: Literal["confident", "all"], **rule: float) -> Pairs:
    return pairs_of(x, TARGETS, MEAN, iterations=ITERATIONS, keep=keep, **{**RULE, **rule})


def by_loops(
    x: Tensor, keep: str, *, threshold: float = 0.4, gap: float = 0.05, clipped: float = 0.01
) -> list[Any]:
    """(candidate, iteration, target, best, second, confident) of every pair, in order."""
    scores = torch.stack(
        [
            ssim_matrix(fit_to_range(some, MEAN, clipped=clipped), TARGETS.float() / 255)
            for some in x
        ]
    ).tolist()
    by_mean = ssim_matrix(MEAN[None], TARGETS.float() / 255)[0].tolist()
    rows: list[Any] = []
    for candidate in range(x.shape[1]):
        target, highest = None, -2.0
        for at in range(len(x)):
            second, best = sorted(scores[at][candidate])[-2:]
            beyond_mean = best - by_mean[scores[at][candidate].index(best)] >= gap
            if best > threshold and best - second >= gap and beyond_mean and best > highest:
                target, highest = scores[at][candidate].index(best), best
        for at, iteration in enumerate(ITERATIONS):
            mine = scores[at][candidate]
            shown = target if keep == "confident" else mine.index(max(mine))
            if shown is None:
                continue
            others = max(score for row, score in enumerate(mine) if row != shown)
            rows.append((candidate, iteration, shown, mine[shown], others, target is not None))
    return rows


@pytest.mark.parametrize("keep", ["confident", "all"])
@pytest.mark.parametrize(
    "rule", [{}, {"gap": 0.3}, {"threshold": 0.9}, {"threshold": -1.0}, {"clipped": 0.0}]
)
def test_equals_the_rules_in_loops(keep: Any, rule: dict[str, float]) -> None:
    x = saved()
    found, expected = pairs(x, keep, **rule), by_loops(x, keep, **rule)
    assert len(found) == len(expected) > 0
    candidate, iteration, target, best, second, confident = zip(*expected, strict=True)
    assert found.candidate.tolist() == list(candidate)
    assert found.iteration.tolist() == list(iteration)
    assert found.target_row.tolist() == list(target)
    assert found.confident.tolist() == list(confident)
    torch.testing.assert_close(found.ssim_best, torch.tensor(best))
    torch.testing.assert_close(found.ssim_second, torch.tensor(second))
    at = [ITERATIONS.index(i) for i in iteration]
    assert torch.equal(found.reconstruction, x[at, list(candidate)])


@pytest.mark.parametrize("keep", ["confident", "all"])
def test_comparing_a_few_at_a_time_changes_nothing(
    keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pairs(saved(), keep)
    monkeypatch.setattr(pairing, "ROWS", 4)
    some = pairs(saved(), keep)
    for name, value in vars(whole).items():
        torch.testing.assert_close(getattr(some, name), value, rtol=1e-6, atol=1e-6)


def test_with_one_image_there_is_no_second() -> None:
    found = pairs_of(saved(), TARGETS[:1], MEAN, iterations=ITERATIONS, keep="confident", **RULE)
    assert found.candidate.unique().tolist() == [A_TO_B]
    assert found.ssim_second.tolist() == [-1.0] * 3


@pytest.mark.parametrize("keep", ["confident", "all"])
def test_a_candidate_that_is_not_a_number_shows_nothing(keep: Any) -> None:
    x = saved()
    calm = pairs(x, keep)
    x[:, NOISE, 0, 0, 0] = torch.nan
    wild = pairs(x, keep)
    others = wild.candidate != NOISE
    for name, value in vars(wild).items():
        kept = getattr(calm, name)[calm.candidate != NOISE]
        torch.testing.assert_close(value[others], kept, rtol=1e-6, atol=1e-6)
    assert not bool(wild.confident[~others].any())
    assert bool((wild.ssim_best[~others] == -1).all())


@pytest.mark.parametrize("invert", [False, True])
def test_a_candidate_that_adds_nothing_to_the_mean_is_never_confident(invert: bool) -> None:
    """On the black ground of digits the mean alone is above the threshold with many of them."""
    images = 1 - digits(12) if invert else digits(12)
    targets, mean = (255 * images).round().to(torch.uint8), images.mean(0)
    by_mean = ssim_pairs(mean.expand_as(images).clone(), images)
    noise = torch.randn(12, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    centred = images - mean
    planted = centred + 0.1 * centred.flatten(1).std(1)[:, None, None, None] * noise
    for x, n_confident in ((torch.zeros_like(planted), 0), (1e-3 * planted, 12)):
        found = pairs_of(
            x[None], targets, mean, iterations=(1,), keep="all", threshold=0.2, gap=0.0
        )
        assert (by_mean > 0.2).sum() >= 3
        assert int(found.confident.sum()) == n_confident
        if n_confident:
            assert found.target_row.tolist() == list(range(12))

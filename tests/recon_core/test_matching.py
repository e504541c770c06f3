"""The papers' matching rules by hand, and from saved candidates to pairs in plain loops."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from recon_core.attacks import candidate_matching as pairing
from recon_core.attacks.candidate_matching import pairs_of
from recon_core.matching import (
    best_and_second,
    best_per_target,
    confident_candidates,
    fit_to_range,
    identified,
    nearest_distances,
    runner_up,
    scaled_to_range,
    sum_of_votes,
)
from recon_core.metrics import ncc_matrix, ssim_matrix, ssim_pairs
from recon_core.types import Pairs
from tests.recon_core.drawing import generator, refuses
from tests.recon_core.tiles import digits, photograph_tiles
from tests.recon_core.votes import vote

NAN = float("nan")


@example(464, 0.0)  # a value so near 0 that dividing by it would show rounding alone
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(-30, 6))
def test_fitted_pictures_touch_the_range_and_do_not_depend_on_the_scale(
    seed: int, exponent: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 3, 4, 4, generator=generator)
    mean = 0.2 + 0.6 * torch.rand(3, 4, 4, generator=generator)  # room everywhere
    picture = fit_to_range(x, mean)
    assert picture.min() >= 0
    assert picture.max() <= 1
    gap = torch.minimum(picture, 1 - picture).flatten(1).amin(dim=1)
    assert (gap < 1e-6).all()
    torch.testing.assert_close(fit_to_range(x * 10.0**exponent, mean), picture, atol=1e-5, rtol=0)
    moved = picture - mean
    r = (moved * x).sum(dim=(1, 2, 3), keepdim=True) / x.square().sum(dim=(1, 2, 3), keepdim=True)
    assert (r > 0).all()
    torch.testing.assert_close(moved, r * x, atol=1e-5, rtol=0)


def test_fitting_recovers_an_image_that_touches_black_and_white() -> None:
    image = torch.rand(1, 3, 8, 8, generator=generator(0))
    image[0, 0, 0, 0], image[0, 1, 1, 1] = 0.0, 1.0
    mean = torch.full((3, 8, 8), 0.45)
    x = 1e-7 * (image - mean)
    torch.testing.assert_close(fit_to_range(x, mean, clipped=0.0), image)
    # One of 192 values may leave the range: r is then that of the second.
    x[0, 2, 2, 2] = -4e-7
    torch.testing.assert_close(
        fit_to_range(x, mean),
        image.index_put_(tuple(torch.tensor([k]) for k in (0, 2, 2, 2)), torch.tensor(0.0)),
    )


def test_so_large_a_share_is_clipped_and_no_more() -> None:
    generator = torch.Generator().manual_seed(0)
    x, mean = torch.randn(2, 3, 32, 32, generator=generator), torch.full((3, 32, 32), 0.5)
    for clipped, n in ((0.0, 0), (0.01, 30), (0.25, 768)):
        picture = fit_to_range(x, mean, clipped=clipped).flatten(1)
        at_the_ends = (picture.clamp(1e-6, 1 - 1e-6) != picture).sum(dim=1)
        assert at_the_ends.tolist() == [n + 1] * 2  # the one that decides is at an end as well
    refuses(r"clipped=1\.0 is a share", fit_to_range, x, mean, clipped=1.0)


def test_arrays_of_numpy_are_fitted_as_tensors_are() -> None:
    x = torch.randn(2, 3, 4, 4, generator=generator(1))
    mean = torch.full((3, 4, 4), 0.25)
    seen = x.numpy()[::-1]  # a view that torch does not take, and that nobody may write to
    seen.flags.writeable = False
    picture = fit_to_range(seen, mean.numpy())
    assert isinstance(picture, np.ndarray)
    np.testing.assert_array_equal(picture[::-1], fit_to_range(x, mean).numpy())


def test_fitting_degenerate_reconstructions() -> None:
    mean = torch.full((3, 4, 4), 0.25)
    x = torch.zeros(3, 3, 4, 4)
    x[1, 0, 0, 0] = NAN
    x[2] = 1.0
    picture = fit_to_range(x, mean)
    torch.testing.assert_close(picture[0], mean)
    assert picture[1].isnan().all()
    torch.testing.assert_close(picture[2], torch.ones(3, 4, 4))
    black = torch.zeros(3, 4, 4)
    torch.testing.assert_close(fit_to_range(-x[2:], black), black[None])


def test_a_mean_of_zero_says_that_x_is_a_picture_already() -> None:
    x = torch.rand(2, 3, 8, 8, generator=generator(0)) * 0.5 + 0.1
    x[1, 0, 0, 0] = 1.5
    nothing = torch.zeros(3, 8, 8)
    assert torch.equal(fit_to_range(x, nothing), x.clamp(0, 1))
    barely = nothing.clone()
    barely[2, 7, 7] = 1e-3
    assert not torch.equal(fit_to_range(x, barely)[0], x[0])
    means = torch.stack([nothing, barely])
    assert torch.equal(fit_to_range(x, means)[0], x[0])


def _grounds() -> dict[str, Tensor]:
    """Pictures whose ground is black or white in all of them, and photographs without one."""
    tiles = photograph_tiles(16, shrink=4)[:30].float() / 255
    far = torch.linspace(-1, 1, 16).square()
    outside = (far[:, None] + far[None]) > 0.6
    return {
        "photographs": tiles,
        "digits": digits(60),
        "digits on white": 1 - digits(60),
        "black ground": tiles.masked_fill(outside, 0.0),
        "white ground": tiles.masked_fill(outside, 1.0),
        "black bars": tiles.clone().index_fill_(2, torch.tensor([0, 1, 14, 15]), 0.0),
    }


@pytest.mark.parametrize("name", _grounds())
@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_noisy_reconstructions_are_shown_nearly_as_well_as_any_scale_can(
    name: str, noise: float
) -> None:
    images = _grounds()[name]
    mean, scales = images.mean(0), torch.logspace(-2, 1, 61)
    x = images - mean
    x = x + noise * x.flatten(1).std(1)[:, None, None, None] * torch.randn(
        x.shape, generator=generator(0)
    )
    unit = x / x.flatten(1).std(1)[:, None, None, None]
    tried = torch.stack([ssim_pairs((s * unit + mean).clamp(0, 1), images) for s in scales])
    shown = ssim_pairs(fit_to_range(1e-4 * x, mean), images)
    by_mean = ssim_pairs(mean.expand_as(images).clone(), images)
    assert shown.mean() > 0.75 * tried.amax(0).mean()
    assert (shown > by_mean).float().mean() > 0.8


def test_only_values_with_room_set_the_scale() -> None:
    mean = torch.tensor([0.0, 1.0, 0.1, 0.5, 0.5]).view(1, 1, 5)
    x = torch.tensor([-3.0, 2.0, -1.0, 1.0, -0.25]).view(1, 1, 1, 5)
    picture = fit_to_range(x, mean, clipped=0.0).flatten()
    torch.testing.assert_close(picture, torch.tensor([0.0, 1.0, 0.0, 1.0, 0.375]))
    # Where the most room is .1, half of it is enough; where there is none, the mean is shown.
    narrow = torch.tensor([0.1, 0.04]).view(1, 1, 2)
    picture = fit_to_range(-torch.tensor([1.0, 2.0]).view(1, 1, 1, 2), narrow, clipped=0.0)
    torch.testing.assert_close(picture.flatten(), torch.zeros(2))
    ends = torch.tensor([0.0, 1.0]).view(1, 1, 2)
    picture = fit_to_range(torch.tensor([-1.0, 1.0]).view(1, 1, 1, 2), ends)
    assert torch.equal(picture[0], ends)


def test_a_picture_from_which_nothing_was_subtracted_keeps_its_black() -> None:
    x = torch.tensor([[-2.0, 0.0, 2.0, 4.0], [-1.0, -3.0, 0.0, -2.0], [NAN, 0.0, 1.0, 2.0]])
    pictures = scaled_to_range(x.view(3, 1, 1, 4))
    assert pictures[0].flatten().tolist() == [0.0, 0.0, 0.5, 1.0]
    assert pictures[1].flatten().tolist() == [0.0] * 4
    assert bool(pictures[2].isnan().all())


def test_best_and_second_by_hand() -> None:
    scores = torch.tensor(
        [[0.1, 0.7, 0.3], [0.5, 0.5, 0.2], [NAN, 0.2, NAN], [NAN, NAN, NAN], [0.4, NAN, 0.6]]
    )
    row, best, second = best_and_second(scores)
    assert row.tolist() == [1, 0, 1, 0, 2]
    torch.testing.assert_close(best, torch.tensor([0.7, 0.5, 0.2, -1.0, 0.6]))
    torch.testing.assert_close(second, torch.tensor([0.3, 0.5, -1.0, -1.0, 0.4]))


def test_one_training_image_has_no_second() -> None:
    row, best, second = best_and_second(torch.tensor([[0.3], [NAN]]))
    assert row.tolist() == [0, 0]
    torch.testing.assert_close(best, torch.tensor([0.3, -1.0]))
    assert second.tolist() == [-1.0, -1.0]
    refuses("at least one training image", best_and_second, torch.zeros(2, 0))


def test_the_confidence_rule_by_hand() -> None:
    """Clear; never above .4; tied; confident once and later ambiguous; on the boundary; without a
    score at first, which names no target."""
    best = torch.tensor([[0.50, 0.39, 0.80, 0.45, 0.4, NAN], [0.60, 0.30, 0.90, 0.70, 0.4, 0.3]])
    second = torch.tensor([[0.10, 0.00, 0.80, 0.20, 0.0, -1], [0.20, 0.00, 0.86, 0.69, 0.0, -1]])
    rows = torch.tensor([[1, 2, 3, 4, 0, 5], [5, 6, 7, 8, 9, 7]])
    confident, target = confident_candidates(rows, best, second)
    assert confident.tolist() == [True, False, False, True, False, False]
    assert target.tolist() == [5, 2, 7, 4, 0, 7]
    one = (rows[:1, :1], torch.tensor([[0.35]]), torch.tensor([[0.34]]))
    assert not confident_candidates(*one)[0]
    assert confident_candidates(*one, threshold=0.3, margin=0.0)[0]
    refuses("no saved iteration", confident_candidates, rows[:0], best[:0], second[:0])


def test_ties_go_to_the_lowest_row_and_nothing_to_match_is_no_error() -> None:
    tied = torch.full((3, 4), 0.5)
    row, best, second = best_and_second(tied)
    assert row.tolist() == [0, 0, 0]
    assert best.tolist() == second.tolist() == [0.5, 0.5, 0.5]
    assert best_per_target(tied)[0].tolist() == [0, 0, 0, 0]
    assert [len(part) for part in best_and_second(torch.zeros(0, 4))] == [0, 0, 0]
    assert [len(part) for part in best_per_target(torch.zeros(3, 0))] == [0, 0]


def test_best_candidate_of_each_image() -> None:
    scores = torch.tensor([[0.2, NAN, NAN, 0.5], [0.9, 0.1, NAN, 0.5]])
    candidate, score = best_per_target(scores)
    assert candidate.tolist() == [1, 1, -1, 0]
    torch.testing.assert_close(score, torch.tensor([0.9, 0.1, -1.0, 0.5]))
    candidate, score = best_per_target(torch.zeros(0, 2))
    assert candidate.tolist() == [-1, -1]
    assert score.tolist() == [-1.0, -1.0]


def test_an_image_is_identified_by_a_picture_that_is_like_no_other_image() -> None:
    """Members 0 to 2, decoys 3 and 4. Picture 0 shows member 0, picture 1 could be any; picture 2
    is like decoy 3, and more like member 2, with which decoys are not compared."""
    scores = torch.tensor(
        [[0.9, 0.3, 0.2, 0.2, 0.1], [0.3, 0.52, 0.5, 0.3, 0.5], [0.2, 0.2, 0.55, 0.5, 0.3]]
    )
    member = torch.tensor([True, True, True, False, False])
    row, _score = best_per_target(scores)
    assert row.tolist() == [0, 1, 2, 2, 1]
    second = runner_up(scores, row, member)
    torch.testing.assert_close(second, torch.tensor([0.3, 0.5, 0.5, 0.3, 0.3]))
    assert identified(scores, row, member).tolist() == [True, False, True, True, True]
    nothing = torch.full((5,), -1)
    assert not identified(scores, nothing, member).any()
    assert not identified(scores[:0], nothing, member).any()


def test_the_mean_image_identifies_at_most_one_image_however_good_it_looks() -> None:
    images = digits(40)
    member = torch.arange(40) < 20
    mean = images[:20].mean(0)
    scores = ssim_matrix(mean.expand(20, -1, -1, -1).clone(), images)
    row, _score = best_per_target(scores)
    assert identified(scores, row, member)[:20].sum() <= 1
    exact = ssim_matrix(images, images)
    assert identified(exact, torch.arange(40), member).all()
    twice = torch.cat([images, images[:1]])
    member = torch.cat([member, torch.tensor([True])])
    scores = ssim_matrix(images, twice)
    found = identified(scores, best_per_target(scores)[0], member)
    assert found.tolist() == [False, *[True] * 39, False]


def _literal_vote(x: Tensor, distances: Tensor, ratio: float) -> Tensor:
    """KKT paper, A.1, word by word: sort, take up to the first further than B d_1, sum."""
    merged = []
    for column in distances.T:
        order = column.argsort(stable=True)
        n_taken = 1
        while n_taken < len(x) and column[order[n_taken]] <= ratio * column[order[0]]:
            n_taken += 1
        merged.append(sum(x[j] for j in order[:n_taken]) / n_taken)
    return torch.stack(merged)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1.0, 1.1, 1.5, 100.0]))
def test_voting_is_the_papers_procedure(seed: int, ratio: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 1, 4, 4, generator=generator)
    targets = torch.randn(3, 1, 4, 4, generator=generator)
    distances = ncc_matrix(x, targets)
    voted = vote(x, distances, ratio=ratio)
    torch.testing.assert_close(voted.x, _literal_vote(x, distances, ratio), atol=1e-5, rtol=1e-5)
    if ratio == 1.0:
        torch.testing.assert_close(voted.x, x[distances.argmin(dim=0)])
        assert voted.n_voters.tolist() == [1, 1, 1]
    if ratio == 100.0:
        assert voted.n_voters.tolist() == [9, 9, 9]


def test_voting_by_hand() -> None:
    """B = 1.5: the boundary is in, a tie is in, a NaN distance and a NaN candidate are out."""
    x = torch.arange(5.0)[:, None, None, None] * torch.ones(1, 1, 2)
    x[4, 0, 0, 1] = NAN
    distances = torch.tensor([[1.0, 2.0], [1.5, NAN], [1.75, 2.0], [NAN, 9.0], [0.5, 0.5]])
    voted = vote(x, distances, ratio=1.5)
    assert voted.n_voters.tolist() == [2, 2]
    assert voted.x[:, 0, 0, 0].tolist() == [0.5, 1.0]


def test_exact_copies_vote_together_although_rounding_tells_them_apart() -> None:
    image = torch.rand(1, 3, 8, 8, generator=generator(1))
    x = torch.cat([image, 1.7 * image + 0.3, 1e-5 * image, image.flip(-1)])
    distances = ncc_matrix(x, image)
    assert distances[:3].max() < 1e-12
    assert vote(x, distances, ratio=1.0).n_voters.tolist() == [3]
    assert vote(x, torch.zeros(4, 1), ratio=1.1).n_voters.tolist() == [4]


def test_voting_with_nothing_to_vote() -> None:
    x = torch.ones(2, 1, 2, 2)
    lost = vote(x, torch.tensor([[NAN, 0.1], [torch.inf, 0.2]]), ratio=1.1)
    assert lost.x[0].isnan().all()
    assert lost.n_voters.tolist() == [0, 1]
    none = vote(x[:0], torch.zeros(0, 2), ratio=1.1)
    assert none.x.isnan().all()
    assert vote(x, torch.zeros(2, 0), ratio=1.1).x.shape == (0, 1, 2, 2)
    refuses(r"ratio=0\.9", vote, x, torch.zeros(2, 1), ratio=0.9)
    refuses("a distance is 0 or more", vote, x, torch.tensor([[0.5], [-0.5]]), ratio=1.1)


@pytest.mark.parametrize("ratio", [1.0, 1.2])
def test_voting_in_pieces_is_voting_in_one_go(ratio: float) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(6, 3, 8, 8, generator=generator)
    x = images[torch.arange(40) % 5] + 0.4 * torch.randn(40, 3, 8, 8, generator=generator)
    x[7, 0, 0, 0] = NAN
    distances = ncc_matrix(x, images)
    distances[:, 5] = NAN  # nothing votes for the last image
    whole = vote(x, distances, ratio=ratio)
    pieces = [slice(0, 1), slice(1, 20), slice(20, 20), slice(20, 40)]
    nearest = torch.stack([nearest_distances(x[k], distances[k]) for k in pieces]).amin(dim=0)
    sums = [sum_of_votes(x[k], distances[k], nearest, ratio=ratio) for k in pieces]
    n_voters = torch.stack([n for _total, n in sums]).sum(dim=0)
    total = torch.stack([total for total, _n in sums]).sum(dim=0)
    assert n_voters.tolist() == whole.n_voters.tolist()
    assert n_voters[5] == 0
    assert ratio == 1.0 or n_voters.max() > 1
    mean = (total / n_voters[:, None, None, None]).float()
    torch.testing.assert_close(mean, whole.x, equal_nan=True, atol=1e-6, rtol=1e-5)


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

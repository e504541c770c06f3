"""What another run of an image is worth, and draws in proportion to it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon_core.adaptive import History, draw, worth
from recon_core.sampling import Phase, Sampling, plan_hash, plan_part
from recon_core.types import RunSpec

LABELS = np.arange(60, dtype=np.int64) % 3 // 2  # 40 zeros, 20 ones
SAMPLING = Sampling(
    images_per_run=12,
    phases=(Phase(sampler="adaptive", n_runs=400),),
    runs_per_part=20,
    parts_per_round=1,
    lag=2,
)


def history(*rows: tuple[int, int, int]) -> History:
    """One (n_runs, n_back, n_pairs) per image."""
    return History(*np.array(rows, np.int64).T)


def value(found: History, **changes: Any) -> list[float]:
    return worth(found, **({"prior_back": 1.0, "prior_runs": 10.0, "enough": 2} | changes)).tolist()


def plan(
    part: int, known: History, *, sampling: Sampling = SAMPLING, root_seed: int = 0
) -> tuple[RunSpec, ...]:
    return plan_part(sampling, part, labels=LABELS, history=known, root_seed=root_seed)


def visits(specs: tuple[RunSpec, ...], n: int = 60) -> np.ndarray:
    return np.bincount([i for spec in specs for i in spec.image_ids], minlength=n)


def test_worth_is_the_expected_chance_halved_with_every_enough_pairs() -> None:
    found = history((0, 0, 0), (40, 0, 0), (40, 9, 0), (0, 0, 2), (0, 0, 4), (0, 0, 3))
    assert value(found) == pytest.approx([0.1, 0.02, 0.2, 0.05, 0.025, 0.0375])
    assert value(found, prior_back=0.5, prior_runs=20.0, enough=4)[:4] == pytest.approx(
        [0.025, 0.5 / 60, 9.5 / 60, 0.025 * 0.75]
    )


def test_worth_falls_with_every_pair_and_with_every_run_in_vain() -> None:
    more_pairs = value(history(*[(30, 3, z) for z in range(50)]), enough=7)
    assert all(later < sooner for sooner, later in pairwise(more_pairs))
    in_vain = value(history(*[(n, 0, 0) for n in range(50)]))
    assert all(later < sooner for sooner, later in pairwise(in_vain))


def test_only_the_difference_in_pairs_counts_and_none_is_ever_worthless() -> None:
    few = value(history((10, 5, 40), (10, 5, 48)))
    many = value(history((10, 5, 1_000_040), (10, 5, 1_000_048)))
    assert few == many
    assert few[0] == 16 * few[1]
    assert min(value(history((10, 5, 0), (10, 5, 10**9)))) > 0


def test_worth_has_the_same_bits_everywhere() -> None:
    # No logarithm, no power: another value here is another plan on another machine.
    exact = [value(history((n, n // 3, 5 * n), (0, 0, 0)))[0].hex() for n in (3, 7)]
    assert exact == [(2 / 13 * 2.0**-7 * 0.75).hex(), (3 / 17 * 2.0**-17 * 0.75).hex()]


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 1000), size=st.integers(1, 40), steep=st.integers(0, 30))
def test_draws_are_different_positions(seed: int, size: int, steep: int) -> None:
    weights = 2.0 ** -(np.arange(40) * steep % 500)
    found = draw(weights, size, np.random.default_rng(seed))
    assert len(set(found.tolist())) == len(found) == size
    assert found.min() >= 0
    assert found.max() < 40


def test_draws_follow_the_weights_without_replacement() -> None:
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    rng = np.random.default_rng(0)
    n = 20_000
    drawn = np.array([draw(weights, 2, rng) for _ in range(n)])
    first = np.bincount(drawn[:, 0], minlength=4) / n
    np.testing.assert_allclose(first, weights / 8, atol=4 * np.sqrt(0.25 / n))
    expected = sum(w / 8 * 2 / (8 - w) for w in (4.0, 1.0, 1.0))  # position 1 comes second
    assert np.mean(drawn[:, 1] == 1) == pytest.approx(expected, abs=4 * np.sqrt(0.25 / n))


def test_the_heaviest_come_first_when_weights_differ_beyond_rounding() -> None:
    weights = np.array([2.0**-400, 1.0, 2.0**-200, 2.0**-100])
    assert draw(weights, 4, np.random.default_rng(1)).tolist() == [1, 3, 2, 0]


def test_plans_are_pure_and_a_run_has_its_own_random_numbers() -> None:
    known = history(*[(20, i % 5, 11 * (i % 5)) for i in range(60)])
    assert plan(3, known) == plan(3, known)
    assert plan_hash(plan(3, known)) != plan_hash(plan(3, known, root_seed=1))
    sets = [frozenset(spec.image_ids) for part in (3, 4) for spec in plan(part, known)]
    assert len(set(sets)) == len(sets)  # a round does not repeat one set of images
    other_parts = Sampling(
        images_per_run=12,
        phases=(Phase(sampler="adaptive", n_runs=400),),
        runs_per_part=10,
    )
    halves = plan(6, known, sampling=other_parts) + plan(7, known, sampling=other_parts)
    assert halves == plan(3, known)


def test_adaptive_plans_are_those_that_existing_datasets_were_made_with() -> None:
    # Another value means that no existing dataset can be continued with these settings.
    known = history(*[(20, i % 5, 11 * (i % 5)) for i in range(60)])
    assert plan_hash(plan(0, History.empty(60)))[:16] == "f0db0be8fc9f3601"
    assert plan_hash(plan(3, known))[:16] == "d0753833874a90d0"


def test_runs_are_balanced_and_have_no_image_twice_however_uneven_the_worth() -> None:
    known = history(*[(20, i % 5, 400 * (i % 5)) for i in range(60)])
    for spec in plan(3, known):
        assert spec.labels == (0,) * 6 + (1,) * 6
        assert tuple(LABELS[list(spec.image_ids)]) == spec.labels
        assert len(set(spec.image_ids)) == 12


def test_labels_are_weighed_apart_and_unused_images_not_at_all() -> None:
    labels = np.where(np.arange(60) < 6, -1, LABELS)
    known = history(*[(0, 0, 0)] * 6, *[(99, 99, 10_000 + 2 * (i // 2 % 20)) for i in range(54)])
    specs = plan_part(SAMPLING, 0, labels=labels, history=known, root_seed=0)
    many = visits(specs)
    assert many[:6].sum() == 0
    fewest, most = known.n_pairs == 10_000, known.n_pairs >= 10_026
    assert many[fewest].mean() > 10 * max(0.1, many[most].mean())


def test_without_a_history_all_images_are_alike() -> None:
    many = visits(sum((plan(part, History.empty(60)) for part in range(20)), ()))
    for label, n in ((0, 40), (1, 20)):
        expected = 400 * 6 / n
        of_label = many[label == LABELS]
        assert np.abs(of_label - expected).max() < 5 * np.sqrt(expected)


def test_runs_go_to_the_promising_not_to_the_hopeless_nor_to_the_covered() -> None:
    # In each label: untried, promising with little, hopeless, and covered images in turns.
    kinds = ((0, 0, 0), (100, 20, 0), (1000, 0, 0), (100, 90, 1000))
    known = history(*[kinds[i // 3 % 4] for i in range(60)])
    few = Sampling(images_per_run=4, phases=SAMPLING.phases, runs_per_part=200)
    many = visits(plan(0, known, sampling=few))
    untried, promising, hopeless, covered = (
        many[[i for i in range(60) if i // 3 % 4 == kind]].sum() for kind in range(4)
    )
    assert promising > 1.3 * untried > 1.3 * 20 * hopeless
    assert covered == 0


CHANCES = np.array([0.0, 0.02, 0.5])[np.arange(60) // 3 % 3]
HOPELESS, HARD, EASY = (chance == CHANCES for chance in (0.0, 0.02, 0.5))


def campaign(sampler: Any, **settings_: Any) -> tuple[np.ndarray, np.ndarray]:
    """(runs, pairs) of each image after 600 runs in which image i comes back with CHANCES[i]."""
    sampling = Sampling(
        images_per_run=12,
        phases=(Phase(sampler=sampler, n_runs=600, pool_size=24, **settings_),),
        runs_per_part=20,
        parts_per_round=1,
    )
    rng = np.random.default_rng(3)
    now = np.zeros((3, 60), np.int64)
    states = [now.copy(), now.copy()]  # what round k may know with a lag of two
    for k in range(30):
        for spec in plan(k, History(*states[k]), sampling=sampling):
            ids = np.array(spec.image_ids)
            back = rng.random(12) < CHANCES[ids]
            now[:, ids] += np.stack([np.ones(12, np.int64), back, 11 * back])
        states.append(now.copy())
    return now[0], now[2]


def test_in_a_small_world_runs_go_to_the_hard_rather_than_to_the_hopeless_or_the_covered() -> None:
    n_runs, n_pairs = campaign("adaptive", enough=44)
    uniform_runs, uniform_pairs = campaign("uniform")
    least_runs, _ = campaign("least_seen")
    assert n_runs.min() > 30  # every image is tried
    assert n_runs[HARD].mean() > 1.25 * n_runs[HOPELESS].mean() > 1.25 * n_runs[EASY].mean()
    assert n_runs[HARD].mean() > 1.25 * uniform_runs[HARD].mean()
    assert n_runs[HOPELESS].mean() < 0.6 * least_runs[HOPELESS].mean()  # not chased
    assert n_runs[EASY].mean() < 0.6 * uniform_runs[EASY].mean()  # not over-seeded
    assert n_pairs[EASY].std() < 0.3 * uniform_pairs[EASY].std()
    assert n_pairs[HARD].sum() > 1.25 * uniform_pairs[HARD].sum()


def test_the_fewer_pairs_are_enough_the_more_runs_go_where_none_came_back() -> None:
    few, many = campaign("adaptive", enough=2), campaign("adaptive", enough=44)
    assert few[1][EASY].mean() < 0.2 * many[1][EASY].mean()
    assert few[0][HOPELESS].mean() > 1.5 * many[0][HOPELESS].mean()
    assert (few[1][~HOPELESS] > 0).all()


def test_a_history_must_fit_together_and_to_the_labels() -> None:
    for wrong in ((1, 2, 0), (1, -1, 0), (1, 1, -1)):
        with pytest.raises(ValueError, match=r"image 1 came back in .*0 <= n_back <= n_runs"):
            history((3, 1, 5), wrong)
    with pytest.raises(ValueError, match="the history is of 59 images, the labels of 60"):
        plan(0, History.empty(59))


def test_fewer_images_of_a_label_than_a_run_needs() -> None:
    sampling = Sampling(images_per_run=42, phases=SAMPLING.phases, runs_per_part=20)
    message = "needs 21 images of each of the 2 labels, but label 1 has 20; use at most 40"
    with pytest.raises(ValueError, match=message):
        plan(0, History.empty(60), sampling=sampling)
    all_of_them = Sampling(images_per_run=40, phases=SAMPLING.phases, runs_per_part=20)
    known = history(*[(20, i % 5, 4000 * (i % 5)) for i in range(60)])
    for spec in plan(0, known, sampling=all_of_them):
        assert set(spec.image_ids) >= set(np.flatnonzero(LABELS == 1).tolist())


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"enough": 0}, "enough=0 must be at least 1"),
        ({"prior_back": 0.0}, r"prior_back=0.0 must be above 0 and below prior_runs=10.0"),
        ({"prior_back": 10.0}, r"prior_back=10.0 must be above 0 and below"),
        ({"prior_runs": float("inf")}, "prior_runs=inf"),
        ({"prior_back": float("nan")}, "prior_back=nan"),
    ],
)
def test_refuses(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Phase(sampler="adaptive", **settings_)

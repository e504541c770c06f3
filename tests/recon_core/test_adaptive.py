"""What another run of an image is worth, and draws in proportion to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon_core.sampling import History, Phase, Sampling, draw, plan_hash, plan_part, worth
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


def test_a_run_has_its_own_random_numbers_whatever_part_it_is_in() -> None:
    known = history(*[(20, i % 5, 11 * (i % 5)) for i in range(60)])
    assert plan_hash(plan(3, known)) != plan_hash(plan(3, known, root_seed=1))
    sets = [frozenset(spec.image_ids) for part in (3, 4) for spec in plan(part, known)]
    assert len(set(sets)) == len(sets)  # a round does not repeat one set of images
    other_parts = Sampling(images_per_run=12, phases=SAMPLING.phases, runs_per_part=10)
    halves = plan(6, known, sampling=other_parts) + plan(7, known, sampling=other_parts)
    assert halves == plan(3, known)


def test_adaptive_plans_are_those_that_existing_datasets_were_made_with() -> None:
    # Another value means that no existing dataset can be continued with these settings.
    known = history(*[(20, i % 5, 11 * (i % 5)) for i in range(60)])
    assert plan_hash(plan(0, History.empty(60)))[:16] == "f0db0be8fc9f3601"
    assert plan_hash(plan(3, known))[:16] == "d0753833874a90d0"


def test_labels_are_weighed_apart_and_unused_images_not_at_all() -> None:
    labels = np.where(np.arange(60) < 6, -1, LABELS)
    known = history(*[(0, 0, 0)] * 6, *[(99, 99, 10_000 + 2 * (i // 2 % 20)) for i in range(54)])
    specs = plan_part(SAMPLING, 0, labels=labels, history=known, root_seed=0)
    many = visits(specs)
    assert many[:6].sum() == 0
    fewest, most = known.n_pairs == 10_000, known.n_pairs >= 10_026
    assert many[fewest].mean() > 10 * max(0.1, many[most].mean())


def test_a_history_must_fit_together_and_to_the_labels() -> None:
    for wrong in ((1, 2, 0), (1, -1, 0), (1, 1, -1)):
        with pytest.raises(ValueError, match=r"image 1 came back in .*0 <= n_back <= n_runs"):
            history((3, 1, 5), wrong)
    with pytest.raises(ValueError, match="the history is of 59 images, the labels of 60"):
        plan(0, History.empty(59))


def test_a_label_with_as_many_images_as_a_run_needs_gives_them_all() -> None:
    all_of_them = Sampling(images_per_run=40, phases=SAMPLING.phases, runs_per_part=20)
    known = history(*[(20, i % 5, 4000 * (i % 5)) for i in range(60)])
    for spec in plan(0, known, sampling=all_of_them):
        assert set(spec.image_ids) >= set(np.flatnonzero(LABELS == 1).tolist())

"""Plans: balanced, deterministic, of finished rounds only; draws by what a run is worth."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recon_core.sampling import (
    CIFAR10_CLASSES,
    History,
    Phase,
    Sampling,
    binary_labels,
    class_labels,
    draw,
    plan_hash,
    plan_part,
    worth,
)
from recon_core.types import RunSpec, seeded_generator
from tests.recon_core.drawing import refuses

LABELS = np.arange(60, dtype=np.int64) % 3 // 2  # 40 zeros, 20 ones
NOTHING = np.zeros(60, np.int64)
TWO_PHASES = Sampling(
    images_per_run=6,
    phases=(Phase(n_runs=8), Phase(sampler="least_seen", n_runs=12, pool_size=8)),
    runs_per_part=2,
    parts_per_round=2,
    lag=2,
)


def with_pairs(seen: Any) -> History:
    """Images that came back in so many of some runs, with a pair each time."""
    return History(np.full_like(seen, 10 + seen.max()), seen, seen)


def plan(
    sampling: Sampling, part: int, *, seen: Any = NOTHING, root_seed: int = 0
) -> tuple[RunSpec, ...]:
    history = with_pairs(seen)
    return plan_part(sampling, part, labels=LABELS, history=history, root_seed=root_seed)


def images_of(specs: tuple[RunSpec, ...]) -> set[int]:
    return {image for spec in specs for image in spec.image_ids}


@settings(deadline=None, max_examples=25)
@given(
    half=st.integers(1, 10),
    part=st.integers(0, 9),
    root_seed=st.integers(0, 2**40),
    counts_seed=st.integers(0, 1000),
)
def test_runs_are_balanced_and_have_no_image_twice(
    half: int, part: int, root_seed: int, counts_seed: int
) -> None:
    sampling = dataclasses.replace(TWO_PHASES, images_per_run=2 * half)
    seen = np.random.default_rng(counts_seed).integers(0, 5, 60)
    specs = plan(sampling, part, seen=seen, root_seed=root_seed)
    assert [s.run for s in specs] == [2 * part, 2 * part + 1]
    for spec in specs:
        assert spec.labels == (0,) * half + (1,) * half
        assert tuple(LABELS[list(spec.image_ids)]) == spec.labels
        assert len(set(spec.image_ids)) == 2 * half


def test_the_plan_hash_covers_all_of_a_run_and_its_order() -> None:
    spec = RunSpec(run=1, root_seed=2, image_ids=(3, 4), labels=(0, 1))
    changes = {"run": 9, "root_seed": 9, "image_ids": (3, 9), "labels": (1, 0), "victim": 4}
    changed = [dataclasses.replace(spec, **{name: to}) for name, to in changes.items()]
    assert len({plan_hash([s]) for s in [spec, *changed]}) == 6
    assert plan_hash([spec, changed[0]]) != plan_hash([changed[0], spec])


def test_uniform_runs_ignore_the_counts_and_reach_every_image() -> None:
    seen = np.arange(60, dtype=np.int64)
    assert plan(TWO_PHASES, 0) == plan(TWO_PHASES, 0, seen=seen)
    many = Sampling(images_per_run=6, phases=(Phase(n_runs=80),), runs_per_part=80)
    assert images_of(plan(many, 0)) == set(range(60))


def test_least_seen_draws_from_the_pool_only() -> None:
    seen = np.random.default_rng(0).permutation(60).astype(np.int64)
    pool = {
        int(i)
        for label in (0, 1)
        for i in sorted(np.flatnonzero(label == LABELS), key=lambda i: seen[i])[:4]
    }
    drawn = [images_of(plan(TWO_PHASES, part, seen=seen)) for part in range(4, 10)]
    assert set().union(*drawn) == pool
    larger = dataclasses.replace(TWO_PHASES, images_per_run=20)  # the pool grows to the run
    expected = {*np.flatnonzero(LABELS == 0)[:10], *np.flatnonzero(LABELS == 1)[:10]}
    assert images_of(plan(larger, 4, seen=np.arange(60, dtype=np.int64))) == expected


def test_ties_are_broken_at_random_by_round_and_alike_within_one() -> None:
    # All counts equal: every round has its own pool, and the parts of a round share theirs.
    wide = dataclasses.replace(
        TWO_PHASES,
        phases=(Phase(sampler="least_seen", n_runs=80, pool_size=8),),
        runs_per_part=20,
    )
    pools = [images_of(plan(wide, part)) for part in range(4)]
    assert [len(pool) for pool in pools] == [8, 8, 8, 8]
    assert pools[0] == pools[1]
    assert pools[2] == pools[3]
    assert pools[0] != pools[2]


def test_rounds_parts_and_phases() -> None:
    assert (TWO_PHASES.n_runs, TWO_PHASES.n_parts, TWO_PHASES.n_rounds) == (20, 10, 5)
    assert [TWO_PHASES.parts_of_round(k) for k in (0, 2)] == [range(2), range(4, 6)]
    assert [TWO_PHASES.round_of_part(p) for p in (0, 1, 2, 9)] == [0, 0, 1, 4]
    samplers = [TWO_PHASES.phase_of_part(p).sampler for p in (0, 3, 4, 9)]
    assert samplers == ["uniform", "uniform", "least_seen", "least_seen"]
    assert [TWO_PHASES.needs_counts(k) for k in range(5)] == [False, False, True, True, True]
    refuses("part 10 is beyond the campaign's 10 parts", TWO_PHASES.phase_of_part, 10)
    spanning = dataclasses.replace(TWO_PHASES, parts_per_round=3)  # round 1 is of both phases
    assert [spanning.needs_counts(k) for k in range(4)] == [False, True, True, True]
    assert spanning.parts_of_round(3) == range(9, 10)


@pytest.mark.parametrize(
    ("lag", "known"),
    [(1, [[], [0], [0, 1], [0, 1, 2]]), (2, [[], [], [0], [0, 1]]), (9, [[], [], [], []])],
)
def test_a_round_knows_the_rounds_up_to_lag_before_it(lag: int, known: list[list[int]]) -> None:
    sampling = dataclasses.replace(TWO_PHASES, lag=lag)
    assert [list(sampling.known_rounds(k)) for k in range(4)] == known


def test_growing_the_last_phase_keeps_the_plans_of_the_earlier_parts() -> None:
    first, last = TWO_PHASES.phases
    longer = dataclasses.replace(
        TWO_PHASES, phases=(first, dataclasses.replace(last, n_runs=last.n_runs + 6))
    )
    seen = np.random.default_rng(1).integers(0, 4, 60)
    for part in range(TWO_PHASES.n_parts):
        assert plan(TWO_PHASES, part, seen=seen) == plan(longer, part, seen=seen)
        round_index = TWO_PHASES.round_of_part(part)
        assert longer.round_of_part(part) == round_index
        assert longer.known_rounds(round_index) == TWO_PHASES.known_rounds(round_index)


SWEEPS = Sampling(
    images_per_run=6, phases=(Phase(n_runs=12),), runs_per_part=2, attacks_per_victim=4
)


def test_attacks_on_a_victim_share_its_images_across_parts() -> None:
    parts = [plan(SWEEPS, part) for part in range(SWEEPS.n_parts)]
    runs = [spec for part in parts for spec in part]
    assert [spec.run for spec in runs] == list(range(12))
    assert [spec.victim for spec in runs] == [0] * 4 + [1] * 4 + [2] * 4
    by_victim = {spec.victim: spec for spec in runs}
    assert all(spec.image_ids == by_victim[spec.victim].image_ids for spec in runs)
    assert len({spec.image_ids for spec in runs}) == 3
    alone = dataclasses.replace(SWEEPS, attacks_per_victim=1)
    for victim in range(3):
        images = plan(alone, victim // 2)[victim % 2].image_ids
        assert by_victim[victim].image_ids == images, "victim v has the images of a run v"


def test_the_numbers_of_a_victim_are_the_same_for_all_its_runs() -> None:
    first, second = plan(SWEEPS, 2)
    draws = [torch.rand(4, generator=spec.victim_generator("victim")) for spec in (first, second)]
    assert torch.equal(*draws)
    own = [torch.rand(4, generator=spec.generator("attack")) for spec in (first, second)]
    assert not torch.equal(*own)
    unlike = plan(SWEEPS, 4)[0].victim_generator("victim")
    assert not torch.equal(draws[0], torch.rand(4, generator=unlike))


def test_too_few_images_of_a_label() -> None:
    sampling = dataclasses.replace(TWO_PHASES, images_per_run=42)
    message = "images_per_run=42 needs 21 images of each of the 2 labels.* has 20; use at most 40"
    refuses(message, plan, sampling, 0)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (TWO_PHASES, {"runs_per_part": 3}, "n_runs=8 is not a multiple of runs_per_part=3; use 9"),
        (TWO_PHASES, {"phases": ()}, r"phases=\(\) plans no run"),
        (SWEEPS, {"attacks_per_victim": 5}, "n_runs=12 is not a multiple of .*_victim=5; use 15"),
        (
            SWEEPS,
            {"phases": (Phase(n_runs=12, sampler="least_seen"),)},
            "attacks_per_victim=4 with sampler='least_seen'",
        ),
    ],
)
def test_refuses(base: Sampling, changes: dict[str, Any], message: str) -> None:
    refuses(message, dataclasses.replace, base, **changes)


@pytest.mark.parametrize(
    ("classes", "names", "labels", "task"),
    [
        (np.arange(10), CIFAR10_CLASSES, [0, 0, *[1] * 6, 0, 0], "vehicles against animals"),
        (np.array([0, 1, 1]), ("cat", "ship"), [1, 0, 0], "vehicles against animals"),
        (np.array([0, 1]), ("cat", "dog"), [0, 1], "cat against dog"),
        (np.arange(5), tuple("abcde"), [0, 0, 1, 1, 1], "a and b against c, d and e"),
    ],
)
def test_cifar_becomes_vehicles_against_animals_and_other_classes_are_halved(
    classes: np.ndarray, names: tuple[str, ...], labels: list[int], task: str
) -> None:
    found, name = binary_labels(classes, names)
    assert (found.tolist(), name) == (labels, task)
    refuses(r"1 class \(cats\).*at least two", binary_labels, np.zeros(3, np.int64), ("cats",))


def test_classes_of_a_multiclass_victim_are_the_sources_first() -> None:
    labels, task = class_labels(np.array([0, 2, 1, 3]), ("a", "b", "c", "d"), 3)
    assert (labels.tolist(), task) == ([0, 2, 1, -1], "a against b against c")
    refuses(r"n_classes=3, but the source has", class_labels, np.zeros(3, np.int64), ("a", "b"), 3)


@pytest.mark.parametrize("sampler", ["uniform", "least_seen", "adaptive"])
def test_runs_are_balanced_over_all_labels_and_leave_out_the_rest(sampler: Any) -> None:
    labels = np.array([0, 1, 2, -1] * 10)
    sampling = Sampling(
        images_per_run=6, phases=(Phase(sampler=sampler, n_runs=4, pool_size=9),), runs_per_part=4
    )
    seen = np.arange(40)
    specs = plan_part(sampling, 0, labels=labels, history=with_pairs(seen), root_seed=0, n_labels=3)
    for spec in specs:
        assert spec.labels == (0, 0, 1, 1, 2, 2)
        assert labels[list(spec.image_ids)].tolist() == list(spec.labels)
        assert len(set(spec.image_ids)) == 6
        if sampler == "least_seen":
            assert max(spec.image_ids) < 12  # the three least seen of each label
    with pytest.raises(ValueError, match="images_per_run=6 is not a multiple of the 4 labels"):
        plan_part(sampling, 0, labels=labels, history=with_pairs(seen), root_seed=0, n_labels=4)


def first_draws(spec: RunSpec, purpose: str) -> list[float]:
    return torch.rand(4, generator=spec.generator(purpose)).tolist()


SPEC = RunSpec(run=3, root_seed=7, image_ids=(5, 2), labels=(0, 1))


def test_a_label_is_missing() -> None:
    refuses("run 3 has 2 image_ids but", RunSpec, run=3, root_seed=7, image_ids=(5, 2), labels=(0,))


def test_streams_are_of_the_run_the_seed_and_the_purpose_and_not_of_the_images() -> None:
    others = [dataclasses.replace(SPEC, run=4), dataclasses.replace(SPEC, root_seed=8)]
    swapped = dataclasses.replace(SPEC, run=7, root_seed=3)
    streams = [first_draws(spec, "attack") for spec in (SPEC, *others, swapped)]
    assert len({tuple(stream) for stream in [*streams, first_draws(SPEC, "victim")]}) == 5
    assert first_draws(dataclasses.replace(SPEC, image_ids=(9, 8)), "attack") == streams[0]


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
    return worth(found, Phase(**changes)).tolist()


def adaptive_plan(
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
    assert plan_hash(adaptive_plan(3, known)) != plan_hash(adaptive_plan(3, known, root_seed=1))
    sets = [frozenset(spec.image_ids) for part in (3, 4) for spec in adaptive_plan(part, known)]
    assert len(set(sets)) == len(sets)  # a round does not repeat one set of images
    other_parts = Sampling(images_per_run=12, phases=SAMPLING.phases, runs_per_part=10)
    halves = adaptive_plan(6, known, sampling=other_parts) + adaptive_plan(
        7, known, sampling=other_parts
    )
    assert halves == adaptive_plan(3, known)


def test_plans_and_streams_are_those_that_existing_datasets_were_made_with() -> None:
    # Another value means that no existing dataset can be continued: a change of the store's schema.
    known = history(*[(20, i % 5, 11 * (i % 5)) for i in range(60)])
    plans = (plan(TWO_PHASES, 1), plan(TWO_PHASES, 6))
    adaptive = (adaptive_plan(0, History.empty(60)), adaptive_plan(3, known))
    assert [plan_hash(specs)[:16] for specs in (*plans, *adaptive)] == [
        *("7ecfc2c0d57ec66c", "f52ec5cdac45cd74", "f0db0be8fc9f3601", "d0753833874a90d0")
    ]
    assert seeded_generator(0, 0, "attack").initial_seed() == 4568414350937407415


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
        refuses(r"image 1 came back in .*0 <= n_back <= n_runs", history, (3, 1, 5), wrong)
    refuses("the history is of 59 images, the labels of 60", adaptive_plan, 0, History.empty(59))


def test_a_label_with_as_many_images_as_a_run_needs_gives_them_all() -> None:
    all_of_them = Sampling(images_per_run=40, phases=SAMPLING.phases, runs_per_part=20)
    known = history(*[(20, i % 5, 4000 * (i % 5)) for i in range(60)])
    for spec in adaptive_plan(0, known, sampling=all_of_them):
        assert set(spec.image_ids) >= set(np.flatnonzero(LABELS == 1).tolist())

"""Plans: balanced, deterministic, and dependent on finished rounds only."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recon_core.adaptive import History
from recon_core.sampling import (
    CIFAR10_CLASSES,
    Phase,
    Sampling,
    binary_labels,
    class_labels,
    plan_hash,
    plan_part,
)
from recon_core.types import RunSpec

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


def test_plans_repeat_and_depend_on_the_seed_and_the_run() -> None:
    assert plan(TWO_PHASES, 1) == plan(TWO_PHASES, 1)
    assert plan_hash(plan(TWO_PHASES, 1)) == plan_hash(plan(TWO_PHASES, 1))
    assert plan(TWO_PHASES, 1) != plan(TWO_PHASES, 1, root_seed=1)
    first, second = plan(TWO_PHASES, 1)
    assert first.image_ids != second.image_ids


def test_plans_are_those_that_existing_datasets_were_made_with() -> None:
    # Another value means that no existing dataset can be continued with these settings.
    assert plan_hash(plan(TWO_PHASES, 1))[:16] == "7ecfc2c0d57ec66c"
    assert plan_hash(plan(TWO_PHASES, 6))[:16] == "f52ec5cdac45cd74"


def test_uniform_and_least_seen_plans_of_the_papers_size_are_those_of_before_adaptive() -> None:
    # Computed at 5d22032, which knew neither `adaptive` nor `History`.
    labels = np.arange(2000, dtype=np.int64) % 5 // 3
    seen = np.arange(2000, dtype=np.int64) ** 2 % 97
    hashes = []
    for sampler in ("uniform", "least_seen"):
        sampling = Sampling(phases=(Phase(sampler=sampler, n_runs=50, pool_size=600),))  # type: ignore[arg-type]
        specs = plan_part(sampling, 0, labels=labels, history=with_pairs(seen), root_seed=7)
        hashes.append(plan_hash(specs)[:16])
    assert hashes == ["dd74e80c72c8d46d", "ac913518d2614b49"]


def test_the_plan_hash_covers_images_labels_run_and_seed() -> None:
    spec = RunSpec(run=1, root_seed=2, image_ids=(3, 4), labels=(0, 1))
    changed = [
        dataclasses.replace(spec, run=9),
        dataclasses.replace(spec, root_seed=9),
        dataclasses.replace(spec, image_ids=(3, 9)),
        dataclasses.replace(spec, labels=(1, 0)),
    ]
    assert len({plan_hash([s]) for s in [spec, *changed]}) == 5
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
    for part in range(4, 10):
        assert images_of(plan(TWO_PHASES, part, seen=seen)) <= pool
    drawn = set().union(*(images_of(plan(TWO_PHASES, part, seen=seen)) for part in range(4, 10)))
    assert drawn == pool


def test_a_pool_smaller_than_a_run_grows_to_the_run() -> None:
    sampling = dataclasses.replace(TWO_PHASES, images_per_run=20)
    seen = np.arange(60, dtype=np.int64)
    expected = {*np.flatnonzero(LABELS == 0)[:10], *np.flatnonzero(LABELS == 1)[:10]}
    assert images_of(plan(sampling, 4, seen=seen)) == expected


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
    with pytest.raises(ValueError, match="part 10 is beyond the campaign's 10 parts"):
        TWO_PHASES.phase_of_part(10)


def test_a_round_that_spans_two_phases_needs_counts() -> None:
    spanning = dataclasses.replace(TWO_PHASES, parts_per_round=3)
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


def test_the_plan_hash_covers_the_victim() -> None:
    spec = RunSpec(run=5, root_seed=2, image_ids=(3, 4), labels=(0, 1))
    assert plan_hash([spec]) != plan_hash([dataclasses.replace(spec, victim=4)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attacks_per_victim": 5}, "n_runs=12 is not a multiple of attacks_per_victim=5; use 15"),
        ({"attacks_per_victim": 0}, "attacks_per_victim=0"),
        (
            {"phases": (Phase(n_runs=12, sampler="least_seen"),)},
            "attacks_per_victim=4 with sampler='least_seen'",
        ),
    ],
)
def test_refuses_sweeps(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SWEEPS, **changes)


def test_too_few_images_of_a_label() -> None:
    sampling = dataclasses.replace(TWO_PHASES, images_per_run=42)
    message = "images_per_run=42 needs 21 images of each of the 2 labels.* has 20; use at most 40"
    with pytest.raises(ValueError, match=message):
        plan(sampling, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images_per_run": 1}, "images_per_run=1 must be at least 2"),
        ({"images_per_run": 0}, "images_per_run=0 must be at least 2"),
        ({"lag": 0}, "lag=0 must be at least 1"),
        ({"parts_per_round": 0}, "parts_per_round=0"),
        ({"runs_per_part": 0}, "runs_per_part=0"),
        ({"runs_per_part": 3}, "n_runs=8 is not a multiple of runs_per_part=3; use 9"),
        ({"phases": ()}, r"phases=\(\) plans no run"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TWO_PHASES, **changes)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"n_runs": 0}, "n_runs=0"),
        ({"pool_size": 1}, "pool_size=1 must be at least 2"),
        ({"pool_size": 0}, "pool_size=0"),
    ],
)
def test_refuses_phases(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Phase(**settings_)


def test_cifar_becomes_vehicles_against_animals() -> None:
    labels, task = binary_labels(np.arange(10), CIFAR10_CLASSES)
    assert labels.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert task == "vehicles against animals"


def test_a_part_of_cifar_keeps_the_meaning_and_other_classes_are_halved() -> None:
    labels, task = binary_labels(np.array([0, 1, 1]), ("cat", "ship"))
    assert (labels.tolist(), task) == ([1, 0, 0], "vehicles against animals")
    labels, task = binary_labels(np.array([0, 1]), ("cat", "dog"))
    assert (labels.tolist(), task) == ([0, 1], "cat against dog")
    labels, task = binary_labels(np.arange(5), ("a", "b", "c", "d", "e"))
    assert (labels.tolist(), task) == ([0, 0, 1, 1, 1], "a and b against c, d and e")


def test_one_class_makes_no_binary_victim() -> None:
    with pytest.raises(ValueError, match=r"1 class \(cats\).*at least two class folders"):
        binary_labels(np.zeros(3, np.int64), ("cats",))


def test_classes_of_a_multiclass_victim_are_the_sources_first() -> None:
    labels, task = class_labels(np.array([0, 2, 1, 3]), ("a", "b", "c", "d"), 3)
    assert (labels.tolist(), task) == ([0, 2, 1, -1], "a against b against c")
    with pytest.raises(ValueError, match=r"n_classes=3, but the source has 2 \(a, b\)"):
        class_labels(np.zeros(3, np.int64), ("a", "b"), 3)


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

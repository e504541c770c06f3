"""The plan is a pure function of settings and receipts; the manifest knows every setting; the
bookkeeping of parts: what is next, what waits, what is given up, what that blocks."""

import importlib.metadata
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.plug_and_play import Iteration
from recon_core.attacks.span.attack import SpanAttack
from recon_core.experiments import KKT, AutoencoderRecovery, Inversion
from recon_core.sampling import History, Phase, Sampling
from recon_core.victims.network import Released
from recon_core.victims.separability import MixCon, UniCon
from recon_core.victims.split_training import SplitTraining
from recon_core.victims.training import Training
from storage.errors import CorruptPartError, StoreMismatchError
from storage.pairs.receipts import ImageTable
from storage.sources.load import ImageSet
from tasks.campaign.coordinator import Coordinator, KnownCounts
from tasks.campaign.plan import Campaign, Plan, PlannedPart, made_with, open_store, version_of
from tests.tasks.troubled_runs import MIXED, UNIFORM, no_op, small_images

SAMPLING = Sampling(
    images_per_run=4,
    phases=(Phase(n_runs=4), Phase(sampler="least_seen", n_runs=8, pool_size=8)),
    runs_per_part=2,
    parts_per_round=1,
    lag=2,
)


@pytest.fixture
def images() -> ImageSet:
    return small_images(seed=0)


def counts(part: int, ids: Any, *n: Any) -> Any:
    """What plans read of a receipt: images, their runs, those they came back from, their pairs."""
    ids = np.asarray(ids, np.int64)
    table = ImageTable(ids, *(np.broadcast_to(k, ids.shape).astype(np.int64) for k in n))
    return SimpleNamespace(part=part, image_table=lambda: table, plan_hash="?")


def informed(plan: Plan, part: int, *receipts: Any) -> PlannedPart:
    """The plan of a part where these parts are stored."""
    known = KnownCounts(plan.sampling, len(plan.labels))
    for receipt in receipts:
        known.keep(receipt)
    return plan.part(part, known.history(plan.sampling.round_of_part(part)))


def drawn(planned: PlannedPart) -> set[int]:
    return {image for spec in planned.specs for image in spec.image_ids}


def test_only_receipts_of_known_rounds_change_the_plan(images: ImageSet) -> None:
    plan = Plan(Campaign(sampling=SAMPLING), images)
    nothing = counts(0, [], 0, 0, 0)
    base = informed(plan, 2, nothing)
    heavy = [counts(part, range(32), 1, 1, 5) for part in (0, 1)]  # leaves the pool 32..39
    assert informed(plan, 2, nothing, heavy[1]) == base  # round 1 is within the lag
    assert drawn(informed(plan, 2, heavy[0])) <= set(range(32, 40))


def test_adaptive_plans_learn_from_all_three_counts_of_known_rounds(images: ImageSet) -> None:
    adaptive = Phase(sampler="adaptive", n_runs=8, enough=11)
    plan = Plan(Campaign(sampling=replace(SAMPLING, phases=(SAMPLING.phases[0], adaptive))), images)

    def told(*n: int) -> PlannedPart:
        return informed(plan, 2, counts(0, range(32), *n))

    assert drawn(told(10**9, 0, 0)) <= set(range(32, 40))  # hopeless
    assert drawn(told(4, 4, 4000)) <= set(range(32, 40))  # covered
    assert told(10**9, 10**9 - 10**6, 0) != told(10**9, 0, 0)
    # Receipts of one round add up, in whatever order and however they are shared out.
    wide = replace(SAMPLING, phases=(replace(adaptive, n_runs=16),), parts_per_round=2)
    one = Plan(Campaign(sampling=wide), images)
    shares = [[(5, 2, 33), (2, 1, 11)], [(2, 1, 11), (5, 2, 33)], [(7, 3, 44), (0, 0, 0)]]
    plans = [
        informed(one, 6, *(counts(part, range(32), *n) for part, n in enumerate((*share, *share))))
        for share in shares
    ]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("sampler", ["least_seen", "adaptive"])
def test_counts_that_grow_give_the_plan_of_all_receipts_of_known_rounds(sampler: Any) -> None:
    later = replace(MIXED.phases[1], sampler=sampler, n_runs=12)
    sampling = replace(MIXED, phases=(MIXED.phases[0], later), lag=2)
    plan = Plan(no_op(sampling), small_images())
    known, everything, plans = KnownCounts(sampling, 40), [], set()
    for part in range(sampling.n_parts):
        round_index = sampling.round_of_part(part)
        whole = History.empty(40)
        for receipt in everything if sampling.needs_counts(round_index) else ():
            if receipt.part in sampling.known_rounds(round_index):  # one part a round
                table = receipt.image_table()
                for name in ("n_runs", "n_back", "n_pairs"):
                    getattr(whole, name)[table.image_ids] += getattr(table, name)
        planned = plan.part(part, known.history(round_index))
        assert planned == plan.part(part, whole)
        plans.add(planned.plan_hash == plan.part(part).plan_hash)
        rng = np.random.default_rng((3, part))
        pairs = rng.integers(0, 9, 8)
        ids = np.sort(rng.choice(40, 8, replace=False))
        everything.append(counts(part, ids, 1, np.minimum(pairs, 1), pairs))
        known.keep(everything[-1])
        known.add(part + 1)
    assert plans == {True, False}  # counts have mattered


def test_settings_of_adaptive_are_in_the_manifest_where_they_are_read(images: ImageSet) -> None:
    phases = Campaign(sampling=SAMPLING).manifest(images)["campaign"]["sampling"]["phases"]
    assert [set(phase) for phase in phases] == [
        {"sampler", "n_runs", "pool_size"},
        {"sampler", "pool_size"},
    ]
    adaptive = Phase(sampler="adaptive", n_runs=8)
    prints = {
        Campaign(sampling=replace(SAMPLING, phases=(phase,))).fingerprint(images)
        for phase in (
            adaptive,
            replace(adaptive, enough=3),
            replace(adaptive, prior_back=0.5),
            replace(adaptive, prior_runs=5.0),
            replace(adaptive, sampler="uniform"),
        )
    }
    assert len(prints) == 5


def test_a_receipt_of_another_plan_is_refused(images: ImageSet) -> None:
    plan = Plan(Campaign(sampling=SAMPLING), images)
    with pytest.raises(CorruptPartError, match="part 0 was made from another plan"):
        plan.part(0).check(counts(0, [], 0, 0, 0))


@pytest.mark.parametrize(
    "change",
    [
        {"root_seed": 1},
        {"threads": 2},
        {"experiment": KKT(augment_p=0.5)},
        {"experiment": KKT(attack=SpanAttack())},
        {"experiment": KKT(released=Released(precision="int8"))},
        {"sampling": replace(SAMPLING, lag=1)},
        {"sampling": replace(SAMPLING, phases=(Phase(n_runs=2), SAMPLING.phases[1]))},
    ],
)
def test_every_setting_is_in_the_fingerprint(change, images: ImageSet) -> None:
    campaign = Campaign(sampling=SAMPLING)
    assert replace(campaign, **change).fingerprint(images) != campaign.fingerprint(images)


def test_the_last_phase_may_grow_and_nothing_else(images: ImageSet, tmp_path) -> None:
    campaign = Campaign(sampling=SAMPLING)
    longer = replace(SAMPLING.phases[1], n_runs=20)
    grown = replace(campaign, sampling=replace(SAMPLING, phases=(SAMPLING.phases[0], longer)))
    open_store(tmp_path / "s", campaign, images)
    open_store(tmp_path / "s", grown, images)
    assert Plan(grown, images).part(1) == Plan(campaign, images).part(1)
    with pytest.raises(StoreMismatchError, match="root_seed is 0 there, 3 here"):
        open_store(tmp_path / "s", replace(campaign, root_seed=3), images)


def test_too_few_images_are_refused_before_anything_is_written(images: ImageSet) -> None:
    with pytest.raises(ValueError, match="use at most 40"):
        Plan(Campaign(sampling=replace(SAMPLING, images_per_run=42)), images)


def test_autoencoders_have_any_images_and_carry_the_labels_of_the_source(
    images: ImageSet,
) -> None:
    three = replace(images, labels=np.arange(40) % 3, class_names=("a", "b", "c"))
    odd = replace(SAMPLING, images_per_run=7, phases=(Phase(n_runs=4),))
    plan = Plan(Campaign(sampling=odd, experiment=AutoencoderRecovery()), three)
    specs = plan.part(0).specs
    for spec in specs:
        assert len(set(spec.image_ids)) == 7
        assert spec.labels == tuple(three.labels[i] for i in spec.image_ids)
    assert specs[0].image_ids != specs[1].image_ids
    with pytest.raises(ValueError, match="images_per_run=41, but there are 40 images"):
        Plan(
            Campaign(sampling=replace(odd, images_per_run=41), experiment=AutoencoderRecovery()),
            three,
        )


SPLIT = Inversion(n_classes=3, training=SplitTraining(per_class=2), held_out=1)


def test_split_classifiers_have_equally_many_images_of_their_classes_and_of_no_other(
    images: ImageSet,
) -> None:
    four = replace(images, labels=np.arange(40) % 4, class_names=("a", "b", "c", "d"))
    sampling = replace(SAMPLING, images_per_run=9, phases=(Phase(n_runs=4),))
    plan = Plan(Campaign(sampling=sampling, experiment=SPLIT), four)
    assert plan.task == "a against b against c"
    for spec in plan.part(0).specs:
        assert [spec.labels.count(label) for label in range(4)] == [3, 3, 3, 0]
        assert spec.labels == tuple(four.labels[i] for i in spec.image_ids)
    with pytest.raises(ValueError, match=r"2 images of a class less held_out=1 leave 1 .* needs 9"):
        Campaign(sampling=replace(sampling, images_per_run=6), experiment=SPLIT)
    with pytest.raises(ValueError, match="images_per_run=10 is not a multiple of the 3 labels"):
        Campaign(sampling=replace(sampling, images_per_run=10), experiment=SPLIT)
    with pytest.raises(ValueError, match="n_classes=3, but the source has 2"):
        Plan(Campaign(sampling=sampling, experiment=SPLIT), images)


SEARCH = replace(KKT().attack, alpha=7.0)
ONE_PHASE = replace(SAMPLING, phases=(Phase(n_runs=4),), attacks_per_victim=2)


@pytest.mark.parametrize(
    ("base", "n_images", "same", "others"),
    [
        (AutoencoderRecovery(), 4,
         [{"masks": ("half",)}, {"attack": Iteration()}, {"sigma": 0.1},
          {"keep": "all", "confident_ssim": 0.9}],
         [{"level": 1e-4}]),
        (SPLIT, 9, [{"attack": StrongInversion()}, {"keep": "all"}],
         [{"defence": MixCon()}, {"defence": MixCon(lam=0.5)}, {"defence": UniCon()},
          {"held_out": 0}]),
        (KKT(), 4, [{"attack": SEARCH, "keep": "all"}, {"attack": SpanAttack(start="known")}],
         [{"victim": replace(KKT().victim, widths=(8,))}, {"training": Training(epochs=3)}]),
    ],
)  # fmt: skip
def test_victims_depend_on_their_training_and_not_on_the_attacks(
    images: ImageSet, base: Any, n_images: int, same: list[Any], others: list[Any]
) -> None:
    sampling = replace(ONE_PHASE, images_per_run=n_images)
    campaign = Campaign(sampling=sampling, experiment=base)

    def keys(experiments: list[Any], *more: Campaign) -> set[str | None]:
        campaigns = [replace(campaign, experiment=replace(base, **c)) for c in experiments]
        return {one.victims_fingerprint(images) for one in (*campaigns, *more)}

    larger = replace(sampling, attacks_per_victim=4, runs_per_part=1)
    assert keys(same, replace(campaign, sampling=larger)) == keys([{}])
    wider = replace(campaign, sampling=replace(sampling, images_per_run=2 * n_images))
    more = (replace(campaign, root_seed=1), replace(campaign, threads=2), wider)
    assert len(keys([{}, *others], *more)) == 4 + len(others)


def test_sweeps_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"attacks_per_victim=2 with n_attacks=3"):
        Campaign(sampling=ONE_PHASE, experiment=KKT(n_attacks=3))


def test_a_tree_that_is_not_installed_has_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = version_of("palimpsest")

    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    assert made_with(["palimpsest"])["versions"]["palimpsest"] == installed
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        version_of("torch")


def taken(parts: Coordinator, now_s: float = 0.0) -> list[int]:
    """All parts that can be started now."""
    found = []
    while (part := parts.next_part(now_s)) is not None:
        found.append(part)
    return found


def test_a_round_that_needs_counts_waits_for_the_rounds_that_it_may_know() -> None:
    parts = Coordinator(MIXED)  # one part a round, lag 1: part 3 knows 0, 1, 2 and 3 waits for them
    assert taken(parts) == [0, 1, 2]
    parts.finished(2)
    parts.finished(0)
    assert taken(parts) == []
    parts.finished(1)
    assert taken(parts) == [3]


def test_a_transient_error_waits_for_a_growing_delay_and_others_go_on() -> None:
    parts = Coordinator(UNIFORM, retry_delays_s=(5.0, 30.0))
    assert [parts.next_part(0.0) for _ in range(2)] == [0, 1]
    assert parts.erred(0, "no answer", 0.0) == 5.0
    assert parts.next_retry_s() == 5.0
    assert parts.next_part(4.9) == 2
    assert parts.next_part(5.0) == 0
    assert parts.erred(0, "no answer", 10.0) == 30.0
    assert parts.next_part(39.0) == 3
    assert parts.next_part(40.0) == 0
    assert parts.erred(0, "no answer", 40.0) is None
    assert parts.failed == {0: "no answer (tried 3 times)"}
    assert 0 not in taken(parts, 1e9)


def test_the_part_that_ran_in_three_deaths_is_quarantined_and_not_the_one_behind_it() -> None:
    parts = Coordinator(UNIFORM)
    assert [parts.next_part(0.0), parts.next_part(0.0)] == [0, 1]
    for worker in ("a", "b", "c"):
        parts.started(0, worker)
    assert not parts.given_up(1, 0.0)  # Dask counts the deaths against both
    assert parts.next_part(0.0) == 1
    assert parts.given_up(0, 0.0)
    assert parts.kills(0) == ["a", "b", "c"]
    parts.quarantine(0)
    parts.finished(1)
    assert taken(parts) == [2, 3, 4, 5]


def test_a_worker_that_came_back_with_an_error_was_not_killed() -> None:
    parts = Coordinator(UNIFORM, retry_delays_s=(0.0,) * 9)
    parts.next_part(0.0)
    for _ in range(4):
        parts.started(0, "a")
        parts.erred(0, "no answer", 0.0)
        parts.next_part(0.0)
    assert parts.kills(0) == []


def test_a_part_that_no_worker_could_begin_is_quarantined_in_the_end() -> None:
    parts = Coordinator(UNIFORM)
    parts.next_part(0.0)
    assert [parts.given_up(0, 0.0) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("lose", ["quarantine", "fail", "earlier"])
def test_a_lost_part_blocks_the_rounds_that_may_know_it_and_no_uniform_one(lose: str) -> None:
    phases = (*MIXED.phases, Phase(n_runs=4))
    sampling = replace(MIXED, phases=phases, lag=2)  # part 3 knows 0 and 1; part 4 also 2
    parts = Coordinator(sampling, quarantined=[2] if lose == "earlier" else [])
    started = taken(parts)
    assert started == ([0, 1] if lose == "earlier" else [0, 1, 2])
    if lose == "quarantine":
        parts.quarantine(2)
    if lose == "fail":
        parts.fail(2, "out of memory")
    parts.finished(0)
    parts.finished(1)
    assert taken(parts) == [3, 6, 7]
    assert parts.n_blocked == 2
    for part in (3, 6, 7):
        parts.finished(part)
    assert parts.is_over


def test_what_is_in_the_store_is_given_out_to_be_checked_and_quarantined_parts_are_not() -> None:
    parts = Coordinator(UNIFORM, done=[1, 99], quarantined=[3, 1])
    assert taken(parts) == [0, 1, 2, 4, 5]
    assert parts.done == {1}
    assert parts.quarantined == {3}

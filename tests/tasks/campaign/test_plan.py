"""The plan is a pure function of settings and receipts; the manifest knows every setting."""

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
from recon_core.sampling import Phase, Sampling
from recon_core.victims.network import Released
from recon_core.victims.separability import MixCon, UniCon
from recon_core.victims.split_training import SplitTraining
from recon_core.victims.training import Training
from storage.errors import CorruptPartError, StoreMismatchError
from storage.pairs.receipts import ImageTable
from storage.sources.load import ImageSet
from tasks.campaign.coordinator import Coordinator
from tasks.campaign.plan import Campaign, Plan, made_with, open_store, version_of
from tests.tasks.troubled_runs import small_images

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


def receipt(part: int, pairs: dict[int, int]) -> SimpleNamespace:
    ids, counts = np.array(list(pairs), np.int64), np.array(list(pairs.values()), np.int64)
    table = ImageTable(ids, np.ones_like(ids), np.minimum(counts, 1), counts)
    return SimpleNamespace(part=part, image_table=lambda: table, plan_hash="?")


def test_only_receipts_of_known_rounds_change_the_plan(images: ImageSet) -> None:
    plan = Plan(Campaign(sampling=SAMPLING), images)
    heavy = dict.fromkeys(range(0, 32), 5)  # leaves the pool 32..39
    base = plan.part(2, [receipt(0, {})])
    assert plan.part(2, [receipt(0, {}), receipt(1, heavy)]) == base  # round 1 is within the lag
    informed = plan.part(2, [receipt(0, heavy)])
    assert informed != base
    assert {i for spec in informed.specs for i in spec.image_ids} <= set(range(32, 40))


def test_adaptive_plans_learn_from_all_three_counts_of_known_rounds(images: ImageSet) -> None:
    adaptive = Phase(sampler="adaptive", n_runs=8, enough=11)
    plan = Plan(Campaign(sampling=replace(SAMPLING, phases=(SAMPLING.phases[0], adaptive))), images)

    def told(part: int, n_runs: int, n_back: int, n_pairs: int) -> SimpleNamespace:
        ids = np.arange(0, 32, dtype=np.int64)
        table = ImageTable(ids, *(np.full_like(ids, n) for n in (n_runs, n_back, n_pairs)))
        return SimpleNamespace(part=part, image_table=lambda: table)

    def drawn(*receipts: SimpleNamespace) -> set[int]:
        return {i for spec in plan.part(2, receipts).specs for i in spec.image_ids}  # type: ignore[arg-type]

    untold = drawn(told(0, 0, 0, 0))
    assert drawn(told(0, 0, 0, 0), told(1, 10**9, 0, 0)) == untold  # within the lag
    assert drawn(told(0, 10**9, 0, 0)) <= set(range(32, 40))  # hopeless
    assert drawn(told(0, 4, 4, 4000)) <= set(range(32, 40))  # covered
    thousands = told(0, 10**9, 10**9 - 10**6, 0)
    assert plan.part(2, [thousands]) != plan.part(2, [told(0, 10**9, 0, 0)])  # type: ignore[list-item]
    # Receipts of one round add up, in whatever order and however they are shared out.
    wide = replace(SAMPLING, phases=(replace(adaptive, n_runs=16),), parts_per_round=2)
    one = Plan(Campaign(sampling=wide), images)
    a, b, both = told(0, 5, 2, 33), told(1, 2, 1, 11), told(0, 7, 3, 44)
    expected = one.part(6, [both])  # type: ignore[list-item]
    assert one.part(6, [a, b]) == one.part(6, [b, a]) == expected  # type: ignore[list-item]


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


def test_a_round_is_ready_when_the_rounds_it_may_know_are_done() -> None:
    ready = {
        done: [Coordinator(SAMPLING, done=done).is_ready(k) for k in range(4)]
        for done in ((), (0,), (0, 1))
    }
    assert ready[()] == [True, True, False, False]  # 0 and 1 are uniform
    assert ready[0,] == [True, True, True, False]
    assert ready[0, 1] == [True, True, True, True]


def test_a_receipt_of_another_plan_is_refused(images: ImageSet) -> None:
    plan = Plan(Campaign(sampling=SAMPLING), images)
    with pytest.raises(CorruptPartError, match="part 0 was made from another plan"):
        plan.part(0, []).check(receipt(0, {}))  # type: ignore[arg-type]


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
    assert Plan(grown, images).part(1, []) == Plan(campaign, images).part(1, [])
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
    specs = plan.part(0, []).specs
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
    for spec in plan.part(0, []).specs:
        assert [spec.labels.count(label) for label in range(4)] == [3, 3, 3, 0]
        assert spec.labels == tuple(four.labels[i] for i in spec.image_ids)
    with pytest.raises(ValueError, match=r"2 images of a class less held_out=1 leave 1 .* needs 9"):
        Campaign(sampling=replace(sampling, images_per_run=6), experiment=SPLIT)
    with pytest.raises(ValueError, match="images_per_run=10 is not a multiple of the 3 labels"):
        Campaign(sampling=replace(sampling, images_per_run=10), experiment=SPLIT)
    with pytest.raises(ValueError, match="n_classes=3, but the source has 2"):
        Plan(Campaign(sampling=sampling, experiment=SPLIT), images)


RECOVERY = AutoencoderRecovery()


@pytest.mark.parametrize(
    ("base", "n_images", "same", "others"),
    [
        (RECOVERY, 4,
         [{"masks": ("half",)}, {"attack": Iteration()}, {"sigma": 0.1},
          {"keep": "all", "confident_ssim": 0.9}],
         [{"level": 1e-4}]),
        (SPLIT, 9, [{"attack": StrongInversion()}, {"keep": "all"}],
         [{"defence": MixCon()}, {"defence": MixCon(lam=0.5)}, {"defence": UniCon()},
          {"held_out": 0}]),
    ],
)  # fmt: skip
def test_victims_of_other_families_depend_on_their_training_alone(
    images: ImageSet, base: Any, n_images: int, same: list[Any], others: list[Any]
) -> None:
    sampling = replace(
        SAMPLING, images_per_run=n_images, phases=(Phase(n_runs=4),), attacks_per_victim=2
    )

    def keys(changes: list[Any]) -> set[str | None]:
        campaigns = [Campaign(sampling=sampling, experiment=replace(base, **c)) for c in changes]
        return {campaign.victims_fingerprint(images) for campaign in campaigns}

    assert keys(same) == keys([{}])
    assert len(keys([{}, *others])) == 1 + len(others)


def test_sweeps_that_are_none_are_refused() -> None:
    sampling = replace(SAMPLING, phases=(Phase(n_runs=4),), attacks_per_victim=2)
    with pytest.raises(ValueError, match=r"attacks_per_victim=2 with n_attacks=3"):
        Campaign(sampling=sampling, experiment=KKT(n_attacks=3))


def test_victims_depend_on_their_training_and_not_on_the_attacks(images: ImageSet) -> None:
    sampling = replace(SAMPLING, phases=(Phase(n_runs=4),), attacks_per_victim=2)
    base = Campaign(sampling=sampling)
    attack = replace(base.experiment.attack, alpha=7.0)
    same = [
        replace(base, experiment=replace(base.experiment, attack=attack, keep="all")),
        replace(base, experiment=replace(base.experiment, attack=SpanAttack(start="known"))),
        replace(base, sampling=replace(sampling, attacks_per_victim=4, runs_per_part=1)),
    ]
    wider = replace(base.experiment, victim=replace(base.experiment.victim, widths=(8,)))
    others = [
        replace(base, root_seed=1),
        replace(base, threads=2),
        replace(base, experiment=wider),
        replace(base, experiment=replace(base.experiment, training=Training(epochs=3))),
        replace(base, sampling=replace(sampling, images_per_run=6)),
    ]
    key = base.victims_fingerprint(images)
    assert [one.victims_fingerprint(images) == key for one in same] == [True] * 3
    assert len({key, *(one.victims_fingerprint(images) for one in others)}) == 6


def test_a_tree_that_is_not_installed_has_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = version_of("palimpsest")

    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    assert made_with(["palimpsest"])["versions"]["palimpsest"] == installed
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        version_of("torch")

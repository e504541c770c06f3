"""The record of an audit, on made-up products whose truth is known, and on victims of photographs.

Planted leaks are found at their size. Where members and decoys are exchangeable, so that nothing
can leak, p-values, verdicts and intervals are wrong as often as they may be and no more.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from recon_core.leakage import share_found
from tasks.audit.plan import AuditImages, AuditPlan, read_images
from tasks.audit.record import nearest_decoys, pictures_of
from tests.tasks.audit.small import (
    Scores,
    audit,
    defence,
    images_of,
    noise,
    plan_of,
    put_attack,
    put_victims,
    recipe,
    record_of,
    run,
)

RARELY = 0.001


@pytest.fixture(autouse=True)
def _few_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices are stated of the forty held-out images of these audits."""
    monkeypatch.setattr("tasks.audit.record.ENOUGH_TESTS", 40)


def fabricated(root: Path, images: AuditImages | None = None, **changes: Any) -> AuditPlan:
    """A plan with victims of 20 images of noise, whose answers tell nothing."""
    made = audit(**{"recipe": recipe(n_images=20), "attacks": ("span",)} | changes)
    plan = plan_of(made, root, images or images_of(100))
    for number in plan.jobs:
        put_victims(plan, number)
    return plan


def leaking(plan: AuditPlan, share: float, *, seed: int = 0, number: int = 0) -> Scores:
    """Scores of which each victim's members come back with so large a share, and decoys never."""
    rng = np.random.default_rng(seed)
    members = plan.jobs[number].members
    scores = rng.uniform(0.0, 0.35, members.shape)
    for own, row in zip(members, scores, strict=True):
        back = rng.permutation(np.flatnonzero(own))[: round(share * own.sum())]
        row[back] = rng.uniform(0.5, 0.9, len(back))
    return scores


@pytest.mark.parametrize("planted", [0.1, 0.5, 0.9])
def test_a_planted_leak_is_found_at_its_size(planted: float, tmp_path: Path) -> None:
    texts = ("good>0.05@fpr=0.01", f"good>{planted + 0.01:g}@fpr=0.01", "good>0.99@fpr=0.01")
    plan = fabricated(tmp_path, n_victims=6, fail_above=texts)
    scores = leaking(plan, planted)
    put_attack(plan, scores)
    record = record_of(plan)
    (cell,) = record["cells"]
    leak, found, members = cell["leak"], cell["attacks"]["span"], plan.jobs[0].members
    assert (leak["attack"], leak["mean"]) == ("span", pytest.approx(planted))
    assert leak["interval"][0] < planted < leak["interval"][1]
    assert leak["each"] == [pytest.approx(planted)] * 6
    assert record["verdict"]["level"] == "leaks"
    assert f"{planted:.0%}".replace("%", " %") in record["verdict"]["sentence"]
    counts = {"n": 120, "n_good": round(120 * planted), "n_good_decoys": 0, "seconds": 2.0}
    assert {key: found[key] for key in counts} == counts
    assert found["p_value"] <= 0.02
    assert found["mean_ssim"] == pytest.approx(scores[members].mean(), abs=1e-5)
    assert found["mean_ssim_decoys"] == pytest.approx(scores[~members].mean(), abs=1e-5)
    for rate in (0.0, 0.001, 0.01, 0.05):
        expected = share_found(scores.astype(np.float32).astype(float), members, rate=rate)
        assert found["found_at"][f"{rate:g}"]["mean"] == pytest.approx(expected.mean, abs=1e-6)
    # of the second the share is below, and its interval reaches above
    assert [c["outcome"] for c in record["checks"]] == ["fails", "undecided", "passes"]
    first = {"attack": "span", "limit": 0.05, "value": leak["mean"]}
    assert {key: record["checks"][0][key] for key in first} == first
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_the_size_of_a_pairwise_chance_by_hand(tmp_path: Path) -> None:
    plan = fabricated(tmp_path)
    scores = np.where(plan.jobs[0].members, 0.3, 0.1)
    scores[0] = 0.2  # nothing to tell them by
    scores[1] = 0.4 - scores[1]  # members below decoys
    put_attack(plan, scores)
    found = record_of(plan)["cells"][0]["attacks"]["span"]
    assert found["auc"] == pytest.approx((0.5 + 0 + 1 + 1) / 4)
    assert found["mean_ssim"] == pytest.approx((0.2 + 0.1 + 0.3 + 0.3) / 4)


def alarms(root: Path, n_seeds: int, **changes: Any) -> list[dict[str, Any]]:
    """Records of audits of which nothing can leak: members and decoys have the same scores."""
    records = []
    with pytest.MonkeyPatch.context() as patch:  # of copies, whose search takes half of the time
        patch.setattr("tasks.audit.record._copies", lambda _images, _row: 0)
        for seed in range(n_seeds):
            plan = fabricated(root / f"{seed}", seed=seed, **changes)
            scores = np.random.default_rng((7, seed)).uniform(0, 0.6, plan.jobs[0].members.shape)
            put_attack(plan, scores)
            records.append(record_of(plan))
    return records


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_victims", "n_images", "n_pool"), [(4, 20, 100), (4, 50, 200), (12, 8, 200)]
)
def test_networks_that_leak_nothing_raise_few_alarms(
    tmp_path: Path, n_victims: int, n_images: int, n_pool: int
) -> None:
    """100 audits: p-values are uniform, and the share at 1 % false positives is 1 %."""
    made = {"n_victims": n_victims, "recipe": recipe(n_images=n_images)}
    limit = ("good>0.2@fpr=0.01",)
    records = alarms(tmp_path, 100, images=images_of(n_pool), fail_above=limit, **made)
    found = [record["cells"][0]["attacks"]["span"] for record in records]
    p_values = [one["p_value"] for one in found]
    most = stats.binom.isf(RARELY, 100, 0.05)
    assert sum(p <= 0.05 for p in p_values) <= most
    assert stats.kstest(p_values, "uniform").pvalue > RARELY
    assert sum(record["verdict"]["level"] != "nothing found" for record in records) <= most
    for key in ("good_at", "found_at") if n_images == 20 else ("good_at",):
        shares = [one[key]["0.01"] for one in found]
        assert sum(s["interval"][0] <= 0.01 <= s["interval"][1] for s in shares) >= 90, key
        assert np.mean([s["mean"] for s in shares]) < 0.03, key
    good = [one["n_good"] for one in found]  # a third of the scores are good, of decoys, too
    assert np.mean(good) == pytest.approx(np.mean([one["n_good_decoys"] for one in found]), rel=0.1)
    assert min(good) > 10
    assert not [r for r in records if r["checks"][0]["outcome"] == "fails"]


def test_membership_of_answers_that_tell_nothing_and_of_those_that_tell_all(
    tmp_path: Path,
) -> None:
    plan = fabricated(tmp_path, n_victims=8, attacks=("span", "loss", "likelihood_ratio"),
                      fail_above=("found>0.5@fpr=0.05",))  # fmt: skip
    put_attack(plan, np.zeros(plan.jobs[0].members.shape))
    nothing = record_of(plan)
    attacks = nothing["cells"][0]["attacks"]
    assert all(abs(attacks[name]["auc"] - 0.5) < 0.15 for name in ("loss", "likelihood_ratio"))
    assert nothing["checks"][0]["outcome"] != "fails"
    members = plan.jobs[0].members
    hard = np.random.default_rng(0).normal(0, 5, members.shape[1])  # some images are easier
    sure = hard + 3.0 * members + np.random.default_rng(1).normal(0, 0.5, members.shape)
    put_victims(plan, confidence=sure.astype(np.float32))
    told = record_of(plan)
    attacks = told["cells"][0]["attacks"]
    assert attacks["likelihood_ratio"]["found_at"]["0.01"]["mean"] > 0.9
    assert attacks["loss"]["auc"] < 0.8 < attacks["likelihood_ratio"]["auc"]
    assert all(attacks[name]["good_at"] is None for name in ("loss", "likelihood_ratio"))
    assert told["checks"][0] | {"interval": 0, "value": 0} == {
        "condition": "found>0.5@fpr=0.05", "cell": "as it is", "attack": "likelihood_ratio",
        "limit": 0.5, "outcome": "fails", "value": 0, "interval": 0,
    }  # fmt: skip
    assert told["cells"][0]["leak"]["mean"] == 0  # pictures are what counts
    put_attack(plan, leaking(plan, 0.2))
    more = AuditPlan(replace(plan.study, attacks=("span", "span_known")), plan.images,
                     Path(plan.root), device="cpu")  # fmt: skip
    put_attack(more, leaking(plan, 0.6), name="span_known")
    leak = record_of(more)["cells"][0]["leak"]
    assert (leak["attack"], leak["mean"]) == ("span_known", 0.6)  # of the best attack


def test_cells_say_why_they_have_no_numbers(tmp_path: Path) -> None:
    changed = {
        "dies": {"views": 2}, "attack dies": {"dropout": 0.5},
        "convolution": {"victim.conv": {"kernel": 3, "channels": 4}},
        "diverges": {"training.optimiser.lr": 1e9}, "not reached": {"views": 3},
    }  # fmt: skip
    own = (defence(name, set=changes) for name, changes in changed.items())
    defences = (defence("too many", scale={"n_images": 20}), *own)
    made = audit(recipe=recipe(n_images=20), attacks=("span", "loss"), defences=defences)
    plan = plan_of(made, tmp_path, images_of(100))
    for number in (0, 3, 4):
        put_victims(plan, number)
    put_victims(plan, 5, diverged=np.array([True, False, True, False]))
    put_attack(plan, leaking(plan, 0.5))
    put_attack(plan, leaking(plan, 0.0, number=5), number=5)
    failed = {"train dies": "out of memory", "attack attack dies, span, victim 2": "no luck"}
    record = record_of(plan, failed)
    base, too_many, dies, attack_dies, convolution, diverges, rest = record["cells"]
    assert base["failed"] is None
    assert "lower recipe.n_images" in too_many["failed"]
    assert (dies["failed"], rest["failed"]) == ("out of memory", "not trained")
    for cell in (too_many, dies, rest):
        assert (cell["attacks"], cell["leak"], cell["accuracy"]) == ({}, None, None)
    assert attack_dies["attacks"]["span"] == {"status": "refused", "why": "failed: no luck"}
    assert attack_dies["leak"] is None
    assert attack_dies["attacks"]["loss"]["status"] == "ran"
    assert attack_dies["accuracy"]["test"] is not None
    assert "convolution" in convolution["attacks"]["span"]["why"]
    assert diverges["failed"] == "2 of the victims diverged in training"
    assert diverges["leak"]["mean"] == 0  # since it is nothing, and so it is not on the front
    assert [cell["on_front"] for cell in record["cells"]] == [True] + [False] * 6
    assert record["verdict"]["defence"] is None


def test_without_its_base_an_audit_has_the_other_cells(tmp_path: Path) -> None:
    plan = fabricated(tmp_path, defences=(defence("views", set={"views": 2}),))
    put_attack(plan, leaking(plan, 0.5, number=1), number=1)
    (plan.folder.place / f"{plan.jobs[0].key[:32]}.json").unlink()
    record = record_of(plan, {"train as it is": "out of memory"})
    base, views = record["cells"]
    assert (base["failed"], base["leak"]) == ("out of memory", None)
    assert views["leak"]["mean"] == 0.5
    assert views["accuracy"]["change"] is None
    assert record["exposed"] == record["decoys_shown"] == []
    assert record["verdict"]["level"] == "nothing found"
    assert "out of memory" in record["verdict"]["sentence"]
    assert pictures_of(plan, record) == {}


def test_a_base_that_diverged_is_reported(tmp_path: Path) -> None:
    plan = fabricated(tmp_path)
    nothing = np.full(plan.jobs[0].members.shape, np.nan, np.float32)
    put_victims(plan, margin=nothing, confidence=nothing, diverged=np.ones(4, bool))
    put_attack(plan, np.zeros(nothing.shape))
    record = record_of(plan)
    assert record["cells"][0]["failed"] == "4 of the victims diverged in training"
    assert record["verdict"]["sentence"].endswith("But 4 of the victims diverged in training.")
    assert {entry["margin"] for entry in record["exposed"]} == {None}
    json.dumps(record, allow_nan=False)


def test_a_defence_is_priced_victim_by_victim(tmp_path: Path) -> None:
    names = ("cheap", "dear", "useless")
    own = (defence(name, set={"dropout": (k + 1) / 10}) for k, name in enumerate(names))
    plan = fabricated(tmp_path, defences=tuple(own))
    n_tests = len(plan.jobs[0].tests)
    right = {0: (30, 32, 34, 36), 1: (28, 30, 32, 34), 2: (10, 12, 14, 16), 3: (29, 31, 33, 35)}
    for number, counts in right.items():
        correct = np.arange(n_tests) < np.array(counts)[:, None]
        put_victims(plan, number, correct=correct, train_accuracy=np.full(4, 0.9, np.float32))
    for number, share in enumerate((0.8, 0.4, 0.0, 0.8)):
        put_attack(plan, leaking(plan, share, number=number), number)
    record = record_of(plan)
    base, cheap, dear, useless = (cell["accuracy"] for cell in record["cells"])
    assert base["change"] is None
    assert base["test"] == pytest.approx(33 / n_tests)
    assert base["train"] == pytest.approx(0.9)
    assert base["each"] == pytest.approx([n / n_tests for n in right[0]])
    assert base["test_interval"][0] < base["test"] < base["test_interval"][1]
    changes = [cell["change"] * n_tests for cell in (cheap, dear, useless)]
    assert changes == pytest.approx([-2, -20, -1])
    assert cheap["change_interval"] == pytest.approx([-2 / n_tests] * 2)
    assert [cell["on_front"] for cell in record["cells"]] == [True, True, True, False]
    assert record["verdict"]["defence"] == "dear"  # the only one that leaves little


def test_an_interval_of_accuracy_stays_within_what_a_share_can_be(tmp_path: Path) -> None:
    plan = plan_of(audit(attacks=("loss",)), tmp_path, images_of(80))
    right = np.arange(4)[:, None] % 2 == np.zeros(len(plan.jobs[0].tests))
    put_victims(plan, correct=right)
    (cell,) = record_of(plan)["cells"]
    assert cell["accuracy"]["test"] == 0.5
    assert cell["accuracy"]["test_interval"] == [0.0, 1.0]


def test_the_most_exposed_image_is_the_planted_one_and_its_copy_is_named(tmp_path: Path) -> None:
    images = images_of(100)
    rows = fabricated(tmp_path, images, n_victims=6).jobs[0].pool.rows
    first, copy = rows[[5, 9]]
    pixels = images.pool.images.copy()
    pixels[copy] = np.clip(pixels[first].astype(int) + 1, 0, 255)
    images = replace(images, pool=replace(images.pool, images=pixels))
    plan = fabricated(tmp_path / "copied", images, n_victims=6)
    members = plan.jobs[0].members
    scores = np.random.default_rng(3).uniform(0, 0.35, members.shape)
    scores[members[:, 5], 5] = 0.9
    scores[~members[:, 5], 5] = 0.2
    shown = np.flatnonzero(~members[4])[0]
    scores[4, shown] = 0.39
    margin = np.full(members.shape, 5.0, np.float32)
    margin[:, 5] = 0.1
    put_victims(plan, margin=margin)
    put_attack(plan, scores)
    record = record_of(plan)
    label = int(images.pool.labels[first])
    worst, *others = record["exposed"]
    assert worst == {
        "row": 5, "image_id": int(first), "n_in": 3, "n_back": 3, "mean_ssim": 0.9, "n_copies": 1,
        "margin": pytest.approx(0.1), "label": label, "class": images.pool.class_names[label],
        "why": "1 near copies of it are in the pool; it lies near the boundary; its class leaks "
               "most",
    }  # fmt: skip
    assert {entry["n_back"] for entry in others} == {0}
    assert len(record["exposed"]) == 24
    copies = {entry["image_id"] for entry in record["exposed"] if entry["n_copies"]}
    assert copies <= {int(first), int(copy)}
    leaks, not_ = record["classes_exposed"]
    assert (leaks["class"], not_["share"]) == (worst["class"], 0.0)
    assert (leaks["n"], leaks["share"]) == (60, pytest.approx(3 / 60))
    nearest = {"victim": 4, "image_id": int(rows[shown]), "ssim": pytest.approx(0.39)}
    assert record["decoys_shown"][0] == nearest
    pictures = pictures_of(plan, record)
    assert (pictures["exposed/original"][0] == pixels[first]).all()
    assert pictures["exposed/reconstruction"].shape == pictures["exposed/original"].shape
    assert len(pictures["decoys/original"]) == len(record["decoys_shown"]) == 8
    scores[np.flatnonzero(~members[:, 5])[0], 5] = 0.9  # a decoy there: 1 % of 120 allow one
    put_attack(plan, scores)
    again = record_of(plan)["exposed"][0]
    assert [again[key] for key in ("row", "n_in", "n_back")] == [5, 3, 3]


def test_classes_of_one_image_and_of_none_have_shares(tmp_path: Path) -> None:
    classes = tuple(f"class {k}" for k in range(60))
    images = AuditImages(noise(120, seed=1, classes=classes), noise(60, seed=2, classes=classes))
    plan = fabricated(tmp_path, images)
    put_attack(plan, leaking(plan, 0.5))
    record = record_of(plan)
    pool = plan.jobs[0].pool
    labels = images.pool.labels[pool.rows]
    assert len(record["classes_exposed"]) == len(set(labels.tolist())) < 60
    assert 1 in np.bincount(labels)
    assert sum(entry["n"] for entry in record["classes_exposed"]) == plan.jobs[0].members.sum()
    shares = [entry["share"] for entry in record["classes_exposed"]]
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[-1]) == (1.0, 0.0)


def test_the_nearest_decoys_are_named_once() -> None:
    members = np.array([[True, False, False, False], [False, True, False, False]])
    scores = np.array([[0.99, 0.3, 0.5, 0.1], [0.2, 0.98, 0.6, 0.1]])
    assert nearest_decoys(scores, members) == [(1, 2), (0, 1), (1, 0), (0, 3)]


class OneNetwork(AuditPlan):
    """A plan of one network that is given, of which all images but the decoys were learned."""

    subject = "weights"


def one_network(root: Path, *, seed: int = 0) -> AuditPlan:
    made = audit(recipe=recipe(n_images=20), attacks=("span",), seed=seed)
    plan = OneNetwork(made, images_of(100), root, device="cpu")
    plan.jobs[0] = replace(plan.jobs[0], members=plan.jobs[0].members[:1])
    object.__setattr__(plan.study, "n_victims", 1)  # which is for weights that are given
    put_victims(plan)
    return plan


def test_one_network_that_leaks_nothing_raises_few_alarms_and_rare_leaks_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.audit.record._copies", lambda _images, _row: 0)
    records = []
    for seed in range(40):
        plan = one_network(tmp_path / f"{seed}", seed=seed)
        scores = np.random.default_rng((7, seed)).uniform(0, 0.6, plan.jobs[0].members.shape)
        put_attack(plan, scores)
        records.append(record_of(plan))
    n_alarms = sum(record["verdict"]["level"] != "nothing found" for record in records)
    assert n_alarms <= stats.binom.isf(RARELY, 40, 0.05)
    assert np.mean([r["cells"][0]["leak"]["mean"] > 0 for r in records]) > 0.3  # by chance
    plan = one_network(tmp_path / "rare")
    scores = leaking(plan, 0.3, seed=1)
    low = plan.jobs[0].members & (scores < 0.4)
    scores[low] = 0.1  # and its other images less than decoys, so that the mean rank is no higher
    put_attack(plan, scores)
    rare = record_of(plan)
    assert rare["cells"][0]["attacks"]["span"]["auc"] < 0.55
    assert rare["verdict"]["level"] == "leaks"


def test_one_network_has_intervals_over_its_images(tmp_path: Path) -> None:
    plan = one_network(tmp_path)
    job = plan.jobs[0]
    scores = leaking(plan, 0.4)
    put_attack(plan, scores)
    record = record_of(plan)
    (cell,) = record["cells"]
    assert (record["subject"], record["n_victims"], record["n_images"]) == ("weights", 1, 20)
    assert cell["leak"]["mean"] == pytest.approx(0.4)
    exact = stats.binomtest(8, 20).proportion_ci(0.95, "exact")
    assert cell["leak"]["interval"] == pytest.approx([exact.low, exact.high], abs=1e-5)
    assert "over" not in record["verdict"]["sentence"]
    assert "(19 to 64 %" in record["verdict"]["sentence"]
    low, high = cell["accuracy"]["test_interval"]
    assert low < cell["accuracy"]["test"] < high
    learned = set(job.pool.rows[job.members[0]].tolist())
    assert {entry["image_id"] for entry in record["exposed"]} == learned  # and no decoy
    assert {entry["n_in"] for entry in record["exposed"]} == {1}
    shown = {entry["image_id"] for entry in record["decoys_shown"]}
    assert not shown & learned
    assert record["does_not_cover"][1].startswith("Networks of other sizes")


def attacked_with(
    victims_of: AuditPlan, root: Path, images: AuditImages, *, seed: int = 0
) -> dict[str, Any]:
    """The record of an attack on the networks of a plan that asks about these images."""
    plan = plan_of(audit(seed=seed, attacks=("span",)), root, images)
    found = victims_of.folder.product(victims_of.jobs[0].key)
    assert found is not None
    plan.folder.put(plan.jobs[0].key, found[0], {"seconds": 0.5})
    for job in plan.attacks(plan.study.cells[0], "span"):
        job.run()
    return record_of(plan)


@pytest.mark.slow
def test_photographs_that_victims_learned_come_back_and_others_do_not(tmp_path: Path) -> None:
    """The same networks and pictures, with the images that they learned taken for decoys and the
    other way round, and then with others in the place of both."""
    images = read_images(audit())
    plan = plan_of(audit(), tmp_path, images)
    run(plan)
    record = record_of(plan)
    base = record["cells"][0]
    assert record["verdict"]["level"] == "leaks"
    assert base["leak"]["mean"] > 0.5
    assert base["attacks"]["span"]["mean_ssim"] > base["attacks"]["span"]["mean_ssim_decoys"] + 0.2
    assert base["attacks"]["loss"]["auc"] > 0.7
    assert len(pictures_of(plan, record)["exposed/reconstruction"]) == 16
    swapped = plan_of(audit(), tmp_path / "swapped", images)
    swapped.jobs[0] = replace(swapped.jobs[0], members=~plan.jobs[0].members)
    found = plan.folder.product(plan.jobs[0].key)
    assert found is not None
    swapped.folder.put(swapped.jobs[0].key, found[0], {"seconds": 0.5})
    put_attack(swapped, plan.scores(plan.study.cells[0], "span")[0]["ssim"])
    unlearned = record_of(swapped)["cells"][0]
    assert unlearned["leak"]["mean"] == 0
    assert unlearned["attacks"]["span"]["p_value"] > 0.9
    others = AuditImages(images.others, images.pool)
    elsewhere = attacked_with(plan, tmp_path / "others", others)
    assert elsewhere["verdict"]["level"] == "nothing found"
    assert elsewhere["cells"][0]["leak"]["mean"] <= 0.1


@pytest.mark.slow
def test_photographs_that_nobody_learned_raise_few_alarms(tmp_path: Path) -> None:
    """Twelve audits of networks that learned other images than those that are asked about."""
    images, records = read_images(audit()), []
    for seed in range(12):
        plan = plan_of(audit(seed=seed, attacks=("span",)), tmp_path / f"{seed}", images)
        plan.jobs[0].run()
        others = AuditImages(images.others, images.pool)
        records.append(attacked_with(plan, tmp_path / f"{seed} others", others, seed=seed))
    n_alarms = sum(record["verdict"]["level"] != "nothing found" for record in records)
    assert n_alarms <= stats.binom.isf(RARELY, len(records), 0.05)
    good = [r["cells"][0]["attacks"]["span"]["good_at"]["0.01"]["mean"] for r in records]
    assert np.mean(good) < 0.05

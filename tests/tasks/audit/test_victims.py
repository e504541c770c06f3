"""Units of an audit: victims are the same bits whoever makes them, and are released as asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from recon_core.attacks.span.search import SpanAttack
from recon_core.victims.losses import Loss
from recon_core.victims.training import Training
from tasks.audit.attacks import AttackJob, best_matches
from tasks.audit.plan import AuditPlan
from tasks.audit.recipe import Private
from tasks.audit.settings import Audit, Defence
from tasks.audit.victims import Given, unit_pictures
from tests.tasks.audit.small import (
    audit,
    defence,
    images_of,
    plan_of,
    product,
    put_victims,
    recipe,
    run,
)

Arrays = dict[str, npt.NDArray[Any]]
PRIVATE = {"private": {"epsilon": 50.0}, "training.epochs": 5, "victim.init_std_first": None}
DEFENCES = (
    defence("noise", set={"released.noise": 0.1}),
    defence("int8", set={"released.precision": "int8"}),
    defence("student", set={"distilled": True}),
    defence("views", set={"views": 3}),
    defence("private", set=PRIVATE),
    defence("dropout", set={"dropout": 0.5, "victim.init_std_first": None}),
    defence("more", scale={"n_images": 2}),
    defence("diverges", set={"training.optimiser.lr": 1e30}),
)
NAMES = ("as it is", *(d.name for d in DEFENCES))


def noise_plan(root: Path, defences: tuple[Defence, ...] = DEFENCES, **changes: Any) -> AuditPlan:
    return plan_of(audit(defences=defences, **changes), root, images_of(80, 120))


def weights_of(arrays: Arrays, name: str = "weights") -> list[npt.NDArray[Any]]:
    return [arrays[f"{name}/{k}"] for k in range(sum(key.startswith(name) for key in arrays))]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> AuditPlan:
    return noise_plan(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="module")
def made(plan: AuditPlan) -> dict[str, Arrays]:
    """The victims of every cell."""
    return {cell.name: product(plan.jobs[cell.number]) for cell in plan.study.cells}


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)


def test_products_are_the_same_bits_in_another_folder_and_order(
    made: dict[str, Arrays], tmp_path: Path
) -> None:
    again = noise_plan(tmp_path)
    for cell in reversed(again.study.cells):
        assert same(product(again.jobs[cell.number]), made[cell.name]), cell.name
    fewer = noise_plan(tmp_path / "fewer", DEFENCES[4:5])  # alone, and by another number
    assert same(product(fewer.jobs[1]), made["private"])


def test_attacks_are_the_same_bits_again(plan: AuditPlan, tmp_path: Path, made: Any) -> None:
    one = plan.attacks(plan.study.cells[0], "span")[1]
    there = replace(one, root=str(tmp_path))
    replace(plan.jobs[0], root=str(tmp_path)).run()
    assert there.key == one.key
    assert same(product(there), product(one))
    assert product(one)["pictures"].shape == one.of.pool.images.shape


def test_a_product_has_what_a_record_is_made_of(plan: AuditPlan, made: dict[str, Arrays]) -> None:
    assert tuple(made) == NAMES
    for cell in plan.study.cells:
        job, arrays = plan.jobs[cell.number], made[cell.name]
        n = len(job.pool)
        assert n == (32 if cell.name == "more" else 16)
        assert [w.shape for w in weights_of(arrays)] == [(4, 32, 256), (4, 32, 32), (4, 1, 32)]
        assert [w.shape for w in weights_of(arrays, "start")] == [(4, 32, 256)]
        assert arrays["confidence"].shape == arrays["margin"].shape == (4, n)
        assert arrays["correct"].shape == (4, len(job.tests))
        assert arrays["diverged"].tolist() == [cell.name == "diverges"] * 4
    base, job = made["as it is"], plan.jobs[0]
    assert base["train_accuracy"].tolist() == [1.0] * 4
    assert base["margin"][job.members].min() > 0  # and noise that nobody learned is not known
    assert 0.2 < (base["margin"][~job.members] > 0).mean() < 0.8
    pool = unit_pictures(job.pool).numpy()
    for own, mean in zip(job.members, base["mean"], strict=True):
        np.testing.assert_allclose(mean, pool[own].mean(0), atol=1e-6)


def test_no_mean_of_private_images_is_given_away(plan: AuditPlan, made: dict[str, Arrays]) -> None:
    job = plan.jobs[plan.numbers["private"]]
    public = unit_pictures(job.tests).numpy().mean(0)
    np.testing.assert_allclose(made["private"]["mean"], np.stack([public] * 4), atol=1e-6)


def test_cells_start_alike_and_releases_are_of_the_same_networks(made: dict[str, Arrays]) -> None:
    base = made["as it is"]
    for name in ("noise", "int8", "views", "more", "diverges"):
        assert made[name]["start/0"].tobytes() == base["start/0"].tobytes(), name
    for exact, noisy in zip(weights_of(base), weights_of(made["noise"]), strict=True):
        size = np.sqrt((exact**2).mean((1, 2), keepdims=True))
        relative = ((noisy - exact) / size).std((1, 2))
        assert (relative > 0.05).all()
        if exact[0].size > 1000:
            np.testing.assert_allclose(relative, 0.1, rtol=0.1)
    for exact, rounded in zip(weights_of(base), weights_of(made["int8"]), strict=True):
        step = np.abs(exact).max(-1, keepdims=True) / 127
        np.testing.assert_allclose(rounded / step, np.round(rounded / step), atol=1e-3)
        assert 0 < np.abs(rounded - exact).max() <= step.max() / 2 * 1.001
    for name in ("noise", "int8"):  # what is asked is the network that is given away
        assert (made[name]["confidence"] != base["confidence"]).any()


def test_a_student_is_another_network_that_answers_as_its_teacher(
    plan: AuditPlan, made: dict[str, Arrays]
) -> None:
    teacher, student = made["as it is"], made["student"]
    job = plan.jobs[plan.numbers["student"]]
    assert job.public is not None
    for own, others in zip(weights_of(student), weights_of(teacher), strict=True):
        assert np.abs(own - others).max() > 1e-3
    assert (student["start/0"] != teacher["start/0"]).all()
    public = unit_pictures(job.public).numpy()
    np.testing.assert_allclose(student["mean"][0], public.mean(0), atol=1e-6)

    def answers(arrays: Arrays) -> npt.NDArray[np.bool_]:
        parameters = job.architecture.initial([torch.Generator()], dtype=torch.float32).like(
            [torch.from_numpy(w.copy()) for w in weights_of(arrays)]
        )
        x = torch.from_numpy(public[None] - arrays["mean"][:, None]).flatten(2)
        return np.asarray(job.architecture.forward(parameters, x).output[..., 0] > 0)

    assert (answers(student) == answers(teacher)).mean() > 0.99
    first = [
        np.linalg.norm(a["weights/0"] - a["start/0"], axis=2).max() for a in (student, teacher)
    ]
    assert min(first) > 0.01  # the start that is kept is that of the network that is given away


def test_views_are_the_image_and_others_near_it(plan: AuditPlan, made: dict[str, Arrays]) -> None:
    job = plan.jobs[plan.numbers["views"]]
    x, y = job._learned()
    pool = unit_pictures(job.pool)
    for own, pictures, labels in zip(job.members, x, y, strict=True):
        images = pool[torch.from_numpy(own)]
        assert pictures.shape == (24, 1, 16, 16)
        assert torch.equal(pictures[:8], images)
        assert torch.equal(labels, torch.from_numpy(job.pool.labels[own]).repeat(3))
        for number, view in enumerate(pictures[8:]):
            assert _is_moved(view, images[number % 8], most=4), number
    assert len({tuple(view.flatten().tolist()) for view in x[0]}) > 20
    assert (made["views"]["weights/0"] != made["as it is"]["weights/0"]).any()
    assert made["views"]["train_accuracy"].tolist() == [1.0] * 4


def _is_moved(view: torch.Tensor, image: torch.Tensor, *, most: int) -> bool:
    """True for the image or its mirror, moved by at most so many pixels, with repeated borders."""
    at = torch.arange(16)
    return any(
        torch.equal(view, seen[:, (at + dy).clamp(0, 15)][:, :, (at + dx).clamp(0, 15)])
        for seen in (image, image.flip(2))
        for dy in range(-most, most + 1)
        for dx in range(-most, most + 1)
    )


def test_mirrored_pictures_count_for_victims_that_learned_them() -> None:
    pool = torch.rand(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    row, scores = best_matches(pool[[3, 1]].flip(3), pool, mirrored=True)
    assert (row[3], row[1]) == (2, 3)
    assert [float(scores[2, 3]), float(scores[3, 1])] == pytest.approx([1.0, 1.0], abs=1e-5)
    row, scores = best_matches(pool[:0], pool, mirrored=True)
    assert (row.tolist(), scores.shape) == ([-1] * 5, (0, 5))


@pytest.mark.parametrize("name", ["private", "dropout"])
def test_the_noise_of_a_training_changes_with_the_seed_alone(
    name: str, made: dict[str, Arrays], tmp_path: Path
) -> None:
    (own,) = (d for d in DEFENCES if d.name == name)
    arrays = made[name]
    assert not np.allclose(arrays["weights/0"][0], arrays["weights/0"][1])
    again = noise_plan(tmp_path / "again", (own,))
    assert same(product(again.jobs[1]), arrays)
    other = noise_plan(tmp_path / "other", (own,), seed=1)
    assert other.jobs[1].key != again.jobs[1].key
    assert (product(other.jobs[1])["weights/0"] != arrays["weights/0"]).any()
    moved = replace(again.jobs[1], seed=1)  # the same images, and another start and noise
    assert (product(moved)["weights/0"] != arrays["weights/0"]).any()


def test_more_noise_is_a_key_of_its_own_and_hides_more(plan: AuditPlan, tmp_path: Path) -> None:
    job = plan.jobs[plan.numbers["private"]]
    assert job.noise_multiplier > 0
    louder = replace(job, root=str(tmp_path), noise_multiplier=20 * job.noise_multiplier)
    assert louder.key != job.key
    assert replace(job, noise_multiplier=job.noise_multiplier + 1e-12).key == job.key
    small, large = (product(one) for one in (job, louder))
    moved = [np.abs(a["weights/0"] - a["start/0"]).mean() for a in (small, large)]
    assert moved[1] > 10 * moved[0]
    assert large["train_accuracy"].mean() < small["train_accuracy"].mean()


def test_keys_tell_what_is_made_from_what_is_not() -> None:
    def key(**changes: Any) -> str:
        made: Audit = audit(recipe=recipe(**changes.pop("recipe", {})), **changes)
        return plan_of(made, Path("nowhere"), images_of(80)).jobs[0].key

    plain = key()
    assert key(attacks=("loss",), rate=0.05, good_threshold=0.5) == plain
    others = [
        key(seed=1), key(n_victims=6), key(n_tests=30), key(recipe={"views": 2}),
        key(recipe={"dropout": 0.1}), key(recipe={"private": Private(epsilon=8)}),
        key(recipe={"n_images": 6}), key(recipe={"distilled": True}),
    ]  # fmt: skip
    assert len({plain, *others}) == len(others) + 1


def test_a_victim_that_diverged_gives_nothing_back(plan: AuditPlan, made: Any) -> None:
    number = plan.numbers["diverges"]
    assert not np.isfinite(made["diverges"]["weights/0"]).all()
    job = plan.attacks(plan.study.cells[number], "span")[0]
    assert job.run()["n_pictures"] == 0
    arrays = product(replace(job, keeps_pictures=True))
    assert arrays["ssim"].tolist() == [0.0] * 16
    assert arrays["pictures"].shape == (16, 0)


def test_a_victim_of_classes_and_one_of_squares_are_trained_and_attacked(tmp_path: Path) -> None:
    for loss, n_classes, outputs in (("ce", 2, 2), ("mse", 2, 1)):
        training: Training = replace(recipe().training, epochs=50, loss=Loss(kind=loss))
        own = recipe(training=training, n_classes=n_classes)
        job = noise_plan(tmp_path / loss, (), recipe=own).jobs[0]
        arrays = product(job)
        assert arrays["weights/2"].shape == (4, outputs, 32)
        sure = arrays["confidence"]
        assert np.isfinite(sure).all()
        assert sure[job.members].mean() > sure[~job.members].mean()


def test_without_its_victims_an_attack_says_so(tmp_path: Path) -> None:
    job = noise_plan(tmp_path, ()).attacks(audit().cells[0], "span")[0]
    with pytest.raises(ValueError, match="the victims are not there; run the audit again"):
        job.run()
    student = replace(noise_plan(tmp_path).jobs[3], public=None)
    with pytest.raises(ValueError, match="needs public images"):
        student.run()


def test_images_in_the_first_layer_are_found(tmp_path: Path) -> None:
    """Planted: the rows of victim 2's first layer are its training images, and nobody else's."""
    made = plan_of(audit(), tmp_path)
    job = made.jobs[0]
    pool = unit_pictures(job.pool).numpy()
    rng = np.random.default_rng(0)
    first = rng.normal(0, 1e-4, (4, 32, 3072)).astype(np.float32)
    means = np.stack([pool[own].mean(0) for own in job.members])
    images = (pool[job.members[2]] - means[2]).reshape(8, -1)
    signs = rng.choice([-1.0, 1.0], (4, 1))
    first[2] += (np.concatenate([images * s for s in signs]) / 50).astype(np.float32)
    rest = {f"weights/{k}": rng.normal(size=(4, n, 32)).astype(np.float32)
            for k, n in ((1, 32), (2, 1))}  # fmt: skip
    start = {"start/0": np.zeros_like(first)}
    put_victims(made, mean=means, **{"weights/0": first}, **rest, **start)
    attacks = made.attacks(made.study.cells[0], "span")
    arrays = product(attacks[2])
    members = job.members[2]
    assert arrays["ssim"][members].mean() > 0.7  # on the pool's mean, and not on theirs
    assert arrays["identified"][members].all()
    assert arrays["ssim"][members].min() > 0.5 > arrays["ssim"][~members].max()
    rows = np.flatnonzero(members)
    off = np.abs(arrays["pictures"][rows].astype(int) - job.pool.images[rows]).mean()
    assert off < 35
    others = product(attacks[0])["ssim"]
    assert others.max() < 0.5


def test_a_given_network_is_attacked_as_it_is(plan: AuditPlan, made: Any, tmp_path: Path) -> None:
    base, job = made["as it is"], plan.jobs[0]
    own = {n: a[1:2] for n, a in base.items() if n.startswith(("weights/", "start/", "mean"))}
    one = Given(arrays=own, std=np.ones((1, 1, 1), np.float32))
    given = replace(job, root=str(tmp_path), members=job.members[1:2], given=one)
    arrays = product(given)
    assert all(arrays[name].tobytes() == array.tobytes() for name, array in own.items())
    np.testing.assert_allclose(arrays["margin"][0], base["margin"][1], rtol=1e-4)
    assert arrays["train_accuracy"].tolist() == [1.0]
    scaled = own | {"weights/0": 2 * own["weights/0"]}
    halved = replace(given, given=replace(one, arrays=scaled, std=2 * one.std))
    assert halved.key != given.key
    np.testing.assert_allclose(product(halved)["margin"], arrays["margin"], rtol=1e-4)
    (attack,) = AttackJob.on(given, SpanAttack(start="known"), keeps_pictures=True)
    found = product(attack)["ssim"]
    assert found[given.members[0]].mean() > found[~given.members[0]].mean() + 0.2


def test_a_whole_audit_is_units_that_follow_from_each_other(tmp_path: Path) -> None:
    kept = (defence("private", set=PRIVATE), defence("too many", scale={"n_images": 90}))
    made = noise_plan(tmp_path, kept)
    assert list(made.refused) == [2]
    ended = run(made)
    assert len(ended.done) == made.n_units == 2 + 2 * 4
    assert set(ended.done) == {
        *(f"train {name}" for name in ("as it is", "private")),
        *(f"attack {n}, span, victim {v}" for n in ("as it is", "private") for v in range(4)),
    }


@pytest.mark.parametrize(("views", "found"), [(1, False), (2, True)])
def test_a_mirrored_picture_counts_where_mirrored_images_were_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: int, found: bool
) -> None:
    job = plan_of(audit(recipe=recipe(views=views)), tmp_path, images_of(80, 120)).jobs[0]
    mean = torch.from_numpy(product(job)["mean"][0])
    mirrored = (unit_pictures(job.pool).flip(3) - mean).flatten(1)
    monkeypatch.setattr(AttackJob, "_candidates", lambda *_given: mirrored)
    first = AttackJob.on(job, SpanAttack(), keeps_pictures=True)[0]
    arrays = product(first)
    assert bool((arrays["ssim"] > 0.9).all()) == found
    if found:  # and the pictures are those that are alike
        alike = np.abs(arrays["pictures"].astype(float) - job.pool.images) / 255
        assert alike.mean() < 0.1

"""Plan of an audit: who learns what, what nobody sees, sources that have too few."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from recon_core.victims.losses import Loss
from recon_core.victims.training import Training
from tasks.audit.plan import AuditImages, pool_of, read_images, resolved, unseen
from tasks.audit.recipe import VictimRecipe
from tests.tasks.audit.small import audit, defence, images_of, noise, plan_of, recipe

FOUR = ("a", "b", "c", "d")
CE = Training(epochs=10, loss=Loss(kind="ce"))


def test_pools_of_cells_lie_in_each_other_and_are_balanced() -> None:
    images = images_of(200, classes=FOUR)
    small, large = (pool_of(recipe(n_images=n), images, seed=3) for n in (8, 32))
    assert (len(small), len(large)) == (16, 64)
    assert small.rows.tolist() == large.rows[:16].tolist()
    for pool in (small, large):
        assert np.bincount(pool.labels).tolist() == [len(pool) // 2] * 2
        assert len(set(pool.rows.tolist())) == len(pool)
        assert (pool.images == images.pool.images[pool.rows]).all()
        assert (pool.labels == images.pool.labels[pool.rows] // 2).all()  # a, b against c, d
    again, other = (pool_of(recipe(n_images=8), images, seed=seed) for seed in (3, 4))
    assert again.rows.tolist() == small.rows.tolist()
    assert other.rows.tolist() != small.rows.tolist()


def test_a_victim_of_classes_has_images_of_each_of_them_alone() -> None:
    images = images_of(200, classes=FOUR)
    three = recipe(n_images=9, n_classes=3, training=CE)
    pool = pool_of(three, images, seed=0)
    assert np.bincount(pool.labels).tolist() == [6, 6, 6]
    assert (pool.labels == images.pool.labels[pool.rows]).all()
    assert set(unseen(three, images, 60, seed=0)[0].labels.tolist()) == {0, 1, 2}


def test_victims_come_in_pairs_with_the_halves_of_a_pool(tmp_path: Path) -> None:
    def members(n: int, seed: int) -> npt.NDArray[np.bool_]:
        return plan_of(audit(n_victims=n, seed=seed), tmp_path, images_of(60)).jobs[0].members

    six = members(6, 5)
    assert six.shape == (6, 16)
    assert (six[::2] == ~six[1::2]).all()
    assert six.sum(0).tolist() == [3] * 16
    assert (members(4, 5) == six[:4]).all()  # more victims change none
    assert (members(6, 6) != six).any()


@pytest.mark.parametrize("n_tests", [20, 50, 1000])
def test_tests_and_public_images_are_seen_by_no_victim_and_not_twice(n_tests: int) -> None:
    images, made = images_of(60, n_others=50), recipe(n_images=8)
    tests, public = unseen(made, images, n_tests, seed=1)
    assert (len(tests), len(public)) == (min(50, n_tests), max(0, 50 - n_tests))
    assert not set(tests.rows.tolist()) & set(public.rows.tolist())
    learned = {image.tobytes() for image in pool_of(made, images, seed=1).images}
    for some in (tests, public):
        assert (some.images == images.others.images[some.rows]).all()
        assert (some.labels == images.others.labels[some.rows]).all()
        assert not learned & {image.tobytes() for image in some.images}


def test_few_others_are_shared_by_tests_and_students(tmp_path: Path) -> None:
    images = images_of(60, n_others=24)
    student = defence("student", set={"distilled": True})
    plan = plan_of(audit(defences=(student,)), tmp_path, images)
    job = plan.jobs[1]
    assert job.public is not None
    assert (len(job.tests), len(job.public)) == (16, 8)
    alone = plan_of(audit(), tmp_path, images)
    assert alone.jobs[0].key == plan.jobs[0].key  # whatever else is asked for
    assert plan.refused == {}
    few = replace(images, others=noise(2, seed=9))
    refused = plan_of(audit(defences=(student,)), tmp_path, few).refused
    assert "a student needs public images beside the 2 that" in refused[1]


def test_an_audit_takes_as_many_images_as_there_are() -> None:
    made = audit(recipe=recipe(n_images=None))
    asked = audit(recipe=recipe(n_images=6))
    of_classes = audit(recipe=recipe(n_images=None, n_classes=3, training=CE))
    few, many = images_of(50), images_of(2 * made.most_images + 40)
    uneven = noise(60, seed=1)
    uneven = replace(uneven, labels=(np.arange(60) < 10).astype(np.int64))
    for own, images, n in (
        (made, few, 24),  # of 25 of a label, 12 for each of two
        (made, many, made.most_images),
        (asked, many, 6),
        (of_classes, images_of(400, classes=FOUR), 99),
        (made, AuditImages(uneven, few.others), 10),
    ):
        assert resolved(own, images).recipe.n_images == n


def test_too_few_images_are_refused_with_the_fix(tmp_path: Path) -> None:
    made = audit(data="folder:own", recipe=recipe(n_images=None))
    with pytest.raises(ValueError, match="folder:own has 3 images of label 0 for two victims") as e:
        resolved(made, images_of(6))
    assert "at least 4 are needed: give more images" in str(e.value)
    with pytest.raises(ValueError, match="need a pool of 8 of each label, but the source has 6 of"):
        pool_of(recipe(n_images=8), images_of(12), seed=0)
    absent = replace(noise(40, seed=1), labels=np.zeros(40, np.int64))
    with pytest.raises(ValueError, match="has 0 images of label 1"):
        resolved(made, AuditImages(absent, absent))
    more = defence("more", scale={"n_images": 4})
    plan = plan_of(audit(defences=(more,)), tmp_path, images_of(40))
    assert list(plan.refused) == [1]
    assert "lower recipe.n_images" in plan.refused[1]
    with pytest.raises(ValueError, match=r"lower recipe\.n_images"):  # the base is not left out
        plan_of(audit(recipe=recipe(n_images=32)), tmp_path, images_of(40))


def test_victims_learn_the_held_out_split_where_that_is_enough() -> None:
    small = read_images(audit(data="digits", recipe=recipe(n_images=8)))
    assert (small.pool.split, small.others.split) == ("heldout", "train")
    large = read_images(audit(data="digits", recipe=recipe(n_images=60)))
    assert (large.pool.split, large.others.split) == ("train", "heldout")
    unasked = read_images(audit(data="digits", recipe=VictimRecipe()))
    assert unasked.pool.split == "train"
    assert small.pool is large.others  # read once while somebody holds them
    grey = read_images(audit(data="digits", channels=1))
    assert grey.pool.images.shape[1:] == (1, 32, 32)


def test_held_out_pictures_that_are_training_pictures_test_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for folder in ("Train/a", "Train/b", "Test/a", "Test/b", "valid/a"):
        (tmp_path / folder).mkdir(parents=True)
        for k in range(4):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{k}.png")
    shutil.copy(tmp_path / "Train/a/0.png", tmp_path / "Test/a/copy.png")
    images = read_images(audit(data=f"folder:{tmp_path}", recipe=recipe(n_images=2)))
    assert {images.pool.split, images.others.split} == {"train", "heldout"}
    heldout = images.pool if images.pool.split == "heldout" else images.others
    assert len(heldout) == 8
    assert heldout.facts["taken"] == "Test/ (9 pictures)"
    assert heldout.facts["left aside"] == "valid/ (4 pictures)"
    assert heldout.facts["not used"] == "1: they are in the training split, too"

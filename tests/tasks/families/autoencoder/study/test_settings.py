"""Settings and images of a study of recovery."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tasks.families.autoencoder.study.settings import Noise, masks_of
from tasks.study.products import balanced_order
from tests.tasks.families.autoencoder.recoveries import (
    SIDE,
    planned,
    small_study,
    small_victim,
    sources,
)


def test_the_order_is_balanced_and_seeded() -> None:
    labels = np.array([0] * 10 + [1] * 3 + [2] * 7)
    order = balanced_order(labels, root_seed=1)
    assert sorted(order) == list(range(20))
    for n in range(1, 10):
        counts = np.bincount(labels[order[:n]], minlength=3)
        assert counts.max() - counts.min() <= 1
    assert sorted(labels[order[9:13]]) == [0, 0, 2, 2]
    assert (order == balanced_order(labels, root_seed=1)).all()
    assert (order != balanced_order(labels, root_seed=2)).any()


def test_images_are_nested_and_nobody_shares_with_the_control_or_the_inpainter() -> None:
    study = small_study()
    found = sources(study)
    a, b = study.victims
    assert (found.victim_ids(b)[:4] == found.victim_ids(a)).all()
    tests = found.control_of(a).images[found.control_ids(a)]
    assert len(tests) == 4
    used = {image.tobytes() for image in found.images_of(b).images[found.victim_ids(b)]}
    assert used.isdisjoint(image.tobytes() for image in tests)
    rest = found.for_inpainter(study.source_of(a))
    assert used.isdisjoint(image.tobytes() for image in rest)
    assert len(rest) == 24 - 6


def test_copies_of_a_victims_image_are_no_control_and_not_the_inpainters() -> None:
    study = small_study()
    found = sources(study)
    a = study.victims[0]
    trained, tests = found.images_of(a), found.control_of(a)
    row = found.victim_ids(a)[0]
    tests.images[found.control_ids(a)[0]] = trained.images[row]
    other = next(k for k in range(24) if k not in found.victim_ids(study.victims[1]))
    trained.images[other] = trained.images[row]
    fresh = type(found)(study, found.sets)
    copies = {trained.images[row].tobytes()}
    control = tests.images[fresh.control_ids(a)]
    assert copies.isdisjoint(image.tobytes() for image in control)
    rest = fresh.for_inpainter(study.source_of(a))
    assert copies.isdisjoint(image.tobytes() for image in rest)


def test_masks_are_those_of_the_core_or_pictures(tmp_path: Path) -> None:
    pixels = np.zeros((SIDE, SIDE), np.uint8)
    pixels[:, 3:] = 255
    path = tmp_path / "own.png"
    Image.fromarray(pixels).save(path)
    study = small_study(masks=("random", str(path)))
    masks = masks_of(study, SIDE)
    assert list(masks) == ["random", "own"]
    assert (masks["own"].numpy() == (pixels > 0)).all()
    assert (masks_of(study, SIDE)["random"] == masks["random"]).all()
    for wrong, message in (("nowhere", "is no file and none of random"), (str(path), "16x16")):
        with pytest.raises(ValueError, match=message):
            masks_of(small_study(masks=(wrong,), noise=None), 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"victims": ()}, "victims=.. is no study"),
        ({"victims": (small_victim(), small_victim())}, "two victims are named 'fc-a'"),
        ({"masks": ()}, "must name at least one"),
        ({"levels": (1e-3,)}, "kept by no victim's training"),
        ({"n_shown": 17}, r"n_shown=17 is outside \[0, 16\]"),
        ({"root_seed": -1}, "root_seed=-1 must be at least 0"),
        ({"noise": Noise(mask="text")}, "noise.mask='text' is none of masks"),
        ({"noise": Noise(victims=("fc-z",))}, "none of the victims"),
    ],
)
def test_settings_that_make_no_study(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_study(**changes)


def test_settings_of_a_victim_that_make_none() -> None:
    with pytest.raises(ValueError, match="names files"):
        small_victim("FC/a")
    with pytest.raises(ValueError, match="n_images=0"):
        small_victim(n_images=0)
    with pytest.raises(ValueError, match="sigma=0"):
        Noise(sigma=0)


def test_too_few_images_are_named(tmp_path: Path) -> None:
    study = small_study(victims=(small_victim(n_images=25),))
    with pytest.raises(ValueError, match="victim 'fc-a' has n_images=25, but 'random'"):
        planned(study, tmp_path).first_units()


def test_a_key_is_of_what_a_product_depends_on(tmp_path: Path) -> None:
    study = small_study()
    plan = planned(study, tmp_path)
    victim = study.victims[0]
    base = plan.training(victim).key
    other = replace(victim, title="x", gamma=3.0, start="nothing")
    renamed = planned(replace(study, victims=(other, study.victims[1]), n_shown=1), tmp_path)
    assert renamed.training(other).key == base
    longer = replace(victim, training=replace(victim.training, epochs=61))
    reseeded = planned(replace(study, root_seed=7), tmp_path)
    assert reseeded.training(victim).key != base
    assert planned(study, tmp_path).training(longer).key != base
    given = {"levels": [{"level": 0.1, "sha256": "a"}, {"level": 0.03, "sha256": "b"}]}
    keys = {level: job.key for level, job in plan.recoveries(victim, given).items()}
    assert len(set(keys.values())) == 2
    for changed in (replace(victim, gamma=0.1), replace(victim, start="nothing")):
        found = planned(study, tmp_path).recoveries(changed, given)
        assert all(job.key != keys[level] for level, job in found.items())
    seen = planned(replace(study, control=False), tmp_path).recoveries(victim, given)
    assert seen[0.1].key == keys[0.1]
    assert seen[0.03].key != keys[0.03]

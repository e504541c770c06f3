"""Studies: cells share what they may, differ in what they must, and a killed study is the same."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recon_core.attacks.kkt.objective import settings_of
from recon_core.victims.losses import Loss
from storage.errors import StoreMismatchError
from storage.pairs.dataset import Dataset
from tasks.campaign.plan import open_store
from tasks.families.weights.study.settings import Axis, Cell, Study, StudyPlan
from tests.tasks.families.weights.study.studies import attacked, experiment, pictures, small_study


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return StudyPlan(small_study(), pictures())


@pytest.fixture(scope="module")
def whole(plan: StudyPlan, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The store of the plan, made without a break."""
    return attacked(tmp_path_factory.mktemp("whole"), plan)


def specs_of(plan: StudyPlan, cell: int, seed: int) -> list[Any]:
    victim = cell * plan.study.n_victims + seed
    first = victim * plan.study.n_attacks
    return [plan.spec(run) for run in range(first, first + plan.study.n_attacks)]


def test_every_run_has_its_own_number_and_its_cells_experiment(plan: StudyPlan) -> None:
    planned = [plan.part(part) for part in range(plan.sampling.n_parts)]
    specs = [spec for part in planned for spec in part.specs]
    assert [spec.run for spec in specs] == list(range(5 * 2 * 2))
    assert [spec.victim for spec in specs] == [run // 2 for run in range(20)]
    for part in planned:
        (spec,) = part.specs
        cell = plan.study.cells[spec.run // 4]
        assert part.experiment == cell.experiment
        assert len(spec.image_ids) == cell.images_per_run
        counts = np.bincount(spec.labels)
        assert set(counts) == {cell.images_per_run // cell.experiment.n_classes}
    assert len({part.plan_hash for part in planned}) == len(planned)


def test_cells_share_images_and_random_numbers(plan: StudyPlan) -> None:
    """Of the same number of classes: the smaller training set is part of the larger one."""
    for seed in range(2):
        small, large = specs_of(plan, 0, seed)[0], specs_of(plan, 1, seed)[0]
        by_label = [
            {spec.labels[k]: [] for k in range(len(spec.labels))} for spec in (small, large)
        ]
        for found, spec in zip(by_label, (small, large), strict=True):
            for image, label in zip(spec.image_ids, spec.labels, strict=True):
                found[label].append(image)
        for label, images in by_label[0].items():
            assert by_label[1][label][: len(images)] == images
        for one, other in zip(specs_of(plan, 0, seed), specs_of(plan, 1, seed), strict=True):
            for purpose in ("attack", "anything"):
                numbers = [torch.rand(3, generator=s.generator(purpose)) for s in (one, other)]
                assert torch.equal(*numbers)
            starts = [torch.rand(3, generator=s.victim_generator("victim")) for s in (one, other)]
            assert torch.equal(*starts)


def test_victims_and_attacks_of_a_cell_are_all_different(plan: StudyPlan) -> None:
    first, second = specs_of(plan, 0, 0), specs_of(plan, 0, 1)
    assert set(first[0].image_ids) != set(second[0].image_ids)
    numbers = {
        float(torch.rand((), generator=spec.generator("attack"))) for spec in (*first, *second)
    }
    assert len(numbers) == 4
    starts = {
        float(torch.rand((), generator=spec.victim_generator("victim")))
        for spec in (first[0], second[0])
    }
    assert len(starts) == 2


def test_the_same_attack_has_the_same_settings_in_every_cell(
    whole: Dataset, plan: StudyPlan
) -> None:
    lr, alpha = whole.column("runs/lr"), whole.column("runs/alpha")
    for values in (lr, alpha):
        table = values.reshape(5, 4)
        assert (table == table[0]).all()
        assert len(np.unique(table[0])) == 4
    drawn = settings_of(plan.study.cells[0].experiment.attack,
                        [plan.spec(k).generator("attack") for k in range(4)])  # fmt: skip
    np.testing.assert_allclose(lr[:4], drawn.lr.numpy(), rtol=1e-6)


@pytest.mark.slow
def test_a_killed_study_gives_the_same_numbers(
    tmp_path: Path, plan: StudyPlan, whole: Dataset
) -> None:
    """Parts in another order, in two goes, with the kept victims gone and one of them damaged."""
    order = list(range(plan.sampling.n_parts))
    random.Random(1).shuffle(order)
    root = tmp_path / "killed"
    attacked(root, plan, parts=order[:9])
    kept = sorted((root / "victims").glob("*"))
    assert kept
    for path in kept[::2]:
        path.unlink()
    kept[1].write_bytes(b"damaged")
    resumed = attacked(root, plan, parts=order[9:])
    assert resumed.content_hash == whole.content_hash
    assert [r.plan_hash for r in resumed.receipts] == [r.plan_hash for r in whole.receipts]


def test_a_store_is_continued_by_its_own_study_alone(tmp_path: Path, plan: StudyPlan) -> None:
    open_store(tmp_path, plan.study, plan.images)
    renamed = replace(
        plan.study,
        cells=tuple(replace(cell, name=f"{cell.name}!") for cell in plan.study.cells),
        n_tests=7,
    )
    assert isinstance(open_store(tmp_path, renamed, plan.images), Dataset)  # names are no settings
    cells = list(plan.study.cells)
    cells[2] = replace(cells[2], experiment=replace(cells[2].experiment, confident_gap=0.1))
    for other in (replace(plan.study, cells=tuple(cells)), replace(plan.study, seed=1),
                  replace(plan.study, n_attacks=4), replace(plan.study, n_victims=3)):  # fmt: skip
        with pytest.raises(StoreMismatchError):
            open_store(tmp_path, other, plan.images)


def test_kept_victims_depend_on_training_and_not_on_the_attack(plan: StudyPlan) -> None:
    key = plan.study.victims_fingerprint(plan.images)

    def with_first(**changed: Any) -> Study:
        first, *rest = plan.study.cells
        first = replace(first, experiment=replace(first.experiment, **changed))
        return replace(plan.study, cells=(first, *rest))

    attack = replace(plan.study.cells[0].experiment.attack, save_at=(10, 20))
    training = replace(plan.study.cells[0].experiment.training, epochs=301)
    assert with_first(attack=attack).victims_fingerprint(plan.images) == key
    assert replace(plan.study, n_attacks=1, runs_per_part=1).victims_fingerprint(plan.images) == key
    assert with_first(training=training).victims_fingerprint(plan.images) != key
    assert replace(plan.study, seed=5).victims_fingerprint(plan.images) != key
    other = pictures(seed=1)
    assert plan.study.victims_fingerprint(other) != key


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cells": ()}, "at least one cell"),
        ({"n_victims": 0}, "n_victims=0 must be at least 1"),
        ({"n_attacks": 3, "runs_per_part": 2}, "runs_per_part=2 does not divide n_attacks=3"),
        ({"n_tests": -1}, "n_tests=-1 must be at least 0"),
    ],
)
def test_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_study(**changed)


def test_refuses_two_cells_of_a_name() -> None:
    first, second, *rest = small_study().cells
    with pytest.raises(ValueError, match="two cells are named 'two classes, 4'"):
        small_study(cells=(first, replace(second, name=first.name), *rest))


def test_refuses_unbalanced_cells_and_words_on_a_scale() -> None:
    with pytest.raises(ValueError, match="images_per_run=5"):
        Cell(name="x", panel="grid", at={}, images_per_run=5, experiment=experiment(4))
    with pytest.raises(ValueError, match="words need 'category'"):
        Axis(title="loss", values=("bce", "mse"), scale="log")


def test_too_few_images_are_said_of_the_cell() -> None:
    with pytest.raises(ValueError, match=r"cell 'two classes, 8': .*needs 4 images of each"):
        StudyPlan(small_study(), pictures(n=7))


def test_a_source_with_too_few_classes_is_said_of_the_cell() -> None:
    study = small_study()
    cells = tuple(
        replace(cell, experiment=replace(cell.experiment, n_classes=5,
                training=replace(cell.experiment.training, loss=Loss(kind="ce")),
                attack=replace(cell.experiment.attack, condition="multiclass")),
                images_per_run=5)
        for cell in study.cells[:1]
    )  # fmt: skip
    with pytest.raises(ValueError, match="cell 'two classes, 4': n_classes=5"):
        StudyPlan(replace(study, cells=cells), pictures())

"""The victims of a study that are trained first: each once, and the same as in a part."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from recon_core.attacks.kkt.run import KKT
from recon_core.victims.network import Released
from storage.pairs.dataset import Dataset
from tasks.campaign.plan import open_store
from tasks.families.weights.study.record import jobs_of, train_victim
from tasks.families.weights.study.settings import Study, StudyPlan
from tests.tasks.families.weights.study.studies import attacked, pictures, small_study


def twins(n_attacks: int) -> Study:
    """Four cells: two that share their victims, one of another training, one of more images."""
    first, second, *_others = small_study().cells
    made = first.experiment
    rounded = replace(made, released=Released(precision="int8"), keep="confident")
    longer = replace(made, training=replace(made.training, epochs=40))
    cells = [first, replace(first, name="rounded", experiment=rounded)]
    cells += [replace(first, name="longer", experiment=longer), second]
    return small_study(cells=tuple(cells), n_attacks=n_attacks, train_first=True)


@pytest.fixture
def plan() -> StudyPlan:
    """Of two parts a victim, an attack each."""
    return StudyPlan(twins(2), pictures())


def train_all(plan: StudyPlan, dataset: Dataset) -> list[Any]:
    jobs = jobs_of(plan, dataset, "cpu")
    for job in jobs:
        train_victim(job)
    return jobs


def test_cells_that_differ_after_the_training_share_their_victims(
    tmp_path: Path, plan: StudyPlan
) -> None:
    jobs = jobs_of(plan, open_store(tmp_path, plan.study, plan.images), "cpu")
    # of two victims a cell; those of more images first
    assert [job.numbers for job in jobs] == [(6,), (7,), (0, 2), (1, 3), (4,), (5,)]
    for job in jobs:
        for number in job.numbers:
            spec = plan.spec(number * plan.study.n_attacks)
            assert spec.image_ids == job.spec.image_ids
            assert spec.victim_stream == job.spec.victim_stream
            assert plan.cell(number).experiment.training == job.experiment.training


def test_no_part_trains_what_was_trained_and_all_are_as_if_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = StudyPlan(twins(1), pictures())
    some = (0, 2, 6)
    usual = attacked(tmp_path / "usual", plan, parts=some)
    root = tmp_path / "first"
    jobs = train_all(plan, open_store(root, plan.study, plan.images))
    assert len(jobs) == 6

    def never(*given: Any, **named: Any) -> Any:
        raise AssertionError("a victim was trained again")

    monkeypatch.setattr("recon_core.attacks.kkt.run.train", never)
    found = attacked(root, plan, parts=some)
    assert found.content_hash == usual.content_hash
    train_all(plan, found)


def test_what_is_in_the_store_needs_no_victim(tmp_path: Path, plan: StudyPlan) -> None:
    dataset = attacked(tmp_path, plan, parts=(0, 1, 2, 4, 5, 12, 13))
    numbers = [job.numbers for job in jobs_of(plan, dataset, "cpu")]
    assert numbers == [(7,), (1, 3), (4,), (5,)]


def test_how_weights_are_given_away_is_no_matter_of_the_training(plan: StudyPlan) -> None:
    key = plan.study.victims_fingerprint(plan.images)
    cells = tuple(
        replace(cell, experiment=replace(cell.experiment, released=Released(noise=0.5)))
        for cell in plan.study.cells
    )
    other = replace(plan.study, cells=cells)
    assert other.victims_fingerprint(plan.images) == key
    assert other.fingerprint(plan.images) != plan.study.fingerprint(plan.images)
    assert "released" in asdict(KKT())

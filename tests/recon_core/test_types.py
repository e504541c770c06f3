"""What a run is told: one label per image, and random streams that depend on nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from recon_core.types import RunSpec, seeded_generator


def draw(spec: RunSpec, purpose: str) -> list[float]:
    return torch.rand(4, generator=spec.generator(purpose)).tolist()


SPEC = RunSpec(run=3, root_seed=7, image_ids=(5, 2), labels=(0, 1))


def test_a_label_is_missing() -> None:
    with pytest.raises(ValueError, match="run 3 has 2 image_ids but 1 labels"):
        RunSpec(run=3, root_seed=7, image_ids=(5, 2), labels=(0,))


def test_specs_are_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.run = 4  # type: ignore[misc]
    assert {SPEC, dataclasses.replace(SPEC)} == {SPEC}


def test_a_generator_repeats_and_ignores_the_images() -> None:
    other_images = dataclasses.replace(SPEC, image_ids=(9, 8))
    assert draw(SPEC, "attack") == draw(SPEC, "attack") == draw(other_images, "attack")


@pytest.mark.parametrize(
    "other",
    [dataclasses.replace(SPEC, run=4), dataclasses.replace(SPEC, root_seed=8)],
    ids=["run", "root_seed"],
)
def test_runs_and_seeds_have_their_own_streams(other: RunSpec) -> None:
    assert draw(SPEC, "attack") != draw(other, "attack")


def test_purposes_have_their_own_streams() -> None:
    assert draw(SPEC, "attack") != draw(SPEC, "victim")


def test_run_and_root_seed_are_not_interchangeable() -> None:
    first = torch.rand(4, generator=seeded_generator(1, 2, "attack"))
    second = torch.rand(4, generator=seeded_generator(2, 1, "attack"))
    assert not torch.equal(first, second)


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first = draw(SPEC, "attack")
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(1)
    assert draw(SPEC, "attack") == first


def test_the_streams_are_those_that_existing_datasets_were_made_with() -> None:
    # Another value means that no existing dataset can be continued: a change of the store's schema.
    assert seeded_generator(0, 0, "attack").initial_seed() == 4568414350937407415

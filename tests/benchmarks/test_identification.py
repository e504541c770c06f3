"""Identified images beside decoys: planted pictures give the counts that they must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.restore import identification
from benchmarks.restore.identification import Scores

N = 6
"""Images of a victim, and decoys."""


def scores(*kinds: str) -> Scores:
    """A method's pictures on one victim for each kind: of every row its own image, the same one for
    all, or for decoys the trained images in their place, alone or with a third of the decoy."""
    generator = torch.Generator().manual_seed(0)
    victims = []
    for kind in kinds:
        wanted = torch.rand(2 * N, 1, 16, 16, generator=generator)
        pictures = {
            "own": wanted,
            "same": wanted.mean(0, keepdim=True).expand_as(wanted),
            "trained": torch.cat([wanted[:N], wanted[:N]]),
            "leaning": torch.cat([wanted[:N], (2 * wanted[:N] + wanted[N:]) / 3]),
        }[kind]
        victims.append(identification.compared(pictures, wanted))
    return Scores(*(np.stack(column) for column in zip(*victims, strict=True)))


def values(found: dict[str, Scores], method: str) -> dict[str, float]:
    lines = list(identification.lines("job", found, threshold=0.4))
    return {line.unit: line.value for line in lines if line.case == f"job, {method}"}


def test_pictures_of_trained_images_identify_these_and_no_decoy() -> None:
    found = values({"plain": scores("trained", "trained")}, "plain")
    assert found["identified of 12"] == found["good of 12"] == 12
    assert found["identified decoys of 12"] == found["good decoys of 12"] == 0
    assert found["found of 12 by lead at 0% false positives"] == 12
    assert found["good of 12, pictures of the next image"] == 0


def test_a_decoy_competes_with_trained_images_and_apart_with_decoys_alone() -> None:
    found = values({"plain": scores("leaning")}, "plain")
    assert found["identified decoys of 6"] == 0
    assert found["identified decoys of 6, among decoys alone"] == 6


def test_a_method_that_finds_decoys_as_well_is_no_better_at_equal_false_positives() -> None:
    both = {"plain": scores("same", "own", "trained"), "bold": scores("own", "own", "trained")}
    found = values(both, "bold")
    assert found["identified decoys of 18"] == 12
    assert found["identified, over the attack alone"] == pytest.approx(1.5)
    assert found["found by lead at 1% false positives, over the attack alone"] <= 1


def test_one_decoy_ahead_of_all_images_counts_before_any_and_not_at_one_percent() -> None:
    n = (2, 60)
    clear = Scores(*(np.full(n, value) for value in (0.9, 0.3, 0.5, 0.0, 0.0, 0.1)))
    lead = np.zeros(n)
    lead[1, 7] = 0.8
    found = values({"plain": clear, "lucky": replace(clear, decoy_lead=lead)}, "lucky")
    assert found["found of 120 by lead at 0% false positives"] == 0
    assert found[identification.BEFORE_ANY] == 0
    assert found["found of 120 by lead at 1% false positives"] == 120
    assert found[identification.FOUND] == 1

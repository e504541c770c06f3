"""Confident pairs that show nothing are found though all their files are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recon_core.attacks.candidate_matching import pairs_of
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from storage.pairs.verify import verify_store
from tasks.dataset.confidence import confidence_problems
from tests.storage.stores import MANIFEST, provenance
from tests.tasks.evaluation.evaluations import ITERATIONS, image_set, planted_columns


def store(root: Path, **change: Any) -> Dataset:
    """One part of two runs of four planted images, scored as attacks score them, then changed."""
    images = image_set()
    columns = {name: value.copy() for name, value in planted_columns(images, 0).items()}
    x = torch.from_numpy(columns["pairs/reconstruction"]).unflatten(0, (2, 8, len(ITERATIONS)))
    for run in range(2):
        rows = columns["pairs/run_row"] == run
        found = pairs_of(
            x[run].transpose(0, 1),
            torch.from_numpy(columns["targets/image"][4 * run : 4 * run + 4]),
            torch.from_numpy(columns["runs/mean_image"][run]),
            iterations=ITERATIONS, keep="all", threshold=0.4, gap=0.05,
        )  # fmt: skip
        columns["pairs/target_row"][rows] = 4 * run + found.target_row.numpy()
        for name in ("ssim_best", "ssim_second", "confident"):
            columns[f"pairs/{name}"][rows] = getattr(found, name).numpy()
    for name, value in change.items():
        columns[f"pairs/{name}"] = value(columns[f"pairs/{name}"])
    create_or_open(root, MANIFEST)
    write_part(root, 0, columns, provenance=provenance(source_hash=images.content_hash))
    return Dataset(root)


def test_a_store_that_was_scored_as_it_says_has_no_problem(tmp_path: Path) -> None:
    made = store(tmp_path)
    assert made.read(0, ["pairs/confident"])["pairs/confident"].any()
    assert list(confidence_problems(made)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reconstruction": np.zeros_like}, "no nearer to their image than the mean image alone"),
        ({"ssim_best": lambda score: score * 0.5}, "have another SSIM"),
    ],
)
def test_pairs_that_show_the_mean_or_have_another_score_are_found(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    made = store(tmp_path, **change)
    assert verify_store(made.root).ok  # every file is what was written
    assert any(said in problem for problem in confidence_problems(made))

"""Equal quality is found on the curve of the random sweep; stores are read as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.kkt.sweep import Sweep, effort_to_reach, measure, read_sweep
from tests.tasks.evaluation.evaluations import image_set, planted_store, planted_sweep


def sweep(quality: list[float], n_iterations: list[float]) -> Sweep:
    """Attacks that all see the same four images equally well."""
    return Sweep(np.repeat(np.array(quality)[:, None], 4, axis=1), np.array(n_iterations), 0)


def test_the_effort_is_where_the_mean_curve_reaches_the_quality() -> None:
    # One of ten attacks is as good: at a random place, so after 5.5 attacks in the mean, and the
    # mean of the curves is half as high as it after half of them.
    random = sweep([0.8] + [0.0] * 9, [100.0] * 10)
    half = effort_to_reach(random, 0.4)
    assert half == pytest.approx(500, abs=120)
    assert effort_to_reach(random, 0.8) == pytest.approx(1000, abs=5)
    assert effort_to_reach(random, 0.81) is None


def test_images_count_each_for_itself() -> None:
    best = np.array([[0.9, 0.0], [0.0, 0.9]])
    both = Sweep(best, np.array([10.0, 10.0]), 0)
    assert both.quality == pytest.approx(0.9)
    assert effort_to_reach(both, 0.45) == pytest.approx(10, abs=0.2)
    assert effort_to_reach(both, 0.9) == pytest.approx(20, abs=0.2)


def test_a_sweep_that_is_never_as_good_is_said_to_be_so() -> None:
    halved, random = sweep([0.9], [300.0]), sweep([0.5, 0.6], [1000.0, 1000.0])
    (found,) = measure(halved, random)
    assert (found.value, found.reference_value, found.ratio) == (300, 2000, 6.667)
    assert "only reach 0.600, so it is more than" in str(found.reference)
    (found,) = measure(random, halved)
    assert found.value == 2000
    assert found.ratio is not None
    assert found.ratio < 0.2


def test_a_store_is_read_run_by_run(tmp_path: Path) -> None:
    images = image_set()
    dataset = planted_sweep(tmp_path / "s", images)
    found = read_sweep(dataset)
    assert found.best.shape[0] == 3
    assert (found.best.max(axis=1) > 0.999).sum() == 1, "the plant is in one attack"
    with pytest.raises(ValueError, match="one attack per victim"):
        read_sweep(planted_store(tmp_path / "alone", images))

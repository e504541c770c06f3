"""Gains, operating points and disagreement on scores whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.results.run_summary import (
    disagreement,
    gain,
)
from recon_core.summary import compare


def scores(shift: float) -> dict[str, Any]:
    """40 images of 4 runs: method `edm_x2` gains `shift`, and twice as much in one run of two."""
    rng = np.random.default_rng(0)
    run = np.repeat(np.arange(4), 10)
    plain = rng.uniform(0.2, 0.6, 40)
    after = plain + shift * (1 + run % 2) + rng.normal(0, 0.002, 40)
    decoys = rng.uniform(0.1, 0.35, 40)

    def side(values: Any, before: Any) -> dict[str, Any]:
        compared = compare(np.asarray(before), np.asarray(values))
        return {"ssim": list(values), "haarpsi": list(values / 2), "compared_with_plain": compared}

    spread = {"targets": [0.01 if s > 0.4 else 0.05 for s in after], "decoys": [0.08] * 39 + [None]}
    methods = {
        name: {
            "targets": side(values, plain),
            "decoys": side(decoys, decoys),
        }
        for name, values in (
            ("plain", plain),
            ("plain_all", plain + 0.01),
            ("tv", plain + 0.02),
            ("edm_x2", after),
        )
    }
    for name in ("targets", "decoys"):
        methods["edm_x2"][name]["disagreement"] = spread[name]
    return {
        "settings": {"good_threshold": 0.4, "baselines": ["tv"]},
        "targets": {"victim": run.tolist()},
        "methods": methods,
    }


def test_gains_are_paired_and_victims_vary_more_than_images() -> None:
    found = gain(scores(0.05), "edm_x2")
    assert found.ssim == pytest.approx(0.075, abs=0.001)
    assert found.haarpsi == pytest.approx(found.ssim / 2)
    assert found.ssim_interval[0] < found.ssim < found.ssim_interval[1]
    width = found.ssim_interval[1] - found.ssim_interval[0]
    of_victims = found.ssim_interval_of_victims
    assert of_victims is not None
    assert of_victims[1] - of_victims[0] > 2 * width
    assert found.ssim_at_all == pytest.approx(found.ssim - 0.01)
    assert (found.n_better, found.n_worse) == (40, 0)
    over, interval = found.ssim_over["tv"]
    assert over == pytest.approx(found.ssim - 0.02)
    assert interval == pytest.approx([end - 0.02 for end in found.ssim_interval])
    assert gain(scores(-0.05), "edm_x2").ssim_interval[1] < 0


def test_disagreement_is_told_apart_by_what_came_back() -> None:
    found = disagreement(scores(0.05), "edm_x2")
    assert found is not None
    assert (found.good, found.others) == pytest.approx((0.01, 0.05))
    assert found.decoys == pytest.approx(0.08)  # the one without a picture is left out
    assert found.decoys_interval == pytest.approx((0.08, 0.08))
    assert disagreement(scores(0.05), "plain") is None

"""recovery.json and its pictures: what units gave, cell by cell; and what a study will take."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recon_core.similarity import ACCURATE, THRESHOLDS
from tasks.families.autoencoder.study.plan import RecoveryPlan
from tasks.families.autoencoder.study.record import (
    describe_recovery,
    pictures_of,
)
from tasks.study.executor import Outcome
from tests.tasks.families.autoencoder.recoveries import planned, run_here, small_study, small_victim

WITH_BIHARMONIC = replace(small_study().methods, biharmonic=True)
Made = tuple[RecoveryPlan, Outcome, dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    study = small_study(methods=WITH_BIHARMONIC)
    plan = planned(study, tmp_path_factory.mktemp("study"))
    outcome = run_here(plan)
    return plan, outcome, describe_recovery(plan, outcome)


def test_every_cell_is_there_once(made: Made) -> None:
    _plan, _outcome, record = made
    places = [
        (c["victim"], c["level"], c["mask"], c["sigma"], c["split"], c["method"])
        for c in record["cells"]
    ]
    own = ("iteration", "unknown", "known", "noise_aware")
    methods = (*own, "biharmonic")
    expected = {
        (victim, level, mask, 0.0, "train", method)
        for victim in ("fc-a", "fc-b")
        for level in (0.1, 0.03)
        for mask in ("random", "window")
        for method in methods
    }
    expected |= {("fc-a", lv, "random", 0.02, "train", m) for lv in (0.1, 0.03) for m in methods}
    expected |= {
        (v, 0.03, mask, 0.0, "test", method)
        for v in ("fc-a", "fc-b")
        for mask in ("random", "window")
        for method in own
    }
    assert len(places) == len(set(places))
    assert set(places) == expected
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_the_numbers_of_a_cell_are_of_its_images(made: Made) -> None:
    plan, outcome, record = made
    a, b = plan.study.victims
    for cell in record["cells"]:
        n = {"fc-a": 4, "fc-b": 6}[cell["victim"]]
        mse = np.array(cell["mse"])
        assert cell["n"] == n == len(mse)
        assert cell["n_accurate"] == (mse < ACCURATE).sum()
        assert cell["by_threshold"] == [int((mse < t).sum()) for t in THRESHOLDS]
        decibels = -10 * np.log10(np.maximum(mse, 1e-12))
        assert cell["psnr"][0] == pytest.approx(decibels.mean(), rel=1e-4)
        is_generic = cell["method"] == "biharmonic"
        assert (cell["n_applied"] is None) == (cell["endings"] is None) == is_generic
        if not is_generic:
            assert sum(cell["endings"].values()) == n
        assert (cell["mask_accuracy"] is None) == (cell["method"] not in ("unknown", "noise_aware"))
    job = plan.recoveries(b, outcome.done["train fc-b"])[0.03]
    arrays, _meta = plan.folder.product(job.key) or ({}, {})
    (cell,) = (c for c in record["cells"] if (c["victim"], c["level"], c["mask"], c["method"],
               c["split"]) == ("fc-b", 0.03, "window", "known", "test"))  # fmt: skip
    assert cell["mse"] == pytest.approx(arrays["test 0/known/mse"][1].tolist(), rel=1e-5)
    generic = {c["victim"]: c["mse"] for c in record["cells"]
               if c["method"] == "biharmonic" and c["mask"] == "window"}  # fmt: skip
    assert generic["fc-a"] == generic["fc-b"][:4]  # nested images, one answer
    assert a.n_images == 4


def test_pictures_are_those_that_are_shown(made: Made) -> None:
    plan, outcome, record = made
    with np.load(io.BytesIO(pictures_of(plan, outcome, record))) as file:
        arrays = dict(file)
    groups = [f"{s['victim']}/{s['level']:g}/{s['mask']}/{s['sigma']:g}" for s in record["shown"]]
    assert groups == ["fc-a/0.03/random/0", "fc-a/0.03/window/0", "fc-a/0.03/random/0.02",
                      "fc-b/0.03/random/0", "fc-b/0.03/window/0"]  # fmt: skip
    for shown, group in zip(record["shown"], groups, strict=True):
        assert shown["rows"] == [0, 1]
        original = arrays[f"{group}/original"]
        mask = arrays[f"masks/{shown['mask']}"]
        degraded = arrays[f"{group}/degraded"]
        if not shown["sigma"]:
            assert (degraded == original * mask).all()
        for method in ("iteration", "unknown", "known", "noise_aware", "biharmonic"):
            recovered = arrays[f"{group}/{method}"].astype(np.float64)
            assert recovered.shape == (2, 3, 8, 8)
            mse = ((recovered - original) / 255) ** 2
            told = arrays[f"{group}/{method}/mse"]
            assert mse.mean((1, 2, 3)) == pytest.approx(told, rel=0.02, abs=1e-4)
        assert arrays[f"{group}/mask/unknown"].shape == (2, 8, 8)
        assert f"{group}/mask/known" not in arrays


def test_a_victim_that_failed_or_reached_nothing_is_said(tmp_path: Path) -> None:
    stuck = replace(small_victim().training, epochs=5, levels=(1e-9,))
    study = small_study(victims=(small_victim("fc-stuck", training=stuck), small_victim()))
    plan = planned(study, tmp_path)
    outcome = run_here(plan)
    record = describe_recovery(plan, outcome)
    assert record["victims"][0]["levels"] == []
    assert record["victims"][0]["wanted"] == [1e-9]
    assert {cell["victim"] for cell in record["cells"]} == {"fc-a"}
    done = {name: given for name, given in outcome.done.items() if "fc-a" not in name}
    failed = {"train fc-a": "MemoryError: too large"}
    left = describe_recovery(plan, Outcome(done, failed))
    assert left["failed"] == [{"unit": "train fc-a", "error": "MemoryError: too large"}]
    assert (left["cells"], left["shown"]) == ([], [])
    assert [victim["name"] for victim in left["victims"]] == ["fc-stuck"]

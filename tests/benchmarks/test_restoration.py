"""Gains, operating points and disagreement on scores whose answers are known."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.restore.gains import (
    Learned,
    disagreement,
    draw,
    gain,
    learned,
    operating_points,
)
from benchmarks.results import run_summary
from benchmarks.results.run_summary import parse_run
from recon_core.summary import bootstrap_interval, compare, detect
from storage.checkpoints import save_checkpoint
from tests.benchmarks.pages import build_page
from tests.benchmarks.test_results_page import evaluation


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


def test_the_gain_of_good_images_is_of_those_that_were_good_before() -> None:
    record = scores(0.0)
    before = np.array(record["methods"]["plain"]["targets"]["ssim"])
    after = np.where(before > 0.4, before + 0.03, before + 0.3)
    record["methods"]["edm_x2"]["targets"]["ssim"] = list(after)
    found = gain(record, "edm_x2")
    assert found.ssim > 0.1
    assert (found.ssim_of_good, *(found.ssim_of_good_interval or ())) == pytest.approx([0.03] * 3)
    record["settings"]["good_threshold"] = 0.9
    assert gain(record, "edm_x2").ssim_of_good_interval is None


def test_disagreement_is_told_apart_by_what_came_back() -> None:
    found = disagreement(scores(0.05), "edm_x2")
    assert found is not None
    assert (found.good, found.others) == pytest.approx((0.01, 0.05))
    assert found.decoys == pytest.approx(0.08)  # the one without a picture is left out
    assert found.decoys_interval == pytest.approx((0.08, 0.08))
    assert disagreement(scores(0.05), "plain") is None


def test_operating_points_are_those_of_every_threshold() -> None:
    rng = np.random.default_rng(1)
    targets, decoys = rng.normal(0.4, 0.1, 30), rng.normal(0.3, 0.1, 50)
    false, found = operating_points(targets.tolist(), decoys.tolist())
    assert (false[0], found[0], false[-1], found[-1]) == (0, 0, 1, 1)
    area = float((np.diff(false) * (found[1:] + found[:-1]) / 2).sum())
    assert area == pytest.approx(detect(targets, decoys)["auc"])
    for threshold in (0.25, 0.4):
        point = ((decoys > threshold).mean(), (targets > threshold).mean())
        assert any(np.allclose(point, pair) for pair in zip(false, found, strict=True))


@pytest.mark.parametrize("validation", [[], [(10, 0.3), (20, 0.4)]])
def test_the_figure_is_drawn(validation: list[tuple[int, float]]) -> None:
    titles = {name: name.upper() for name in ("plain", "plain_all", "tv", "edm_x2", "edm")}
    restorer = Learned(n_parameters=9, n_pairs=9, n_examples=9, seconds=1.0,
                       validation_before=0.35 if validation else None,
                       validation=validation)  # fmt: skip
    found = scores(0.05)
    png = draw(found, {"edm": restorer}, titles=titles)
    found["methods"]["edm_x2_projected"] = scores(0.1)["methods"]["edm_x2"]
    assert draw(found, {"edm": restorer}, titles=titles) == png
    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    panels = 3 if validation else 2
    assert image.shape[1] / image.shape[0] == pytest.approx(panels * 4.2 / 3.9, rel=0.01)
    assert (image < 128).any(axis=2).mean() > 0.01
    red, _green, blue = np.moveaxis(image.astype(int), 2, 0)
    orange = red - blue > 40
    for k, shown in enumerate(np.array_split(orange, panels, axis=1)):
        assert shown.sum() > 20, f"panel {k} has nothing in the orange of the second method"


def workspace(root: Path) -> Path:
    (root / "evaluation").mkdir(parents=True)
    (root / "evaluation" / "evaluation.json").write_text(json.dumps(evaluation()))
    card = {
        "n_parameters": 123_456,
        "dataset": {"n_pairs_used": 7_890},
        "n_images": 6400,
        "seconds": 61.5,
        "validation": {"ssim_inputs": 0.31, "ssim_curve": [[50, 0.33], [100, 0.37]]},
    }
    save_checkpoint(root / "restorers" / "edm", "model", {"w": np.zeros(2)}, card)
    return root


@pytest.mark.slow
def test_a_summary_has_gains_learning_and_a_figure(tmp_path: Path) -> None:
    job, out = workspace(tmp_path / "job"), tmp_path / "runs/x.json"
    options = ["--name", "X", "--command", "x", "--curves", str(tmp_path / "x-curves.png")]
    run_summary.main([str(job), *options, "--json", str(out)])
    summary = parse_run(out.read_text(), name=out.name)
    restorer = learned(job)["edm"]
    assert summary.restorers == {"edm": restorer}
    assert restorer.validation == [(50, 0.33), (100, 0.37)]
    with Image.open(tmp_path / "x-curves.png") as figure:
        assert figure.size[0] > 1500
    methods, method = evaluation()["methods"], summary.methods["edm_x3"]
    after, before = (methods[name]["targets"]["ssim"] for name in ("edm_x3", "plain"))
    difference = np.subtract(after, before)
    assert method.gain is not None
    assert method.gain.ssim_interval == pytest.approx(bootstrap_interval(difference))
    assert method.auc == methods["edm_x3"]["detection"]["auc"]
    assert method.disagreement is not None
    assert summary.methods["plain"].gain is None
    page = build_page({"runs/x.json": out.read_text()})
    over, (low, high) = method.gain.ssim_over["tv"]
    assert "| SSIM gained over | `tv` |" in page
    assert f"| `edm_x3` | {over:+.3f} [{low:+.3f}, {high:+.3f}] |" in page
    assert "| `edm` | 123,456 | 7,890 | 6,400 | 61.5 s | 0.310 | 0.370 |" in page
    assert f"{method.gain.ssim:+.3f}" in page
    assert "![X](pictures/x-curves.png)" in page


def test_one_victim_says_nothing_about_others() -> None:
    alone = scores(0.05)
    alone["targets"]["victim"] = [0] * 40
    assert gain(alone, "edm_x2").ssim_interval_of_victims is None

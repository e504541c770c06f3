"""Evaluation: restorers from elsewhere, conventions, and what is only shown."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recon_core.metrics import haarpsi_pairs, ssim_pairs
from storage.pairs.dataset import Dataset
from storage.sources.load import ImageSet
from tasks.evaluation.evaluate import Evaluation, read_excluded
from tasks.evaluation.pictures import choose_examples
from tests.tasks.evaluation.evaluations import (
    N_IMAGES,
    SIZE,
    evaluated_sweep,
    image_set,
    planted_store,
    scored,
)
from tests.tasks.restoring.test_onnx_restorer import model, needs_onnx

CONFIG = Evaluation(grid_rows=5, baselines=())


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return image_set()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, images: ImageSet) -> Dataset:
    """One part of two runs, half of the images planted."""
    return planted_store(tmp_path_factory.mktemp("planted"), images, n_parts=1, planted=2)


def _score(store: Dataset, images: ImageSet, out: Path, **changes: Any) -> dict[str, Any]:
    return scored(out, store, images, replace(CONFIG, **changes))


@needs_onnx
def test_restorers_from_elsewhere_are_methods(
    tmp_path: Path, images: ImageSet, store: Dataset
) -> None:
    path = model(tmp_path / "half.onnx", weight=0.5)
    out = tmp_path / "out"
    record = _score(store, images, out, external={"real_denoise": str(path)})
    assert list(record["methods"]) == ["plain", "plain_all", "vote", "mean_image", "real_denoise"]
    assert record["methods"]["real_denoise"]["kind"] == "external"
    assert record["grid"]["methods"] == ["plain", "vote", "real_denoise"]
    assert record["nothing"]["methods"] == ["plain", "real_denoise"]
    with np.load(out / "pictures.npz") as pictures:
        whole, half = (pictures[f"nothing/{n}"].astype(float) for n in ("plain", "real_denoise"))
        np.testing.assert_allclose(half, whole / 2, atol=1)
    before = record["methods"]["real_denoise"]["targets"]["ssim"]
    model(path, weight=1.0)
    again = _score(store, images, out, external={"real_denoise": str(path)})
    assert again["methods"]["real_denoise"]["targets"]["ssim"] != before  # another file, anew
    assert again["methods"]["real_denoise"]["targets"]["ssim"] == pytest.approx(
        again["methods"]["plain"]["targets"]["ssim"], abs=1e-5
    )


@needs_onnx
def test_restorers_from_elsewhere_that_do_not_fit_are_refused(
    tmp_path: Path, images: ImageSet, store: Dataset
) -> None:
    missing = {"mine": str(tmp_path / "none.onnx")}
    with pytest.raises(ValueError, match="is not a file"):
        _score(store, images, tmp_path / "out", external=missing)
    large = model(tmp_path / "large.onnx", shape=("n", 3, 64, 64))
    with pytest.raises(ValueError, match=r"external\.mine: every picture .* is 16 x 16, but .* 64"):
        _score(store, images, tmp_path / "out", external={"mine": str(large)})


def test_images_that_were_left_out_are_listed(
    tmp_path: Path, images: ImageSet, store: Dataset
) -> None:
    out = tmp_path / "evaluation"
    assert read_excluded(out) is None
    rows = [{"image_id": 7, "nearest": 3, "correlation": 0.97}]
    path = tmp_path / "heldout-excluded.json"
    path.write_text(json.dumps({"threshold": 0.95, "rows": rows}))
    excluded = read_excluded(out)
    assert excluded == {"threshold": 0.95, "n": 1, "rows": rows}
    assert _score(store, images, out)["excluded"] is None
    assert scored(out, store, images, CONFIG, excluded=excluded)["excluded"] == excluded
    for content in ("[]", "{}", '{"threshold": 1}', '{"threshold": "a", "rows": []}', "no"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"heldout-excluded\.json .*make it again, or remove"):
            read_excluded(out)


@pytest.mark.parametrize("planted", [0, N_IMAGES])
def test_the_scores_are_those_of_the_pictures(tmp_path: Path, planted: int) -> None:
    """Up to the 8 bits that pictures are kept with; of sweeps whose best attack varies by row."""
    config = Evaluation(n_samples=3, grid_rows=8, appendix_rows=6, baselines=("tv",))
    record = evaluated_sweep(tmp_path, config=config, planted=planted)
    examples = {side: [row for of_bin in record["examples"][side] for row in of_bin]
                for side in ("targets", "decoys")}  # fmt: skip
    assert all(len(rows) == len(set(rows)) for rows in examples.values())
    places = [(side, side, record["grid"]) for side in ("targets", "decoys")]
    places += [("appendix", "targets", record["appendix"])]
    places += [(f"examples_{side}", side, {side: rows, "methods": ["plain"]})
               for side, rows in examples.items()]  # fmt: skip
    with np.load(tmp_path / "out" / "pictures.npz") as pictures:
        assert pictures["appendix/plain"].shape == (6, 3, SIZE, SIZE)
        for place, side, shown in (one for one in places if one[2][one[1]]):
            for method in shown["methods"]:
                found = record["methods"][method][side]
                original, x = (
                    torch.from_numpy(pictures[f"{place}/{name}"]).float() / 255
                    for name in ("original", method)
                )
                for name, scores, within in (
                    ("ssim", ssim_pairs(x, original), 4e-3),
                    ("ssim3", ssim_pairs(x, original, convention="gaussian3"), 6e-3),
                    ("haarpsi", haarpsi_pairs(x, original), 4e-3),
                    ("rmse", (x - original).square().mean((1, 2, 3)).sqrt(), 1e-3),
                ):
                    expected = [found[name][row] for row in shown[side]]
                    np.testing.assert_allclose(scores, expected, atol=within, rtol=0)


def test_examples_are_spread_over_every_bin_of_scores() -> None:
    """20 rows per hundredth of SSIM up to .7, and rows without a picture, which score 0."""
    ssim = [k / 2000 for k in range(1400)] + [0.0] * 9
    side = {"ssim": ssim, "run": [0] * 1400 + [-1] * 9}
    shown = choose_examples({"plain": {"targets": side, "decoys": side}})
    assert shown["edges"] == [-1.0, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0]
    for name, n in (("targets", 8), ("decoys", 4)):
        assert [len(rows) for rows in shown[name]] == [n] * 6
        for (low, high), rows in zip(pairwise(shown["edges"]), shown[name], strict=True):
            scores = [ssim[row] for row in rows]
            assert scores == sorted(scores)
            assert all(low < score <= high for score in scores)
            assert scores[0] < max(low, 0) + 0.002
            assert scores[-1] > min(high, 0.7) - 0.002
            assert max(rows) < 1400
    empty = {"ssim": [0.0, 0.0], "run": [-1, -1]}
    assert choose_examples({"plain": {"targets": empty, "decoys": empty}})["targets"] == [[]] * 6

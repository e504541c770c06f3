"""Recipes on grey pictures: one channel from the source to the page; restorers see it thrice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flows.chain import chain
from flows.generate import generate
from flows.recipe import Recipe
from flows.settings import from_json, resolve, to_json
from storage.errors import StoreMismatchError
from storage.pairs.dataset import Dataset
from storage.sources.load import load_images
from tasks.cluster.workers import Workers
from tasks.dataset.pair_stream import PairExamples
from tasks.restoring.inputs import StorePictures
from tasks.workspace import Workspace

ONE_WORKER = Workers(n_workers=1, device="cpu")


@pytest.mark.slow
def test_grey_goes_from_the_source_to_the_page(
    tiny: Recipe, tmp_path: Path, prefect_server: None
) -> None:
    recipe = replace(tiny, channels=1)
    store = tmp_path / "store"
    products = chain(recipe, store, workers=ONE_WORKER)
    workspace, record = Workspace(store), products["evaluation"]
    for split in ("train", "heldout"):
        dataset = Dataset(workspace.pairs(split))
        assert {receipt.picture for receipt in dataset.receipts} == {(1, 32, 32)}
        assert dataset.verify().ok
    source = load_images(recipe.data, split="heldout", channels=1)
    ids, targets = dataset.column("targets/image_id"), dataset.column("targets/image")
    np.testing.assert_array_equal(targets, source.images[ids])
    restored = {"bf_dncnn", "edm_x1", "edm_x2", "nlm", "tv", "wavelet"}
    assert {"plain", "plain_all", "vote", "mean_image"} | restored == set(record["methods"])
    assert record["methods"]["plain"]["targets"]["summary"]["n"] == len(targets)
    assert "data:image/png" in products["report"].read_text()
    assert json.loads(workspace.recipe.read_bytes())["channels"] == 1

    # Restorers learn from it as from RGB, and a restoring job takes it.
    (batch,) = PairExamples(dataset, batch_size=10_000, seed=0)
    assert batch["condition"].shape[1:] == (3, 32, 32)
    assert bool((batch["target"] == batch["target"][:, :1]).all())
    confident = StorePictures(dataset, np.arange(2), np.zeros(2, np.int64))
    assert [picture.pixels.shape for picture in confident] == [(3, 32, 32)] * 2

    # The store is of grey pictures and stays so; the same recipe finds it finished.
    assert generate(recipe, store, "heldout", workers=ONE_WORKER)["runs"] == recipe.heldout.n_runs
    with pytest.raises(StoreMismatchError):
        generate(replace(recipe, channels=3), store, "heldout", workers=ONE_WORKER)


def test_recipes_from_before_there_was_the_setting_are_rgb(tiny: Recipe) -> None:
    tree = to_json(tiny)
    del tree["channels"]
    assert from_json(tree) == tiny
    assert tiny.images("heldout").images.shape[1] == 3
    assert resolve("smoke", {"channels": "1"}).images("heldout").images.shape[1] == 1
    with pytest.raises(ValueError, match="channels=2"):
        resolve("smoke", {"channels": "2"})

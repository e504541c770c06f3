"""InstaHide's encodings of photographs from images to a report, through real components, tiny."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flows.curate import curate
from flows.evaluate import evaluate
from flows.generate import generate
from flows.presets import preset
from flows.recipe import one_phase
from flows.report import report
from recon_core.attacks.instahide.mixing import InstaHide
from recon_core.attacks.instahide.natural_fit import Refinement
from recon_core.attacks.instahide.practical import Practical
from storage.pairs.dataset import Dataset
from tasks.cluster.workers import Workers
from tasks.workspace import Workspace

ONE_WORKER = Workers(n_workers=1, device="cpu")


@pytest.mark.slow
def test_from_images_to_a_report(prefect_server: None, tmp_path: Path) -> None:
    recipe = preset("instahide-small")
    experiment = replace(
        recipe.experiment,
        n_public=4,
        scheme=InstaHide(k_pub=1, n_epochs=10),
        attack=Practical(refinement=Refinement(n_rounds=4)),
    )
    recipe = replace(
        recipe,
        experiment=experiment,
        sampling=one_phase(2, images=10, per_part=1),
        heldout=one_phase(1, images=10, per_part=1),
        curation=replace(recipe.curation, n_subsets=4),
        evaluation=replace(recipe.evaluation, baselines=()),
    )
    store = tmp_path / "job"
    facts = generate(recipe, store, "train", workers=ONE_WORKER)
    assert facts["task"] == "images of any class, mixed"
    dataset = Dataset(Workspace(store).pairs("train"))
    assert dataset.verify().ok
    assert 0 < dataset.n_pairs <= 2 * 6
    assert not dataset.column("runs/mean_image").any()
    assert set(dataset.column("pairs/iteration").tolist()) == {4}
    assert np.isfinite(dataset.column("runs/train_accuracy")).all()
    assert curate(recipe, store)["n_pairs"] == dataset.n_pairs
    record = evaluate(recipe, store, workers=ONE_WORKER)
    assert record["dataset"]["n_victims"] == 1
    heldout = Dataset(Workspace(store).pairs("heldout"))
    ids = heldout.column("targets/image_id")
    paired = ids[heldout.column("pairs/target_row")]
    targets = record["targets"]["image_id"]
    assert len(targets) == len(record["methods"]["plain"]["targets"]["ssim"]) == 6
    assert len(paired)
    assert set(paired.tolist()) <= set(targets) < set(ids.tolist())  # no public image is scored
    assert "mixtures of private and public pictures" in report(recipe, store).read_text()

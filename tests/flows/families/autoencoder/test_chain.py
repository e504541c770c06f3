"""Autoencoders from images to restored pictures, through real components, tiny."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flows.curate import curate
from flows.evaluate import evaluate
from flows.generate import generate
from flows.presets import preset
from flows.recipe import Recipe, one_phase
from flows.report import report
from flows.train import train
from recon_core.attacks.plug_and_play import KnownMask
from recon_core.balance import Curation
from recon_core.metrics import ssim_pairs
from recon_core.victims.autoencoder import FullyConnected
from recon_core.victims.autoencoder_training import AutoencoderTraining
from storage.pairs.dataset import Dataset
from tasks.cluster.workers import Workers
from tasks.dataset.export import rendered
from tasks.dataset.pair_sheet import pair_sheet
from tasks.dataset.pair_stream import PairExamples
from tasks.training.train import load_restorer
from tasks.workspace import Workspace

ONE_WORKER = Workers(n_workers=1, device="cpu")


@pytest.fixture(scope="module")
def tiny_autoencoders() -> Recipe:
    recipe = preset("autoencoder-demo")
    plan = recipe.restorers["bf_dncnn"]
    quick = replace(plan.training, n_steps=3, batch_size=8)
    return replace(
        recipe,
        encoding="float16",  # which has a scale that must not get lost
        experiment=replace(
            recipe.experiment,
            victim=FullyConnected(depth=3, width=24),
            training=AutoencoderTraining(epochs=60, lr=3e-3, levels=(0.02,)),
            attack=KnownMask(n_admm=10),
            masks=("random", "stripes"),
        ),
        sampling=one_phase(4, images=5, per_part=2),
        heldout=one_phase(2, images=5, per_part=2),
        curation=Curation(n_subsets=4, noise_fraction=0.0),
        restorers={"bf_dncnn": replace(plan, training=quick)},
        evaluation=replace(recipe.evaluation, baselines=()),
    )


@pytest.mark.slow
def test_from_images_to_a_report(prefect_server: None, tiny_autoencoders: Recipe, tmp_path) -> None:
    store, recipe = tmp_path / "job", tiny_autoencoders
    facts = generate(recipe, store, "train", workers=ONE_WORKER)
    assert facts["task"] == "images in, the same images out"
    dataset = Dataset(Workspace(store).pairs("train"))
    assert dataset.verify().ok
    assert dataset.n_targets == 4 * 5
    assert curate(recipe, store)["n_pairs"] == dataset.n_pairs > 0

    names = ["pairs/reconstruction", "pairs/ssim_best", "pairs/iteration", "runs/mean_image"]
    read = dataset.read(0, [*names, "targets/image", "pairs/target_row"])
    own = torch.from_numpy(read["targets/image"][read["pairs/target_row"]]).float() / 255
    mean = np.zeros_like(read["pairs/reconstruction"])
    shown = torch.from_numpy(rendered(read["pairs/reconstruction"], mean)).float() / 255
    torch.testing.assert_close(
        ssim_pairs(shown, own), torch.from_numpy(read["pairs/ssim_best"]), atol=5e-3, rtol=0
    )
    assert set(read["pairs/iteration"].tolist()) == {10}
    examples = PairExamples(dataset, batch_size=dataset.n_pairs, seed=0)
    (batch,) = list(examples)
    all_pictures = dataset.column("pairs/reconstruction")
    np.testing.assert_allclose(
        np.sort(((batch["condition"] + 1) / 2).mean(dim=(1, 2, 3)).numpy()),
        np.sort(all_pictures.mean(axis=(1, 2, 3))),
        atol=5e-4,
    )
    assert pair_sheet(dataset, n=3).iterations == (10,)

    train(recipe, store, device="cpu")
    restorer, net = load_restorer(Workspace(store).restorer("bf_dncnn"), device="cpu")
    assert restorer.restore(net, shown[:2], n_samples=1, seeds=torch.arange(2)).shape == (
        1,
        2,
        3,
        32,
        32,
    )
    record = evaluate(recipe, store, workers=ONE_WORKER)
    assert record["dataset"]["n_victims"] == 2
    assert len(record["methods"]["plain"]["targets"]["ssim"]) == 2 * 5
    assert set(record["methods"]) >= {"plain", "vote", "bf_dncnn"}
    assert "one degraded copy of each training picture" in report(recipe, store).read_text()

"""The whole chain through real components, small; and that nothing finished is repeated."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flows.chain import chain, curate, evaluate, report, summary_rows, train
from flows.generate import generate
from flows.presets import preset
from flows.recipe import Recipe, one_phase
from flows.settings import resolve
from recon_core.attacks.instahide.mixing import InstaHide
from recon_core.attacks.instahide.natural_fit import Practical
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.plug_and_play import KnownMask
from recon_core.attacks.span.attack import SpanAttack
from recon_core.metrics import ssim_pairs
from recon_core.victims.autoencoder import FullyConnected
from recon_core.victims.autoencoder_training import AutoencoderTraining
from recon_core.victims.training import Optimiser
from storage.errors import StorageError, StoreMismatchError
from storage.pairs.dataset import Dataset
from storage.sources.load import load_images
from tasks.campaign.plan import VICTIMS
from tasks.cluster.workers import Workers
from tasks.dataset.curate import NothingToLearnError
from tasks.dataset.export import rendered
from tasks.dataset.pair_sheet import pair_sheet
from tasks.dataset.pair_stream import PairExamples
from tasks.workspace import Workspace
from tests.storage.s3_server import S3Server
from tests.tasks.evaluation.evaluations import N_IMAGES, evaluated_sweep

SHORT = SpanAttack(n_independent=20, overcomplete=1.0)
ONE_WORKER = Workers(n_workers=1, device="cpu")
TWO_WORKERS = Workers(n_workers=2, device="cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prefect_server: None, tiny: Recipe):
    root = tmp_path_factory.mktemp("chain") / "store"
    return Workspace(root), chain(tiny, root, workers=TWO_WORKERS)


def test_every_station_left_its_product(finished, tiny: Recipe) -> None:
    workspace, products = finished
    assert Dataset(workspace.pairs("train")).verify().ok
    assert Dataset(workspace.pairs("heldout")).n_runs == tiny.heldout.n_runs
    assert json.loads(workspace.curation.read_text())["n_images"] > 0
    assert set(products["restorers"]) == set(tiny.restorers)
    rows = {row["method"]: row for row in summary_rows(products["evaluation"])}
    classical = {"nlm", "tv", "wavelet"}
    trained = {"bf_dncnn", "edm_x1", "edm_x2"}
    assert {"plain", "plain_all", "vote", "mean_image"} | trained | classical == set(rows)
    assert rows["plain"]["good"].endswith(f"/{2 * 4}")
    page = products["report"].read_text()
    assert page.startswith("<!doctype html>")
    assert f"{rows['plain']['SSIM']:.2f}"[1:] in page


def test_heldout_victims_saw_no_image_that_a_restorer_learned_from(finished) -> None:
    workspace, _ = finished
    learned = {im.tobytes() for im in Dataset(workspace.pairs("train")).column("targets/image")}
    judged = {im.tobytes() for im in Dataset(workspace.pairs("heldout")).column("targets/image")}
    assert judged
    assert not learned & judged


def test_a_second_run_repeats_nothing(finished, tiny: Recipe) -> None:
    workspace, products = finished

    def stamps() -> dict[Path, int]:
        kept = [*workspace.root.rglob("*.json"), *workspace.root.rglob("*.safetensors")]
        changing = {workspace.recipe, workspace.root / "timings.json"}
        data = workspace.evaluation / "report-data"  # of the page, which is made anew
        return {
            path: path.stat().st_mtime_ns
            for path in kept
            if path not in changing and path.parent != data
        }

    before = stamps()
    again = chain(tiny, workspace.root, workers=TWO_WORKERS)
    assert stamps() == before
    assert again["evaluation"] == products["evaluation"]
    assert again["pairs"] == products["pairs"]


def test_other_settings_are_refused_and_the_store_stays_as_it_was(finished, tiny: Recipe) -> None:
    workspace, _ = finished
    content = Dataset(workspace.pairs("train")).content_hash
    recipe_before = workspace.recipe.read_text()
    other = replace(tiny, experiment=replace(tiny.experiment, augment_p=0.5))
    with pytest.raises(StoreMismatchError, match=r"augment_p is 0\.12 there, 0\.5 here"):
        chain(other, workspace.root, workers=TWO_WORKERS)
    assert workspace.recipe.read_text() == recipe_before
    assert Dataset(workspace.pairs("train")).content_hash == content


def test_stages_out_of_order_say_which_comes_first(prefect_server, tiny: Recipe, tmp_path) -> None:
    with pytest.raises(StorageError, match="is not a store"):
        curate(tiny, tmp_path)
    with pytest.raises(StorageError, match="palimpsest evaluate --store"):
        report(tiny, tmp_path)
    with pytest.raises(ValueError, match="unknown restorer 'edn'; did you mean 'edm'"):
        train(tiny, tmp_path, only="edn")


def test_too_few_images_for_decoys_are_told_before_anything_starts(
    prefect_server: None, tiny: Recipe, tmp_path: Path
) -> None:
    n_images = len(tiny.images("heldout").images)
    heldout = one_phase(20 * n_images, images=tiny.heldout.images_per_run, per_part=1)
    with pytest.raises(ValueError, match=rf"of the {n_images} images .* use fewer runs"):
        chain(replace(tiny, heldout=heldout), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_store_without_confident_pairs_cannot_train(finished, tiny: Recipe) -> None:
    workspace, _ = finished
    late = replace(tiny, curation=replace(tiny.curation, min_iteration=10_000))
    with pytest.raises(NothingToLearnError, match="iteration 10000 or later"):
        curate(late, workspace.root)
    curate(tiny, workspace.root)


def test_every_table_has_the_numbers_of_the_record(tmp_path: Path) -> None:
    record = evaluated_sweep(tmp_path)
    scores = {row["method"]: row for row in summary_rows(record)}
    assert list(scores) == list(record["methods"])
    assert scores["plain"]["good"] == f"{2 * N_IMAGES}/{2 * N_IMAGES}"


def test_restorers_from_elsewhere_are_opened_before_a_victim_is_attacked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_given: object) -> None:
        raise AssertionError("attacked")

    monkeypatch.setattr("flows.chain._attacked", never)
    absent = {"evaluation.external.mine": str(tmp_path / "absent.onnx")}
    with pytest.raises((ValueError, StorageError), match=r"absent\.onnx"):
        evaluate(resolve("smoke", absent), tmp_path / "store")


@pytest.mark.slow
def test_pairs_on_s3_are_the_pairs_on_disk(
    finished, tiny: Recipe, s3: S3Server, tmp_path: Path
) -> None:
    """The same job with its pairs in a bucket; later commands find them there."""
    elsewhere = replace(tiny, pairs_at=s3.location("job"))
    store = tmp_path / "job"
    facts = generate(elsewhere, store, "train", workers=TWO_WORKERS)
    seconds = {"worker seconds": 0}
    assert facts | seconds == finished[1]["pairs"] | seconds
    assert not (store / "pairs").exists()
    pairs = Workspace.found(store).pairs("train")
    assert pairs == s3.location("job/pairs")
    assert Dataset(pairs).verify().ok
    assert curate(elsewhere, store)["dataset_hash"] == facts["dataset hash"]
    with pytest.raises(StoreMismatchError, match=r"at s3://.*, not in the folder itself"):
        generate(tiny, store, "train", workers=TWO_WORKERS)


def test_heldout_images_are_not_near_copies_of_training_images(
    prefect_server: None, tiny: Recipe, tmp_path: Path
) -> None:
    tiles = load_images("photos", split="train").images
    for split, rows in (("train", range(24)), ("test", range(12, 36))):
        for k in rows:
            folder = tmp_path / "tiles" / split / ("a" if k % 2 else "b")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(tiles[k].transpose(1, 2, 0)).save(folder / f"{k:02d}.png")
    recipe = replace(tiny, data=f"folder:{tmp_path / 'tiles'}", near_duplicates=0.99, restorers={})
    store = tmp_path / "job"
    generate(recipe, store, "heldout", workers=ONE_WORKER)
    told = json.loads((store / "heldout-excluded.json").read_bytes())
    assert told["n"] >= 12
    assert all(row["correlation"] > 0.99 for row in told["rows"])
    dataset = Dataset(Workspace(store).pairs("heldout"))
    learned = {tile.tobytes() for tile in tiles[:24]}
    attacked = {image.tobytes() for image in dataset.column("targets/image")}
    assert attacked
    assert not attacked & learned
    assert dataset.manifest["source"]["n"] == 24 - told["n"]


@pytest.mark.slow
def test_an_attack_that_separates_goes_through_every_station(
    prefect_server: None, tiny: Recipe, tmp_path: Path
) -> None:
    """Its pairs train restorers of a search's."""
    searched = replace(tiny.experiment, attack=KKTAttack(save_at=(10, 20)))
    recipe = replace(
        tiny,
        experiment=replace(tiny.experiment, attack=SHORT),
        heldout_experiment=searched,
        restorers={"bf_dncnn": tiny.restorers["bf_dncnn"]},
        evaluation=replace(tiny.evaluation, baselines=()),
    )
    store = tmp_path / "job"
    products = chain(recipe, store, workers=ONE_WORKER)
    workspace = Workspace(store)
    learned, judged = (Dataset(workspace.pairs(split)) for split in ("train", "heldout"))
    assert learned.verify().ok
    assert set(learned.column("pairs/iteration").tolist()) == {0}
    assert set(judged.column("pairs/iteration").tolist()) == {10, 20}
    rows = {row["method"]: row for row in summary_rows(products["evaluation"])}
    assert set(rows) == {"plain", "plain_all", "vote", "mean_image", "bf_dncnn"}
    assert products["evaluation"]["methods"]["plain_all"]["targets"]["ssim"]
    assert products["report"].read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_victims_are_trained_once_and_attacked_in_further_ways(
    finished, tiny: Recipe, tmp_path: Path
) -> None:
    """From nothing, the first store being what it is without; and on victims that were attacked
    before, whose receipts have the time of training, too."""
    workspace, products = finished
    evaluation = replace(tiny.evaluation, baselines=())
    recipe = replace(tiny, further_attacks=(SHORT,), restorers={}, evaluation=evaluation)
    anew, before = Workspace(tmp_path / "anew"), Workspace(tmp_path / "before")
    shutil.copytree(workspace.pairs("heldout"), before.pairs("heldout"))
    records = []
    for job in (anew, before):
        records.append(evaluate(recipe, job.root, workers=TWO_WORKERS))
        own, further = (Dataset(job.pairs("heldout", kind)) for kind in (None, "span"))
        assert own.content_hash == Dataset(workspace.pairs("heldout")).content_hash
        assert further.verify().ok
        assert set(further.column("pairs/iteration").tolist()) == {0}
        assert further.column("targets/margin").tolist() == own.column("targets/margin").tolist()
        kept = own if job is anew else further
        victims = sorted((Path(kept.root) / VICTIMS).glob("*.safetensors"))
        assert len(victims) == 2
        log = next((Path(kept.root) / "logs").glob("part-000000-*")).read_text()
        assert 0 < log.index(" train  ") < log.index(" attack  "), "before the seconds count"
        assert (job.evaluation / "attacks.png").read_bytes().startswith(b"\x89PNG")
    known = [[attack["seconds"] is not None for attack in r["attacks"]] for r in records]
    assert known == [[True, True], [False, True]]
    assert records[0]["methods"] == records[1]["methods"]
    assert records[0]["methods"]["plain"] == products["evaluation"]["methods"]["plain"]
    table = {row["method"]: row for row in summary_rows(records[0])}
    assert float(table["plain_span"]["SSIM"]) > 0
    page = report(recipe, anew.root).read_text()
    assert '<tr data-attack="plain_span"><th scope="row">Span attack</th>' in page


@pytest.mark.slow
def test_victims_whose_span_is_asked_for_are_kept(
    tmp_path: Path, prefect_server: None, tiny: Recipe
) -> None:
    training = replace(tiny.experiment.training, optimiser=Optimiser(rule="gd", lr=0.05))
    recipe = replace(
        tiny,
        experiment=replace(
            tiny.experiment, attack=replace(SHORT, start="known"), training=training
        ),
        evaluation=replace(tiny.evaluation, baselines=("tv",), span=True),
    )
    record = evaluate(recipe, tmp_path, workers=TWO_WORKERS)
    heldout = Path(Workspace(tmp_path).pairs("heldout"))
    assert len(list((heldout / VICTIMS).glob("*.safetensors"))) == 2
    table = {row["method"]: row for row in summary_rows(record)}
    assert list(table)[-1] == "oracle"
    closed = record["span"]["headroom_closed"]
    assert table["tv_projected"]["headroom"] == round(closed["tv_projected"], 3)
    assert "headroom" not in table["oracle"]
    assert table["oracle"]["SSIM"] > table["plain"]["SSIM"]


def small_family(name: str) -> Recipe:
    """A recipe of another family, of some seconds."""
    recipe = preset(name)
    if name == "instahide-small":
        attack = Practical(n_rounds=4)
        changes = {"n_public": 4, "scheme": InstaHide(k_pub=1, n_epochs=10), "attack": attack}
        more = {"sampling": one_phase(2, images=10, per_part=1),
                "heldout": one_phase(1, images=10, per_part=1)}  # fmt: skip
    else:
        training = AutoencoderTraining(epochs=60, lr=3e-3, levels=(0.02,))
        changes = {"victim": FullyConnected(depth=3, width=24), "training": training,
                   "attack": KnownMask(n_admm=10), "masks": ("random", "stripes")}  # fmt: skip
        plan = recipe.restorers["bf_dncnn"]
        quick = replace(plan, training=replace(plan.training, n_steps=3, batch_size=8))
        more = {"sampling": one_phase(4, images=5, per_part=2), "restorers": {"bf_dncnn": quick},
                "heldout": one_phase(2, images=5, per_part=2),
                "encoding": "float16"}  # fmt: skip  # which has a scale that must not get lost
    return replace(
        recipe,
        experiment=replace(recipe.experiment, **changes),
        curation=replace(recipe.curation, n_subsets=4),
        evaluation=replace(recipe.evaluation, baselines=()),
        **more,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "iteration", "n_scored", "said"),
    [
        ("autoencoder-demo", "images in, the same images out", 10, 2 * 5,
         "one degraded copy of each training picture"),
        ("instahide-small", "images of any class, mixed", 4, 6,
         "mixtures of private and public pictures"),
    ],
)  # fmt: skip
def test_another_family_goes_from_images_to_a_report(
    name: str, task: str, iteration: int, n_scored: int, said: str, prefect_server, tmp_path: Path
) -> None:
    store, recipe = tmp_path / "job", small_family(name)
    products = chain(recipe, store, workers=ONE_WORKER)
    assert products["pairs"]["task"] == task
    dataset = Dataset(Workspace(store).pairs("train"))
    assert dataset.verify().ok
    assert products["balance"]["n_pairs"] == dataset.n_pairs > 0
    assert set(dataset.column("pairs/iteration").tolist()) == {iteration}
    record = products["evaluation"]
    assert set(record["methods"]) >= {"plain", "vote", *recipe.restorers}
    assert len(record["methods"]["plain"]["targets"]["ssim"]) == n_scored
    heldout = Dataset(Workspace(store).pairs("heldout"))
    ids = heldout.column("targets/image_id")
    paired = set(ids[heldout.column("pairs/target_row")].tolist())
    scored = set(record["targets"]["image_id"])
    assert paired <= scored <= set(ids.tolist())
    assert (scored == set(ids.tolist())) == (name != "instahide-small")  # nothing public is scored
    assert said in products["report"].read_text()

    if name == "autoencoder-demo":
        check_scale(dataset)


def check_scale(dataset: Dataset) -> None:
    """Pictures have the scores of the store when they are shown, and their scale when learned."""
    names = ["pairs/reconstruction", "pairs/ssim_best", "targets/image", "pairs/target_row"]
    pictures, best, images, rows = dataset.read(0, names).values()
    own = torch.from_numpy(images[rows]).float() / 255
    shown = torch.from_numpy(rendered(pictures, np.zeros_like(pictures))).float() / 255
    torch.testing.assert_close(ssim_pairs(shown, own), torch.from_numpy(best), atol=5e-3, rtol=0)
    (batch,) = PairExamples(dataset, batch_size=dataset.n_pairs, seed=0)
    learned = ((batch["condition"] + 1) / 2).mean(dim=(1, 2, 3)).numpy()
    every = dataset.column("pairs/reconstruction").mean(axis=(1, 2, 3))
    np.testing.assert_allclose(np.sort(learned), np.sort(every), atol=5e-4)
    assert [title for title, _ in pair_sheet(dataset, n=3).strips] == ["original", "reconstruction"]


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

    # Restorers learn from it as from RGB.
    (batch,) = PairExamples(dataset, batch_size=10_000, seed=0)
    assert batch["condition"].shape[1:] == (3, 32, 32)
    assert bool((batch["target"] == batch["target"][:, :1]).all())

    # The store is of grey pictures and stays so; the same recipe finds it finished.
    assert generate(recipe, store, "heldout", workers=ONE_WORKER)["runs"] == recipe.heldout.n_runs
    with pytest.raises(StoreMismatchError):
        generate(replace(recipe, channels=3), store, "heldout", workers=ONE_WORKER)

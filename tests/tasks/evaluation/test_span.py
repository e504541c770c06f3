"""Evaluation inside the span: real victims, small enough to be trained here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recon_core.attacks.kkt.attacks import Attack
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.span.attack import SpanAttack
from recon_core.experiments import KKT, InstaHideRecovery
from recon_core.metrics import ssim_matrix
from recon_core.sampling import Phase, Sampling
from recon_core.victims.network import Conv, Network, Released
from recon_core.victims.training import Optimiser
from recon_core.victims.training import Training as VictimTraining
from storage.pairs.dataset import Dataset
from storage.sources.load import ImageSet
from tasks.campaign.part import PartJob, batch_of, run_part
from tasks.campaign.plan import (
    VICTIMS,
    Campaign,
    Plan,
    VictimFiles,
    open_store,
    version_key,
    victims_key,
)
from tasks.evaluation.evaluate import Evaluation
from tasks.evaluation.scores import Bench
from tasks.evaluation.settings import check_span
from tests.tasks.evaluation.evaluations import Blender, image_set, planted_store, scored

SHORT = SpanAttack(start="known", n_independent=20, overcomplete=1.0)
CONFIG = Evaluation(baselines=("tv",), n_samples=3, grid_rows=6, span=True)
N = 6


def _experiment(attack: Attack = SHORT, **changes: Any) -> KKT:
    training = VictimTraining(epochs=300, optimiser=Optimiser(rule="gd", lr=0.05))
    victim = Network(widths=(24, 8))
    made = KKT(victim=victim, training=training, attack=attack, keep="all", augment_p=0.0)
    return replace(made, **changes)


def _store(
    root: Path, images: ImageSet, experiment: KKT, *, kept: bool = False, attacks: int = 1
) -> Dataset:
    """Two victims of six images each, attacked here; `kept`: in the store's folder."""
    phases = (Phase(n_runs=2 * attacks),)
    sampling = Sampling(
        images_per_run=N, phases=phases, runs_per_part=1, attacks_per_victim=attacks
    )
    campaign = Campaign(experiment=experiment, sampling=sampling, root_seed=5)
    plan = Plan(campaign, images)
    open_store(root, campaign, images)
    victims = (str(root / VICTIMS), victims_key(campaign.manifest(images))) if kept else None
    for part in range(sampling.n_parts):
        planned = plan.part(part)
        run_part(
            PartJob(
                root=str(root),
                planned=planned,
                images=batch_of(planned.specs, images.images),
                fingerprint=campaign.fingerprint(images),
                source_hash=images.content_hash,
                device="cpu",
                threads=1,
                victims=victims,
                train_first=kept,
            )
        )
    return Dataset(root)


SEARCH = KKTAttack(n_candidates=2 * N, save_at=(20,))


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return image_set()


def _scored(
    out: Path, store: Dataset, images: ImageSet, config: Evaluation = CONFIG
) -> dict[str, Any]:
    blenders = {"bf_dncnn": Blender(1), "edm": Blender()}
    return scored(out, store, images, config, blenders=blenders)


def _mean_ssim(record: dict[str, Any], name: str, side: str = "targets") -> float:
    return float(record["methods"][name][side]["summary"]["mean_ssim"])


def _outside(pictures: Tensor, targets: Tensor) -> float:
    """Root mean square of what of the pictures no combination of the centred targets gives."""
    mean = targets.mean(0)
    basis = torch.linalg.svd((targets - mean).flatten(1), full_matrices=False).Vh[: N - 1]
    flat = (pictures - mean).flatten(1)
    return float((flat - flat @ basis.mT @ basis).square().mean().sqrt())


Made = tuple[Path, Dataset, dict[str, Any]]


def _made(folder: Path, images: ImageSet, attack: Attack) -> Made:
    store = _store(folder / "store", images, _experiment(attack))
    return folder / "out", store, _scored(folder / "out", store, images)


@pytest.fixture(scope="module")
def separated(tmp_path_factory: pytest.TempPathFactory, images: ImageSet) -> Made:
    return _made(tmp_path_factory.mktemp("separated"), images, SHORT)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, images: ImageSet) -> Made:
    return _made(tmp_path_factory.mktemp("searched"), images, SEARCH)


@pytest.mark.parametrize("made", ["separated", "searched"])
def test_every_method_has_a_twin_in_the_span_of_the_images(
    request: pytest.FixtureRequest, images: ImageSet, made: str
) -> None:
    out, _store, record = request.getfixturevalue(made)
    twins = {m: f"{m}_projected" for m in ("plain", "tv", "bf_dncnn", "edm_x1", "edm_x3")}
    others = {"plain_all", "vote", "mean_image", "oracle"}
    assert set(record["methods"]) == {*twins, *twins.values(), *others}
    assert {record["methods"][twin]["kind"] for twin in twins.values()} == {"projected"}
    assert "disagreement" in record["methods"]["edm_x3_projected"]["targets"]
    grid = record["grid"]
    assert "tv_projected" not in grid["methods"]  # as classical denoisers
    assert grid["methods"][-1] == "oracle"
    rows = [k for k in grid["targets"] if record["targets"]["victim"][k] == 0]
    shown = [place for place, k in enumerate(grid["targets"]) if k in rows]
    ids = record["targets"]["image_id"][:N]
    targets = torch.from_numpy(images.images[ids]).double() / 255
    with np.load(out / "pictures.npz") as pictures:
        for method in ("bf_dncnn", "edm_x1", "edm_x3"):
            before, after = (
                _outside(torch.from_numpy(pictures[f"targets/{m}"][shown]).double() / 255, targets)
                for m in (method, twins[method])
            )
            assert after < 0.01
            assert before > 0.02


def test_the_oracle_is_the_images_on_their_span_and_judges_decoys_by_the_same_pictures(
    separated: Made, images: ImageSet
) -> None:
    _out, _store, record = separated
    oracle = record["methods"]["oracle"]
    assert oracle["kind"] == "oracle"
    np.testing.assert_allclose(oracle["targets"]["ssim"], 1, atol=1e-3)
    assert set(oracle["targets"]["run"]) == {-1}
    assert oracle["halves"] is None
    for victim in range(2):
        rows = slice(victim * N, (victim + 1) * N)
        targets, decoys = (
            torch.from_numpy(images.images[record[side]["image_id"][rows]]).float() / 255
            for side in ("targets", "decoys")
        )
        best = ssim_matrix(targets, decoys).amax(0)
        np.testing.assert_allclose(oracle["decoys"]["ssim"][rows], best, atol=1e-3)
    closed = record["span"]["headroom_closed"]
    before, after = _mean_ssim(record, "plain"), _mean_ssim(record, "bf_dncnn_projected")
    share = (after - before) / (_mean_ssim(record, "oracle") - before)
    assert closed["bf_dncnn_projected"] == pytest.approx(share, abs=1e-5)
    assert record["span"]["n_directions"] == [N - 1, N - 1]
    assert not {"oracle", "plain"} & set(closed)


def test_samples_are_projected_before_their_mean_is_taken(tmp_path: Path, images: ImageSet) -> None:
    pictures = torch.from_numpy(images.images[:5]).float() / 255
    seeds, restorer = torch.arange(5), Blender()
    samples = restorer.restore(
        nn.Identity(), pictures, n_samples=3, seeds=seeds, progress=lambda _done: None
    )

    def project(given: Tensor) -> Tensor:
        return (given - 0.5).sign() / 2 + 0.5

    bench = Bench(
        config=CONFIG,
        dataset=planted_store(tmp_path / "store", images, n_parts=1),
        heldout=images,
        restorers={},
        device="cpu",
        load=lambda _path, _device: (restorer, nn.Identity()),
        loaded={"edm": (restorer, nn.Identity())},
    )
    made = replace(bench, project=project).restore("edm", pictures, seeds)
    assert list(made) == ["edm_x1", "edm_x1_projected", "edm_x3", "edm_x3_projected"]
    torch.testing.assert_close(made["edm_x3"].images, samples.mean(0))
    torch.testing.assert_close(made["edm_x1_projected"].images, project(samples[0]))
    torch.testing.assert_close(made["edm_x3_projected"].images, project(samples).mean(0))
    spread, twins = made["edm_x3"].spread, made["edm_x3_projected"].spread
    assert spread is not None
    assert twins is not None
    assert twins.max() > 2 * spread.max()
    assert set(bench.restore("edm", pictures, seeds)) == {"edm_x1", "edm_x3"}
    again = replace(CONFIG, span=True, rounds=3)
    one = (Blender(n_given=1), nn.Identity())
    taking_turns = replace(bench, config=again, project=project, loaded={"edm": one})
    expected = pictures
    for _ in range(3):
        (expected,) = one[0].restore(
            one[1], expected, n_samples=1, seeds=seeds, progress=lambda _done: None
        )
        expected, last = project(expected), expected
    found = taking_turns.restore("edm", pictures, seeds)
    torch.testing.assert_close(found["edm_projected"].images, expected)
    assert not torch.equal(found["edm"].images, last)


def test_nothing_changes_where_the_span_is_not_asked_for(
    tmp_path: Path, separated: Made, images: ImageSet
) -> None:
    _out, store, asked = separated
    record = _scored(tmp_path, store, images, replace(CONFIG, span=False))
    assert "span" not in record
    assert not [name for name in record["methods"] if "projected" in name or name == "oracle"]
    assert asked["settings"]["span"] is True
    for name, method in record["methods"].items():
        assert asked["methods"][name] == method
    later = _scored(tmp_path, store, images)  # in the same folder, beside the other's checkpoints
    assert later["methods"] == asked["methods"]


@pytest.mark.slow
def test_kept_victims_are_read_and_others_trained_again_to_the_same_scores(
    tmp_path: Path, images: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = _experiment(SEARCH)
    config = replace(CONFIG, baselines=())
    made = {
        kept: _store(tmp_path / str(kept), images, experiment, kept=kept, attacks=2)
        for kept in (True, False)
    }
    again = _scored(tmp_path / "again", made[False], images, config)

    def refuse(*_given: Any, **_more: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(KKT, "train_runs", refuse)
    read = _scored(tmp_path / "read", made[True], images, config)
    assert read["methods"] == again["methods"]
    assert read["span"]["n_directions"] == [N - 1, N - 1]
    (tmp_path / "again" / "evaluation.json").unlink()
    found = _scored(tmp_path / "again", made[False], images, config)  # from checkpoints
    assert [found[part] for part in ("methods", "span")] == [again["methods"], again["span"]]


def test_another_network_than_the_one_that_was_attacked_is_refused(
    tmp_path: Path, images: ImageSet
) -> None:
    store = _store(tmp_path / "store", images, _experiment(), kept=True)
    receipt = store.receipts[0]
    key = version_key(
        victims_key(store.manifest), receipt.code_version, receipt.torch_version, receipt.device
    )
    files = VictimFiles(tmp_path / "store" / VICTIMS, key)
    other = files.get(1)
    assert other is not None
    files.put(0, other)
    with pytest.raises(
        ValueError, match=r"victim 0 of .* it is another one.*evaluation\.span to fal"
    ):
        _scored(tmp_path / "out", store, images)


def test_the_span_is_that_of_the_weights_that_the_attacker_is_given(
    tmp_path: Path, images: ImageSet
) -> None:
    experiment = _experiment(SEARCH, released=Released(noise=0.5))
    store = _store(tmp_path / "store", images, experiment)
    record = _scored(tmp_path / "out", store, images, replace(CONFIG, baselines=()))
    assert _mean_ssim(record, "oracle") < 0.97


def test_without_a_span_pictures_are_left_as_they_are_and_the_oracle_is_0(
    tmp_path: Path, images: ImageSet
) -> None:
    training = VictimTraining(epochs=1, optimiser=Optimiser(rule="gd", lr=1e-6))
    store = _store(tmp_path / "store", images, _experiment(SEARCH, training=training))
    record = _scored(tmp_path / "out", store, images)
    assert record["span"]["n_directions"] == [0, 0]
    assert record["span"]["n_without"] == 2
    assert set(record["span"]["headroom_closed"].values()) == {None}
    assert _mean_ssim(record, "oracle") == _mean_ssim(record, "oracle", "decoys") == 0
    assert _mean_ssim(record, "tv") > 0
    for name in ("plain", "tv", "edm_x3"):
        twin = record["methods"][f"{name}_projected"]
        assert twin["targets"]["ssim"] == record["methods"][name]["targets"]["ssim"]


def test_a_span_that_cannot_be_had_is_refused(tmp_path: Path, images: ImageSet) -> None:
    store = planted_store(tmp_path / "store", images, n_parts=1)
    with pytest.raises(
        ValueError, match=r"does not say how its victims.*set evaluation\.span to fal"
    ):
        _scored(tmp_path / "out", store, images)
    with pytest.raises(ValueError, match="convolution of 3x3: its weights span patches"):
        check_span(_experiment(SEARCH, victim=Network(conv=Conv(kernel=3, channels=4))))
    with pytest.raises(ValueError, match="family='instahide': only victims of 'kkt'"):
        check_span(InstaHideRecovery())

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from flows.audit import given
from recon_core.attacks.inversion.feature_matching import Inverted
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from storage.errors import StorageError
from tasks.audit.given import NO_LABELS, NO_START, SHADOWS, GivenPlan
from tasks.audit.plan import ALONE
from tasks.audit.record import describe_audit
from tasks.audit.settings import Audit, GivenWeights
from tasks.study.executor import Outcome
from tests.tasks.audit.networks import Files, N, trained


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return trained(tmp_path_factory.mktemp("network"))


def audit_of(files: Files, *, attacks: Any = None, **weights: Any) -> Audit:
    made = given()
    facts = {"file": str(files.weights), "decoys": files.decoys} | weights
    return dataclasses.replace(
        made,
        data=files.data,
        weights=GivenWeights(**facts),
        defences=made.defences[:1],
        attacks=attacks or made.attacks,
    )


def described(plan: GivenPlan) -> dict[str, Any]:
    """The record's entries, after every unit was made here."""
    units = plan.first_units()
    for unit in units:
        unit.run(unit.job, lambda _fraction: None)
        for more in plan.more_units(unit, {}):
            more.run(more.job, lambda _fraction: None)
    return describe_audit(plan, Outcome({}, {}))


def test_images_come_back_from_a_given_network_and_its_start(files: Files, tmp_path: Path) -> None:
    made = audit_of(files, initial=str(files.initial), attacks=("span", "span_known", "loss"))
    plan = GivenPlan(made, tmp_path, device="cpu")
    record = described(plan)
    assert (record["subject"], record["n_victims"], record["n_images"]) == ("weights", 1, N)
    base = record["cells"][0]
    known = base["attacks"]["span_known"]
    assert known["good_at"]["0.01"]["mean"] > 0.8
    assert known["identified"]["mean"] > 0.8
    assert known["identified_decoys"]["mean"] < 0.3
    unknown = base["attacks"]["span"]["good_at"]["0.01"]["mean"]
    assert unknown <= 3 / N  # the standard start hides them; two with one source for each direction
    assert base["leak"]["attack"] == "span_known"
    assert base["accuracy"]["train"] == 1.0
    low, high = base["leak"]["interval"]
    assert low < base["leak"]["mean"] <= high
    assert record["verdict"]["level"] == "leaks"
    assert {entry["n_in"] for entry in record["exposed"]} == {1}
    assert len(record["exposed"]) == N


def test_the_weights_that_are_attacked_are_those_of_the_file(files: Files, tmp_path: Path) -> None:
    plan = GivenPlan(audit_of(files, attacks=("loss",)), tmp_path, device="cpu")
    _ = described(plan)
    arrays = plan.folder.product(plan.jobs[0].key)
    assert arrays is not None
    stored = load_file(files.weights)
    np.testing.assert_array_equal(arrays[0]["weights/0"][0], stored["1.weight"])
    noisy = plan.folder.product(plan.jobs[1].key)
    assert noisy is not None
    step = noisy[0]["weights/0"] - arrays[0]["weights/0"]
    size = np.sqrt(np.square(arrays[0]["weights/0"]).mean())
    assert np.std(step) == pytest.approx(0.1 * size, rel=0.03)


def test_a_batch_comes_back_from_its_gradients(files: Files, tmp_path: Path) -> None:
    made = audit_of(files, file=str(files.initial), gradients=(str(files.gradients),))
    plan = GivenPlan(made, tmp_path, device="cpu")
    record = described(plan)
    assert (record["subject"], [a["name"] for a in record["attacks"]]) == (
        "gradients",
        ["gradient"],
    )
    base = record["cells"][0]
    assert base["attacks"]["gradient"]["good_at"]["0.01"]["mean"] > 0.8
    assert base["attacks"]["gradient"]["n_good_decoys"] <= 1
    assert base["accuracy"] is None
    assert "the batch's gradients" in record["verdict"]["sentence"]
    assert record["cells"][1]["name"] == "noise of 10 % on the gradients"


def test_features_of_a_given_network_are_those_of_its_layer(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = audit_of(files, attacks=("features", "loss"), std=(0.5, 0.4, 0.25))
    made = dataclasses.replace(made, recipe=dataclasses.replace(made.recipe, cut=1))
    plan = GivenPlan(made, tmp_path, device="cpu")
    asked = {}

    def invert(_self: object, h: Any, z: torch.Tensor, **_more: Any) -> Inverted:
        own = plan.truth.images
        asked["h"], asked["z"] = h(own), z
        nothing = torch.zeros(len(z), dtype=torch.int64)
        return Inverted(own.clone(), torch.zeros(len(z)), nothing, nothing)

    monkeypatch.setattr(StrongInversion, "invert", invert)
    record = described(plan)
    std = torch.tensor([0.5, 0.4, 0.25]).view(3, 1, 1)
    x = ((plan.truth.images - plan.mean) / std).flatten(1)
    expected = (x @ torch.from_numpy(load_file(files.weights)["1.weight"]).T).relu()
    torch.testing.assert_close(asked["h"], expected, rtol=1e-4, atol=1e-5)
    off = (asked["z"] - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(off) == pytest.approx(0.1, rel=0.2)  # the last to be attacked sends noise
    base, noisy = record["cells"]
    assert noisy["name"] == "noise of 10 % on the features"
    assert base["attacks"]["features"]["good_at"]["0.01"]["mean"] == 1.0
    assert "the features of an image" in record["verdict"]["sentence"]


def test_a_checkpoint_gives_back_by_its_state_what_its_weights_hide(
    files: Files, tmp_path: Path
) -> None:
    made = audit_of(files, file=str(files.checkpoint), attacks=("span", "span_state"))
    alone = [d for d in given().defences if d.name == "publish weights alone"]
    made = dataclasses.replace(made, defences=(made.defences[0], *alone))
    plan = GivenPlan(made, tmp_path, device="cpu")
    record = described(plan)
    base, noisy, weights_alone = record["cells"]
    found = base["attacks"]["span_state"]
    assert found["good_at"]["0.01"]["mean"] > 0.8
    assert found["identified"]["mean"] > 0.8
    assert base["attacks"]["span"]["good_at"]["0.01"]["mean"] <= 3 / N
    assert base["leak"]["attack"] == "span_state"
    sentence = record["verdict"]["sentence"]
    assert "the weights and the optimiser's state" in sentence
    assert "From the weights alone, with the start unknown" in sentence
    assert "Publish weights alone, without the optimiser's state." in sentence
    assert weights_alone["name"] == "publish weights alone"
    assert weights_alone["leak"]["mean"] <= 3 / N
    for cell in (noisy, weights_alone):
        assert cell["attacks"]["span_state"] == {"status": "refused", "why": ALONE}
    assert any("without the optimiser's state" in text for text in record["does_not_cover"])


def test_attacks_that_cannot_be_made_say_why(files: Files, tmp_path: Path) -> None:
    plan = GivenPlan(audit_of(files), tmp_path, device="cpu")
    base = plan.study.cells[0]
    why = {name: plan.why_not(base, name) for name in ("likelihood_ratio", "span_known", "loss")}
    assert why == {"likelihood_ratio": SHADOWS, "span_known": NO_START, "loss": None}
    assert "no optimiser's state" in str(plan.why_not(base, "span_state"))
    flat = tmp_path / "flat"  # folders that are no classes
    for name in ("images", "decoys"):
        (flat / name).mkdir(parents=True)
        for path in sorted((files.weights.parent / name).rglob("*.png")):
            (flat / name / path.name).write_bytes(path.read_bytes())
    made = audit_of(files, decoys=f"folder:{flat / 'decoys'}", attacks=("span", "loss"))
    made = dataclasses.replace(made, data=f"folder:{flat / 'images'}")
    plan = GivenPlan(made, tmp_path / "store", device="cpu")
    assert plan.why_not(plan.study.cells[0], "loss") == NO_LABELS
    assert described(plan)["cells"][0]["accuracy"]["test"] is None


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (lambda files, _folder: {"decoys": files.data}, "training images, too"),
        (lambda _files, folder: {"file": str(folder / "no.safetensors")}, "no.safetensors"),
        (lambda _files, _folder: {"std": (0.2, 0.2)}, "2 numbers for 3 channels"),
        (lambda _files, _folder: {"arch": "mlp:3072-10-1"}, "--arch says"),
        (lambda _files, folder: {"gradients": (str(folder / "zero.safetensors"),)}, "zero or not"),
    ],
)
def test_facts_that_do_not_fit_are_refused(
    files: Files, tmp_path: Path, changed: Any, match: str
) -> None:
    zeros = {name: torch.from_numpy(a) * 0 for name, a in load_file(files.gradients).items()}
    save_file(zeros, tmp_path / "zero.safetensors")
    with pytest.raises((ValueError, StorageError), match=match):
        GivenPlan(audit_of(files, **changed(files, tmp_path)), tmp_path, device="cpu")
